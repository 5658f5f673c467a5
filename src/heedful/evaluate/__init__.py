"""Measuring reward models and policies; the same functions serve the command line, tests and trainers' users."""
