"""Scripts and settings of other libraries as heedful's, with a report of what became of each setting."""
