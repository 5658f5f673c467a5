"""From the shapes of a run to what it costs on many GPUs: memory of a rank, bytes that it receives, seconds of a step.

Models are divided among the ranks as ``--shard full`` does it. Every number is counted from shapes and from what the makers
of the hardware publish; none is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from heedful.planning.memory import Network, Plan, Sampling, Work, plan, trained_bytes
from heedful.planning.shapes import Shape

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
class GPU:
    """What the maker of a GPU, and of the network between machines, publishes."""

    memory: float
    """Bytes."""
    flops: float
    """Products in bfloat16 per second, times two (multiply and add), without sparsity."""
    bandwidth: float
    """Bytes of its memory that it reads per second."""
    link: float
    """Bytes that it receives per second from GPUs of its machine."""
    network: float
    """Bytes that a machine receives per second from others."""
    per_machine: int = 8


H100 = GPU(memory=80e9, flops=989e12, bandwidth=3.35e12, link=450e9, network=8 * 50e9)
"""H100 SXM, NVLink 4 (900 GB/s both ways), one NDR adapter (400 Gb/s) per GPU."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks that train one model."""

    gpu: GPU
    ranks: int
    replicas: int = 1
    """Whole models; ``ranks / replicas`` ranks share each."""
    sync_every: Literal["step", "micro-batch"] = "step"
    """When gradients are summed. After each micro-batch, a rank never holds all of them whole."""
    of_flops: float = 0.4
    """The part of the published products per second that a pass reaches. Assumed."""
    of_bytes: float = 0.8
    """The part of the published bytes per second that memory and links reach. Assumed."""

    @property
    def shards(self) -> int:
        """Ranks that hold one model together."""
        return self.ranks // self.replicas

    @property
    def wire(self) -> float:
        """Bytes that a rank receives per second in a collective operation of the ranks that share a model."""
        between = self.gpu.network if self.shards > self.gpu.per_machine else math.inf
        return self.of_bytes * min(self.gpu.link, between)


def of_rank(work: Work, job: Job) -> Work:
    """What one rank does of a run's work: its rows of every batch. ``work`` counts the rows of all."""
    share = math.ceil(work.batch / job.ranks)
    sampling = work.sampling
    if sampling is not None:
        sampling = replace(sampling, rows=min(sampling.rows, math.ceil(work.rollout / job.ranks)))
    return replace(work, rows=min(work.rows, share), batch=share, sampling=sampling)


def memory(work: Work, job: Job, *, samples_here: bool = True) -> Plan:
    """The bytes that each part of a rank needs in each phase.

    A rank holds ``1 / shards`` of the weights, moments, gradients and averages. Autocast's copies are those of the blocks
    that are whole. ``samples_here``: the rank samples by itself, from a whole copy of the policy.
    """
    mine = of_rank(work, job)
    phases: dict[str, dict[str, float]] = {}
    for phase, parts in plan(mine).phases.items():
        if phase == "sampling" and not samples_here:
            continue
        held = {name: size / (job.shards if name in DIVIDED else 1) for name, size in parts.items()}
        held.pop("copies in half precision", None)
        if phase == "sampling" and job.shards > 1:  # all of it, and not what is shared with the policy
            held["copy that samples"] = (2 if work.half else 4) * work.policy.shape.parameters
        if "gradients" in held:
            held["gradients"] = _gradients(mine, job, is_backward=phase == "backward")
        if phase != "step":
            held["whole blocks"] = max(_whole_blocks(mine, network) for network in _networks(mine))
        phases[phase] = held
    return Plan(phases)


def _gradients(work: Work, job: Job, *, is_backward: bool) -> float:
    """Bytes of the gradients of a rank: its share, and in a backward pass those of a block and of the root, which are whole
    until they are summed. All of them are, where several micro-batches are summed at once."""
    total = sum(trained_bytes(work, network) for network in _learning(work))
    if not is_backward or job.shards == 1:
        return total / job.shards
    if work.is_split and job.sync_every == "step":
        return total
    whole = [
        _stored(work, network)
        * (network.shape.linear / network.shape.layers + network.shape.embedding + network.shape.head)
        for network in _learning(work)
        if network.trained == "all"
    ]
    return total / job.shards + max(whole, default=0.0)


def _networks(work: Work) -> list[Network]:
    found = [work.policy, work.critic, work.reference, *work.rewards]
    return [network for network in found if network is not None and network.on_device]


def _learning(work: Work) -> list[Network]:
    return [network for network in (work.policy, work.critic) if network is not None]


def _stored(work: Work, network: Network) -> int:
    """Bytes of a weight as it is stored, which is how it travels."""
    if network.trained == "all" and not work.half_weights:
        return 4
    return 2 if work.half else 4


