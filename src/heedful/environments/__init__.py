"""Environments that a policy acts in: the user's classes, each instance in a process of its own."""
