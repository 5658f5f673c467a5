"""The file that vLLM loads into its worker. The folder is in the server's PYTHONPATH, so it must contain nothing
else."""
