"""Responses drawn by vLLM servers, with weights that the trainer gives them (docs/vllm.md)."""
