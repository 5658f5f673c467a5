"""A critic's estimates and the losses around it beside a reference written apart: Python's numbers, lists and loops."""

import math
import random

import torch

from heedful import core
from tensors import f64

ROWS, TIME, GAMMA, ALPHA, LOW, HIGH = 5, 12, 0.97, 0.35, 0.3, 0.6


def advantages_and_returns(rewards, values, inside, gamma, gae_lambda):
    """Of one response, from its last token backwards."""
    advantages, returns = [0.0] * len(inside), [0.0] * len(inside)
    following = carried = 0.0
    for t in range(len(inside) - 1, -1, -1):
        if inside[t]:
            carried = rewards[t] + gamma * following - values[t] + gamma * gae_lambda * carried
            following = values[t]
            advantages[t], returns[t] = carried, carried + values[t]
    return advantages, returns


def length_lambda(inside):
    length = sum(inside)
    return max(0.0, 1 - 1 / (ALPHA * length)) if length else 0.0


def policy_loss(new, sampler, advantages, inside):
    """The mean over tokens of minus weight * advantage * log-prob, and the share that is left out."""
    total, left_out, count = 0.0, 0, 0
    for b, row in enumerate(inside):
        for t, counts in enumerate(row):
            if counts:
                ratio, count = math.exp(new[b][t] - sampler[b][t]), count + 1
                if 1 - LOW < ratio < 1 + HIGH:
                    total -= ratio * advantages[b][t] * new[b][t]
                else:
                    left_out += 1
    return total / count, left_out / count


def imitation_loss(new, inside, correct):
    learned = [new[b][t] for b, row in enumerate(inside) for t, counts in enumerate(row) if counts and correct[b]]
    return -sum(learned) / len(learned) if learned else 0.0


def squared_loss(values, returns, inside):
    squares = [
        (values[b][t] - returns[b][t]) ** 2 for b, row in enumerate(inside) for t, counts in enumerate(row) if counts
    ]
    return sum(squares) / len(squares) / 2


def draw(rng):
    """Rows of numbers, and masks with holes and padding on both sides; the last row may be empty."""
    numbers = [[[rng.gauss(0, 1) for _ in range(TIME)] for _ in range(ROWS)] for _ in range(4)]
    inside = [[rng.random() < 0.7 for _ in range(TIME)] for _ in range(ROWS)]
    inside[0] = [True] * TIME
    inside[-1] = [rng.random() < 0.1 for _ in range(TIME)]
    return *numbers, inside, [rng.random() < 0.5 for _ in range(ROWS)]


def near(actual, expected):
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=1e-6)


def test_identity_estimates_and_losses_are_those_of_a_reference_written_apart():
    """Advantages with a lambda by length, targets with lambda 1 (VAPO), at 0.6 too; SAO's policy loss of these advantages,
    the imitation of correct responses, the unclipped value loss of these targets."""
    rng = random.Random(0)
    for _ in range(50):
        rewards, values, logprobs, shifts, inside, correct = draw(rng)
        sampler = [[x + 0.4 * y for x, y in zip(*rows, strict=True)] for rows in zip(logprobs, shifts, strict=True)]
        given = f64(rewards), f64(values), torch.tensor(inside)

        lambdas = [length_lambda(row) for row in inside]
        found = core.adaptive_lambda(given[2].sum(dim=1), alpha=ALPHA)
        near(found.double(), lambdas)
        both = {}
        for name, of_row in (("adaptive", lambdas), ("one", [1.0] * ROWS), ("fixed", [0.6] * ROWS)):
            both[name] = [
                advantages_and_returns(r, v, m, GAMMA, one)
                for r, v, m, one in zip(rewards, values, inside, of_row, strict=True)
            ]
        for name, of_rows in (("adaptive", found), ("one", 1.0), ("fixed", 0.6)):
            advantages, returns = core.gae(*given, gamma=GAMMA, gae_lambda=of_rows)
            near(advantages, [a for a, _ in both[name]])
            near(returns, [r for _, r in both[name]])
        targets = [r for _, r in both["one"]]
        near(core.rewards_to_go(given[0], given[2], gamma=GAMMA), targets)

        advantages = [a for a, _ in both["adaptive"]]
        loss, metrics = core.sao_policy_loss(
            f64(logprobs), f64(sampler), f64(advantages), given[2], clip_range=LOW, clip_range_high=HIGH
        )
        expected, left_out = policy_loss(logprobs, sampler, advantages, inside)
        near(loss, expected)
        near(metrics["policy/clip_frac"], left_out)
        loss, _ = core.positive_example_loss(f64(logprobs), given[2], torch.tensor(correct))
        near(loss, imitation_loss(logprobs, inside, correct))
        loss, _ = core.value_loss(given[1], given[1], f64(targets), given[2], clip_range=None)
        near(loss, squared_loss(values, targets, inside))