def _whole_blocks(work: Work, network: Network) -> float:
    """Bytes of the blocks of a network that are whole at a time, and of autocast's copy of the one that computes."""
    shape, size = network.shape, _stored(work, network)
    block = shape.linear / shape.layers
    ends = size * (shape.embedding + shape.head)  # with the root, which stays whole while the blocks compute
    return ends + IN_FLIGHT * size * block + (2 * block if work.half and size == 4 else 0)


def received(work: Work, job: Job) -> Mapping[str, float]:
    """Bytes that a rank receives per rollout batch and its updates, one epoch of one or more minibatches.

        gather              stored bytes of a model * (S - 1) / S             S ranks share it
        scatter gradients   bytes of the gradients * (S - 1) / S
        between replicas    2 * bytes of the gradients / S * (R - 1) / R      R replicas; ring all-reduce

    A micro-batch that learns gathers twice, for its forward and its backward pass; a pass without gradients once. Gradients
    travel once per minibatch, or per micro-batch with that ``sync_every``. The policy is gathered once for what samples, here
    or on servers.
    """
    mine, shards = of_rank(work, job), job.shards
    part = (shards - 1) / shards
    passes = math.ceil(math.ceil(work.rollout / job.ranks) / mine.rows) if work.rollout else 0
    updates = max(1, math.ceil(work.rollout / work.batch)) if work.rollout else 1
    learned = updates * math.ceil(mine.batch / mine.rows)

    def whole(network: Network) -> float:
        return _stored(work, network) * network.shape.parameters * part

    gradients = sum(trained_bytes(work, network) for network in _learning(work))
    times = updates if job.sync_every == "step" else learned
    frozen = [network for network in _networks(work) if network.trained == "nothing"]
    of_critic = 0.0 if work.critic is None else passes * whole(work.critic)  # the values before the update
    found = {
        "passes without gradients": sum(passes * whole(network) for network in frozen) + of_critic,
        "passes that learn": sum(2 * learned * whole(network) for network in _learning(work)),
        "gradients": times * gradients * part,
        "gradients between replicas": 2 * times * gradients / shards * (job.replicas - 1) / job.replicas,
        "copy that samples": whole(work.policy) if work.sampling is not None else 0.0,
    }
    return {name: size for name, size in found.items() if size}


def flops(shape: Shape, tokens: float, length: int) -> float:
    """Multiplications and additions of a forward pass over ``tokens`` tokens in texts of ``length``.

        2 * matrices + 2 * layers * query width * length         per token; causal attention reads half a text on average

    (Kaplan et al. 2020, section 2.1, with the attention's products added.)
    """
    return tokens * (2 * (shape.linear + shape.output) + 2 * shape.layers * shape.query * length)


def decode_seconds(shape: Shape, sampling: Sampling, job: Job, *, sharing: int = 1) -> float:
    """Seconds to sample a batch of responses: each step reads all weights and the cache so far, in bfloat16.

    ``sharing``: GPUs that hold the model together (tensor parallel servers); one rank holds the whole copy.
    """
    cached = sampling.rows * (sampling.prompt + sampling.new_tokens / 2) * 4 * shape.layers * shape.key
    step = 2 * (shape.linear + shape.output) + cached
    return sampling.new_tokens * step / (sharing * job.of_bytes * job.gpu.bandwidth)


def seconds(work: Work, job: Job, *, samples_here: bool = True, sharing: int = 1) -> Mapping[str, float]:
    """Seconds of a rollout batch and its updates by what limits them; products and links are taken to overlap not at all.

    ``sharing``: GPUs of a server that samples; as many GPUs as there are ranks serve, and rank 0 sends them the weights
    through one network adapter. A backward pass is two forward passes, and one more if activations are computed again.
    """
    mine = of_rank(work, job)
    here = math.ceil(work.rollout / job.ranks) if work.rollout else mine.batch
    tokens, rate = here * work.length, job.of_flops * job.gpu.flops
    learning = sum(flops(network.shape, tokens, work.length) for network in _learning(work))
    frozen = [network for network in _networks(work) if network.trained == "nothing"]
    reading = sum(flops(network.shape, tokens, work.length) for network in frozen)
    if work.critic is not None:
        reading += flops(work.critic.shape, tokens, work.length)
    found = {
        "products, learning": (4 if work.checkpointing else 3) * learning / rate,
        "products, reading": reading / rate,
        "links": sum(received(work, job).values()) / job.wire,
    }
    if mine.sampling is not None:
        sampling = mine.sampling if samples_here else replace(mine.sampling, rows=here * sharing)
        times = math.ceil(here / mine.sampling.rows) if samples_here else 1
        if not samples_here:
            adapter = job.of_bytes * job.gpu.network / job.gpu.per_machine
            found["weights to the servers"] = 2 * work.policy.shape.parameters / adapter
        found["sampling"] = times * decode_seconds(
            work.policy.shape, sampling, job, sharing=1 if samples_here else sharing
        )
    return found
