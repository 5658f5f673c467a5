"""Optimisation: one file an algorithm; what they share are functions."""
