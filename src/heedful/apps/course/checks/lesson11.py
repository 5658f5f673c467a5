"""Lesson 11: adapters, and a reward model of another family."""

from collections.abc import Callable
from typing import Any

import torch

from heedful.apps.course.checks import first, normal, same


def check_1(answer: Callable[..., Any]) -> None:
    """Adapters merged into the matrix below them."""
    draw = torch.Generator().manual_seed(0)
    for out, into, rank, alpha in ((4, 3, 2, 4.0), (2, 5, 1, 8.0), (3, 3, 3, 1.5)):
        w, a, b = (torch.randn(*shape, generator=draw) for shape in ((out, into), (rank, into), (out, rank)))
        same(answer(w, a, b, alpha), w + alpha / rank * b @ a, f"merged with r = {rank} and alpha = {alpha:g}")


def check_2(answer: Callable[..., Any]) -> None:
    """Scores minus the KL of each response."""
    for seed, lengths, kl_beta in ((0, [3, 1], 0.1), (1, [2, 4, 3], 1.0), (2, [2, 4, 3], 0.25)):
        mask = first(lengths, max(lengths))
        scores, policy, reference = (
            normal(seed, len(mask)),
            -normal(seed, *mask.shape).exp(),
            -normal(9, *mask.shape).exp(),
        )
        expected = scores - kl_beta * ((policy - reference) * mask).sum(dim=1)
        asked = f"get_reward_scores with kl_beta {kl_beta:g} and responses of {' and '.join(map(str, lengths))} tokens"
        same(answer(scores, policy, reference, mask, kl_beta), expected, asked)


def check_3(answer: Callable[..., Any]) -> None:
    """From the policy's ids to the reward model's, by text."""
    from heedful.models.tiny import TURN_END, byte_tokenizer

    texts = ["大的反义词？小！", "hot? cold", "What is not small? big"]
    policy, reward = byte_tokenizer(texts=texts, vocab_size=290), byte_tokenizer(encoder=True)
    for prompt, response in (("大的反义词？", "小！"), ("hot?", "cold"), ("What is not small?", "big")):
        ids = [*policy(response).input_ids, policy.convert_tokens_to_ids(TURN_END)]
        same(answer(policy, reward, prompt, ids), reward(prompt, response).input_ids, f"reencode of {response!r}")
