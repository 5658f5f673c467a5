"""Send metrics to external trackers (wandb, trackio, MLflow, SwanLab), during a run and after it."""
