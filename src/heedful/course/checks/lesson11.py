"""Lesson 11: adapters, and a reward model of another family."""

from collections.abc import Callable
from typing import Any

import torch

from heedful.course.checks import same


def check_1(answer: Callable[..., Any]) -> None:
    """Adapters merged into the matrix below them."""
    draw = torch.Generator().manual_seed(0)
    for out, into, rank, alpha in ((4, 3, 2, 4.0), (2, 5, 1, 8.0), (3, 3, 3, 1.5)):
        w, a, b = (torch.randn(*shape, generator=draw) for shape in ((out, into), (rank, into), (out, rank)))
        same(answer(w, a, b, alpha), w + alpha / rank * b @ a, f"merged with r = {rank} and alpha = {alpha:g}")


def check_2(answer: Callable[..., Any]) -> None:
    """Scores minus the KL of each response."""
    scores = torch.tensor([1.0, -2.0])
    policy = torch.tensor([[-0.5, -1.0, -0.2], [-0.3, -7.0, -7.0]])
    reference = torch.tensor([[-0.7, -2.0, -0.1], [-0.1, -3.0, -3.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    for kl_beta in (0.1, 1.0):
        expected = scores - kl_beta * ((policy - reference) * mask).sum(dim=1)
        found = answer(scores, policy, reference, mask, kl_beta)
        same(found, expected, f"get_reward_scores with kl_beta {kl_beta:g} and a response of one token")


def check_3(answer: Callable[..., Any]) -> None:
    """From the policy's ids to the reward model's, by text."""
    from heedful.models.tiny import TURN_END, byte_tokenizer

    policy, reward = byte_tokenizer(), byte_tokenizer(encoder=True)
    for prompt, response in (("大的反义词？", "小！"), ("hot?", "cold")):
        ids = [*policy(response).input_ids, policy.convert_tokens_to_ids(TURN_END)]
        same(answer(policy, reward, prompt, ids), reward(prompt, response).input_ids, f"reencode of {response!r}")
