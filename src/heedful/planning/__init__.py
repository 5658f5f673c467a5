"""Estimate a run's memory from the shapes of its models: no torch, no download."""
