"""Mistakes that are easily made with several ranks, planted into a run to see that test_equal_numbers.py notices them."""

import contextlib
import itertools
from unittest.mock import patch

import torch

from heedful.algorithms import ppo
from heedful.algorithms.online import advantages, metrics
from heedful.core import kl_control
from heedful.data import batches
from heedful.distributed import ranks
from heedful.models import Policy
from heedful.training import optimization


def local_denominator():
    """Each rank divides by the tokens of its own rows."""
    whole = ppo.Counts.of

    def of(minibatch, config):
        rows = torch.tensor(ranks.shard_indices(minibatch.batch.attention_mask.sum(dim=1).tolist()))
        return whole(minibatch.select(rows), config)

    return patch.object(ppo.Counts, "of", of)


def unwhitened_rank():
    """Rank 1 leaves advantages as they are."""
    whiten = ppo.core.whiten
    return patch.object(ppo.core, "whiten", lambda x, mask: x if ranks.rank() == 1 else whiten(x, mask))


def whitened_by_rank():
    """Each rank whitens its own rows."""
    whiten = ppo.core.whiten

    def own(x, mask):
        mine = torch.zeros_like(mask)
        mine[torch.tensor(ranks.shard_indices([1.0] * len(x)))] = True
        return whiten(x, mask & mine)

    return patch.object(ppo.core, "whiten", own)


def group_cut_over_ranks():
    """The first half of each group is compared on rank 0, the second on rank 1."""
    whole = advantages.group_size
    return patch.object(advantages, "group_size", lambda rewards, config: whole(rewards, config) // 2)


def controller_per_rank():
    """Each rank steers the KL coefficient by the KL that it sees."""
    steer = kl_control.AdaptiveKL.update
    return patch.object(kl_control.AdaptiveKL, "update", lambda self, kl, n: steer(self, kl + ranks.rank(), n))


def gradients_averaged():
    """As DistributedDataParallel does, though the losses are divided by the counts of all ranks already."""
    add = ranks.add_gradients

    def average(parameters):
        parameters = list(parameters)
        add(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= ranks.size()

    return patch.object(optimization.ranks, "add_gradients", average)


def row_read_twice():
    """A row is on both ranks."""
    parts = ranks.parts
    return patch.object(
        batches.ranks, "parts", lambda costs, number: [sorted({0, *own}) for own in parts(costs, number)]
    )


def metric_of_one_rank():
    """An entropy that only counts the rows of one rank."""
    whole = metrics.core.masked_mean

    def half(x, mask, count=None):
        return whole(x, mask, count=count) / (2 if ranks.rank() == 0 and count is not None else 1)

    return patch.object(metrics.core, "masked_mean", half)


def stream_per_rank():
    """Each rank samples with its own random numbers."""
    from heedful.engines import generate

    draw = torch.rand

    def other(*shape, generator=None, **options):
        return (draw(*shape, generator=generator, **options) + 0.37 * ranks.rank()) % 1

    return patch.object(generate.torch, "rand", other)


def memory_full_on_one_rank():
    """Two passes of rank 1 run out of memory, which is no mistake: all ranks do the work again, with the same results."""
    forward, calls = Policy.forward, itertools.count()

    def full(self, *arguments, **options):
        if ranks.rank() == 1 and next(calls) in (5, 21):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, *arguments, **options)

    return patch.object(Policy, "forward", full)


HARMLESS = {"memory_full_on_one_rank": memory_full_on_one_rank}
MUTANTS = {
    "local_denominator": ("ppo", local_denominator),
    "unwhitened_rank": ("ppo", unwhitened_rank),
    "whitened_by_rank": ("ppo", whitened_by_rank),
    "controller_per_rank": ("ppo", controller_per_rank),
    "gradients_averaged": ("sft", gradients_averaged),
    "row_read_twice": ("sft", row_read_twice),
    "group_cut_over_ranks": ("grpo", group_cut_over_ranks),
    "metric_of_one_rank": ("grpo", metric_of_one_rank),
    "stream_per_rank": ("grpo", stream_per_rank),
}
"""The case in which each is planted."""


def planted(name):
    """Inside, the mistake is there; nothing without a name."""
    if not name:
        return contextlib.nullcontext()
    return HARMLESS[name]() if name in HARMLESS else MUTANTS[name][1]()
