"""The file that vLLM loads into its worker; the folder stands in the server's PYTHONPATH, so nothing else may be in it."""
