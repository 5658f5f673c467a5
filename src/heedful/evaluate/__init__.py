"""Evaluate reward models and policies; the command line, tests and Python users call the same functions."""
