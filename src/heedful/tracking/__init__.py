"""Metrics sent to the trackers of others (wandb, trackio, MLflow, SwanLab) while a run trains, and afterwards."""
