"""What makes passes fast and small; each computes the same numbers as the plain code that it replaces."""
