"""The hidden tests of the exercises: one module for each lesson, with ``check_1`` to ``check_3``."""

from typing import Any

import torch

SHOWN = 60
"""Maximal number of characters of a value in a message."""


def same(came_out: Any, expected: Any, asked: str, *, tolerance: float = 1e-4) -> None:
    """Raise AssertionError unless two values are equal; one line with the question, the result and the expected value.

    Args:
        came_out: the answer's result: a tensor, a number, a list of numbers, a text.
        expected: the right result.
        asked: the call, in words, such as "gae_by_hand at gamma 0.9".
        tolerance: absolute and relative, for numbers.
    """
    if not _is_same(came_out, expected, tolerance):
        raise AssertionError(f"{asked}: {_short(came_out)} came out, expected {_short(expected)}")


def _is_same(came_out: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, str | bool) or expected is None:
        return bool(came_out == expected)
    try:
        one, other = torch.as_tensor(came_out).double(), torch.as_tensor(expected).double()
    except (TypeError, ValueError, RuntimeError):
        return False
    return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    is_list = isinstance(value, list | tuple)
    text = f"[{', '.join(map(_short, value))}]" if is_list else " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
