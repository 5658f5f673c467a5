"""The hidden tests of the exercises: one module for each lesson, with ``check_1`` to ``check_3``.

Each asks for several inputs that the lesson does not show. The form of a result does not matter: `numbers` has those taken.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SHOWN = 60
"""Maximal number of characters of a value in a message."""


def same(came_out: Any, expected: Any, asked: str, *, tolerance: float = 1e-4) -> None:
    """Raise AssertionError unless two values are equal; one line with the question, the result and the expected value.

    Args:
        came_out: the answer's result, in any form of `numbers`, or a text.
        expected: the right result.
        asked: the call, in words, such as "gae_by_hand at gamma 0.9".
        tolerance: absolute and relative, for fractions; whole numbers must be equal.
    """
    if not _is_same(came_out, expected, tolerance):
        raise AssertionError(f"{asked}: {_short(came_out)} came out, expected {_short(expected)}")


def two(came_out: Any, names: str) -> list[Any]:
    """The two results of an answer, of any type that has two parts. Raises AssertionError.

    Args:
        came_out: the answer's result.
        names: what they are, such as "advantages, returns".
    """
    parts = list(came_out) if isinstance(came_out, Iterable) and not isinstance(came_out, str) else []
    assert len(parts) == 2, f"return two results, {names}; {_short(came_out)} came out"
    return parts


def numbers(value: Any) -> Tensor:
    """Numbers as a tensor of float64 without axes of length 1: from a tensor, an array, a number, or lists of these.

    Raises TypeError or ValueError if it is something else.
    """
    if isinstance(value, Tensor) or not isinstance(value, Iterable) or getattr(value, "ndim", None) == 0:
        found = torch.as_tensor(value).detach()
        if found.is_complex():
            raise TypeError("complex numbers")
        return found.cpu().double().squeeze()
    if isinstance(value, str | bytes | dict | set):
        raise TypeError(f"no numbers: {value!r:.40}")
    parts = [numbers(part) for part in value]
    if len({part.shape for part in parts}) > 1:
        raise ValueError("lists of different lengths")
    return torch.stack(parts).squeeze() if parts else torch.zeros(0, dtype=torch.float64)


def normal(seed: int, *shape: int) -> Tensor:
    """Normal random numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def first(lengths: list[int], columns: int) -> Tensor:
    """A mask [B, columns] that is True at the first positions of each row, as many as ``lengths`` says."""
    return torch.arange(columns) < torch.tensor(lengths).unsqueeze(1)


def _is_same(came_out: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, str):
        return isinstance(came_out, str) and came_out == expected
    try:
        one, other = numbers(came_out), numbers(expected)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    if one.shape != other.shape:
        return False
    is_exact = isinstance(expected, int) or not _has_fractions(expected)
    within = 0.0 if is_exact else tolerance
    return torch.allclose(one, other, rtol=within, atol=within, equal_nan=True)


def _has_fractions(expected: Any) -> bool:
    """Whether a right result is of a type with fractions."""
    if isinstance(expected, Tensor):
        return expected.is_floating_point()
    return any(map(_has_fractions, expected)) if isinstance(expected, list) else isinstance(expected, float)


def _short(value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    is_list = isinstance(value, list | tuple)
    text = f"[{', '.join(map(_short, value))}]" if is_list else " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
