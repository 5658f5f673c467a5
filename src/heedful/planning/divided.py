"""What one of several ranks holds: its rows of every batch, of whole models or of models divided as ``--shard full`` does it.

A rank of a divided run holds its share of all that is stored. What is whole for a time:

    sampling   a copy of the policy; while it is made, a weight at a time
    scoring    the blocks that compute, the embeddings and the head
    backward   the same, and gradients: of a block, the embeddings and the head, or of everything until they are summed

Each is counted from its shape, as in `heedful.planning.memory`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heedful.planning.memory import Network, Plan, Work, adapters, casts, expert_size, learning, plan, trained_bytes

DIVIDED = {
    "policy, frozen",
    "policy, trained",
    "critic, frozen",
    "critic, trained",
    "reference",
    "reward models",
    "moving average",
    "moments of the optimizer",
}
"""The parts of a plan of which a rank holds its share only."""
IN_FLIGHT = 2
"""Blocks whose weights are whole at a time: the one that computes, and the next, which is on its way."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that train together."""

    ranks: int
    replicas: int = 1
    """Whole models; ``ranks / replicas`` ranks share each."""
    sync_every: Literal["step", "micro-batch"] = "step"
    """When gradients are summed. If after each micro-batch, a rank never holds all of them whole."""

    @property
    def shards(self) -> int:
        """Ranks that hold one model together."""
        return self.ranks // self.replicas


def of_rank(work: Work, among: Ranks) -> Work:
    """What one rank does of a run's work: its rows of every batch. ``work`` counts the rows of all."""
    share = work.per_item * math.ceil(work.batch / work.per_item / among.ranks)
    sampling = work.sampling
    if sampling is not None:
        sampling = replace(sampling, rows=min(sampling.rows, math.ceil(work.rollout / among.ranks)))
    return replace(work, rows=min(work.rows, share), batch=share, sampling=sampling)


def memory(work: Work, among: Ranks) -> Plan:
    """The bytes that each part of a rank needs in each phase, with models divided among the ranks.

    A rank holds ``1 / shards`` of the weights, moments, gradients and averages.
    """
    mine = of_rank(work, among)
    phases: dict[str, dict[str, float]] = {}
    for phase, parts in plan(mine).phases.items():
        held = {name: size / (among.shards if name in DIVIDED else 1) for name, size in parts.items()}
        if phase == "sampling":
            held |= _sampling(mine, parts)
        if phase in ("scoring", "backward"):
            held |= _passes(mine, learning(mine) if phase == "backward" else networks(mine), learns=phase == "backward")
        if "gradients" in held:
            held["gradients"] = _gradients(mine, among, is_backward=phase == "backward")
        phases[phase] = {name: size for name, size in held.items() if size}
    return Plan(phases)


def networks(work: Work) -> list[Network]:
    """All that are on the device."""
    found = [work.policy, work.critic, work.reference, *work.rewards]
    return [network for network in found if network is not None and network.on_device]


def stored(work: Work, network: Network) -> int:
    """Bytes of a weight of a matrix as it is stored, which is how it travels."""
    if network.trained == "all":
        return 2 if work.half_weights else 4
    on_cpu = work.device == "cpu" and network.trained == "adapters"  # there the base of adapters stays in float32
    return 2 if work.half and not on_cpu else 4


def _sampling(work: Work, parts: Mapping[str, float]) -> dict[str, float]:
    """The whole copy that samples, with what it writes; or, if that is more, with a whole weight while it is made.

    The matrices of linear layers are in the compute dtype, embeddings and vectors as they are stored.
    """
    policy, shape, size = work.policy, work.policy.shape, stored(work, work.policy)
    copy = size * (shape.embedding + shape.head + shape.linear)
    if work.half and size == 4:
        copy = 2 * (shape.linear + shape.output) + 4 * shape.embedding
    copy += 4 * shape.vectors + expert_size(work, policy) * shape.experts
    if policy.trained == "adapters":
        copy += work.bytes_computed * adapters(policy)
    weight = size * shape.head
    written = {name: parts.get(name, 0.0) for name in ("keys and values", "logits")}
    if sum(written.values()) < weight:
        written = dict.fromkeys(written, 0.0) | {"whole blocks": weight}
    return {"copy that samples": copy} | written


def _passes(work: Work, through: Sequence[Network], *, learns: bool) -> dict[str, float]:
    """What is whole in a pass: blocks and ends as they are stored, and autocast's copies of those that compute.

    A backward pass needs the copies of all blocks, unless each block is computed again.
    """
    keeps_copies = learns and not work.checkpointing
    of_copies = [casts(work, network if keeps_copies else _one_block(network), learning=learns) for network in through]
    return {
        "whole blocks": max(_whole_blocks(work, network) for network in through),
        "copies in half precision": max(of_copies),
    }


def _one_block(network: Network) -> Network:
    """A network of one of its blocks, and its ends."""
    shape = network.shape
    names = ("linear", "edges", "experts", "expert_edges")
    return replace(network, shape=replace(shape, **{name: getattr(shape, name) // shape.layers for name in names}))


def _whole_blocks(work: Work, network: Network) -> float:
    """Bytes of the blocks that are whole at a time, and of the root's weights, which stay whole while the blocks compute."""
    shape, size = network.shape, stored(work, network)
    of_blocks = size * shape.linear + expert_size(work, network) * shape.experts
    return size * (shape.embedding + shape.head) + IN_FLIGHT * of_blocks / shape.layers


def _gradients(work: Work, among: Ranks, *, is_backward: bool) -> float:
    """Bytes of the gradients of a rank: its share, and in a backward pass what is whole until it is summed.

    Where several micro-batches are summed at once, all gradients are whole until then: in float32, also of weights in
    bfloat16.
    """
    share = sum(trained_bytes(work, network) for network in learning(work)) / among.shards
    if not is_backward:
        return share
    trained = [network for network in learning(work) if network.trained == "all"]
    if work.is_split and among.sync_every == "step":
        in_float32 = replace(work, half_weights=False)
        whole = sum(trained_bytes(in_float32, network) for network in learning(work))
        return whole + max((_beside_whole(work, network) for network in trained), default=0.0)
    return share + max((_until_summed(work, network) for network in trained), default=0.0)


def _until_summed(work: Work, network: Network) -> float:
    """Bytes of the gradients of a block and the root, as weights are stored, and of what a block sends, in float32; or, if
    that is more, of the root's and what it sends, when the blocks' are gone."""
    size, block, root = stored(work, network), *_units(network)
    return max(size * (root + block) + 4 * block, size * root + 4 * root)


def _beside_whole(work: Work, network: Network) -> float:
    """Bytes beside whole gradients: what a block sends, in float32; in bfloat16 also the root's gradients of the micro-batch,
    which are added when its pass ends. In float32 each is added at once, so it is that or the head's."""
    (block, root), head = _units(network), network.shape.output if network.output == "logits" else 0
    if stored(work, network) == 2:
        return 2 * root + 4 * block
    return 4 * max(block, head)


def _units(network: Network) -> tuple[float, float]:
    """Weights of a block and of the root, each of which is summed by itself."""
    shape = network.shape
    return (shape.linear + shape.experts) / shape.layers, shape.embedding + shape.head
