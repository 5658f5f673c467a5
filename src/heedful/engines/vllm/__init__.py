"""Sampling on vLLM servers with the trainer's weights (docs/vllm.md)."""
