"""The decoders that heedful makes tiny models of."""

DECODERS = ("gpt2", "qwen2", "qwen3", "llama")
