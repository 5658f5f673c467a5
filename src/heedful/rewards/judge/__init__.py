"""A language model behind an OpenAI-compatible API as a reward: ``judge:http://HOST/v1#MODEL``."""
