"""Lesson 14: which algorithm when."""

from collections.abc import Callable
from typing import Any

from heedful.apps.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """Bytes of trained and frozen weights."""
    for trained, frozen in ((1.5e9, 0.0), (1.5e9, 2e9), (2e7, 8e9)):
        expected = (16 * trained + 2 * frozen) / 1e9
        same(answer(trained, frozen), expected, f"memory_gb({trained:g}, {frozen:g})")


def check_2(answer: Callable[..., Any]) -> None:
    """The weights of low-rank adapters."""
    for shapes, rank in (([(4096, 4096)], 16), ([(96, 96), (48, 96), (192, 96)], 32), ([], 8)):
        expected = sum(rank * (out + into) for out, into in shapes)
        same(answer(shapes, rank), expected, f"adapter_weights({shapes}, {rank})")


def check_3(answer: Callable[..., Any]) -> None:
    """The rules, in their order."""
    for have, gpu_gb, weights, expected in (
        ({"pairs", "checker"}, 80, 0.5e9, "grpo"),
        ({"checker", "reward model"}, 80, 0.5e9, "grpo"),
        ({"pairs", "reward model"}, 80, 0.5e9, "ppo"),
        ({"thumbs", "pairs"}, 24, 1.5e9, "dpo"),
        ({"thumbs"}, 24, 8e9, "kto with lora"),
        (set(), 24, 1.6e9, "sft with lora"),
    ):
        same(answer(have, gpu_gb, weights), expected, f"choose({sorted(have)}, {gpu_gb}, {weights:g})")
