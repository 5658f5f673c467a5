"""The longest text that a model can read."""

import functools
import warnings
from typing import Any


def context_length(config: Any) -> int:
    """Number of tokens that a model can read at once; a very large number if its configuration sets no limit.

    The configuration of a model that reads more than text has the limit in its text part. One with LongRoPE (Phi-3.5,
    Phi-4-mini) is used up to the length before its long factors, which a warning says once: beyond it they turn all positions
    of a call, so keys in a cache would not be those of the whole text, and a long row would change the short ones beside it.
    """
    config = config.get_text_config(decoder=True)
    lengths = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    limit = int(next(filter(None, lengths), 2**31))
    first = min(_longrope_lengths(getattr(config, "rope_parameters", None) or {}), default=limit)
    if first < limit:
        _say_capped(config.model_type, first, limit)
    return min(first, limit)


def _longrope_lengths(rope: dict[str, Any]) -> list[int]:
    """The lengths beyond which LongRoPE turns to its long factors; models with kinds of layers have parameters for each."""
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]


@functools.cache
def _say_capped(model_type: str, first: int, limit: int) -> None:
    warnings.warn(
        f"this {model_type} model (LongRoPE) is used for up to {first} tokens, not {limit}: beyond them its positions are "
        "turned by other factors, those of earlier tokens too, and sampled log-probs would not be those of training",
        stacklevel=3,
    )
