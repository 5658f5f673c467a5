"""The decoders that heedful makes tiny models of."""

import pytest

DECODERS = ("gpt2", "qwen2", "qwen3", "llama")
one_decoder = pytest.mark.parametrize("decoder", ["qwen3"], indirect=True)
"""Of tests that any decoder does for: the fixture ``decoder`` would give each in turn."""
