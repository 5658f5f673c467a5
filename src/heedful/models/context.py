"""The longest text that a model can read."""

from typing import Any


def context_length(config: Any) -> int:
    """Number of tokens that a model can read at once; a very large number if its configuration sets no limit.

    The configuration of a model that reads more than text has the limit in its text part.
    """
    config = config.get_text_config(decoder=True)
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, key, None)
        if value:
            return int(value)
    return 2**31
