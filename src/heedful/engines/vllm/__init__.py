"""Responses drawn by vLLM servers, with weights that the trainer gives them (docs/vllm.md)."""

SUPPORTED = ("0.32", "0.33")
"""Versions of vLLM whose answers are known (docs/vllm.md says what was tried on which)."""
