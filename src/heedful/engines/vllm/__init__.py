"""Sampling on vLLM servers with the trainer's weights (docs/vllm.md)."""

SUPPORTED = ("0.32", "0.33")
"""Supported versions of vLLM (docs/vllm.md lists the tests with each)."""
