"""From the shapes of a run to what it costs on many GPUs: bytes that a rank receives, seconds of a step.

Models are divided among the ranks as ``--shard full`` does it. Every number is counted from shapes and from what the makers
of the hardware publish; none is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from heedful.planning.divided import Ranks, networks, of_rank, stored
from heedful.planning.memory import Network, Sampling, Work, learning, trained_bytes
from heedful.planning.shapes import Shape


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
class Job(Ranks):
    """Ranks that train one model, on GPUs of a kind."""

    gpu: GPU
    of_flops: float = 0.4
    """The part of the published products per second that a pass reaches. Assumed."""
    of_bytes: float = 0.8
    """The part of the published bytes per second that memory and links reach. Assumed."""

    @property
    def wire(self) -> float:
        """Bytes that a rank receives per second in a collective operation of the ranks that share a model."""
        between = self.gpu.network if self.shards > self.gpu.per_machine else math.inf
        return self.of_bytes * min(self.gpu.link, between)


def received(work: Work, job: Job) -> Mapping[str, float]:
    """Bytes that a rank receives per rollout batch and its updates, one epoch of one or more minibatches.

        gather              stored bytes of a model * (S - 1) / S             S ranks share it
        scatter gradients   bytes of the gradients * (S - 1) / S    in float32, also if weights are in bfloat16
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
        return stored(work, network) * network.shape.parameters * part

    gradients = sum(trained_bytes(replace(work, half_weights=False), network) for network in learning(work))
    times = updates if job.sync_every == "step" else learned
    frozen = [network for network in networks(work) if network.trained == "nothing"]
    of_critic = 0.0 if work.critic is None else passes * whole(work.critic)  # the values before the update
    found = {
        "passes without gradients": sum(passes * whole(network) for network in frozen) + of_critic,
        "passes that learn": sum(2 * learned * whole(network) for network in learning(work)),
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
    learned = sum(flops(network.shape, tokens, work.length) for network in learning(work))
    frozen = [network for network in networks(work) if network.trained == "nothing"]
    reading = sum(flops(network.shape, tokens, work.length) for network in frozen)
    if work.critic is not None:
        reading += flops(work.critic.shape, tokens, work.length)
    found = {
        "products, learning": (4 if work.checkpointing else 3) * learned / rate,
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
