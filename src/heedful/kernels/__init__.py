"""What makes passes fast and small. Each part computes the same numbers as the plain code that it replaces."""
