"""Checks before training: what is wrong with records, their tokens, models and settings, without a pass through a model."""
