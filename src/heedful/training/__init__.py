"""Shared by all trainers: optimizer, metrics, run folder, checkpoints."""
