"""Faster and smaller forward and backward passes, with the same results as the plain code they replace."""
