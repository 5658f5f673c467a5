"""What a GPU has to compute and move at the least for an iteration of PPO or GRPO, and how fast it can.

With N_b weights in the layers, N_h = hidden x vocabulary in the head, L layers, h heads of size d, causal attention over T
tokens A(T) = 2 L h d T (T + 1), rows of a prompt P and a response R, T = P + R:

    prefill    2 N_b P + A(P) + 2 N_h              FLOPs of each different prompt
    decode     2 (N_b + N_h) R + A(T) - A(P)       FLOPs of a row; in every step the weights are read, and the row's cache
    pass       2 N_b T + A(T) [+ 2 N_h R]          FLOPs of a row, with logits of the response where they are needed
    update     3 passes of the policy, and 3 of a critic, an epoch; then 30 bytes a parameter for AdamW

Scoring is a pass of the reference, and in PPO one of critic and reward model. Nothing is padding or computed twice.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig


class Rates(NamedTuple):
    """What a device does at the most."""

    flops: float
    """FLOP/s"""
    bytes: float
    """bytes/s"""

    def seconds(self, flops: float = 0.0, moved: float = 0.0) -> float:
        """The least time for so many FLOPs and bytes moved."""
        return max(flops / self.flops, moved / self.bytes)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration's sizes."""

    batch: int = 256
    prompt: int = 128
    response: int = 128
    micro_batch: int = 32
    group: int = 8


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of a decoder's parts."""

    config: PreTrainedConfig
    width: int = 2
    """Bytes a number."""

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key-value heads, size of a head."""
        heads = self.config.num_attention_heads
        size = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        return heads, getattr(self.config, "num_key_value_heads", None) or heads, size

    @property
    def body(self) -> int:
        """Weights in the matrices of all layers."""
        hidden, (heads, kv_heads, size) = self.config.hidden_size, self.heads
        gpt2 = self.config.model_type == "gpt2"
        feed_forward = 2 * hidden * 4 * hidden if gpt2 else 3 * hidden * self.config.intermediate_size
        attention = hidden * (heads + 2 * kv_heads) * size + heads * size * hidden
        return self.config.num_hidden_layers * (attention + feed_forward)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.config.hidden_size * self.config.vocab_size

    def attention(self, length: int) -> int:
        """FLOPs of causal attention over a row, forward."""
        heads, _, size = self.heads
        return 2 * self.config.num_hidden_layers * heads * size * length * (length + 1)

    def rollout(self, work: Workload, rates: Rates, *, prompts: int) -> float:
        """Seconds of reading the different prompts and of as many steps of decoding as a response has tokens."""
        _, kv_heads, size = self.heads
        weights = (self.body + self.head) * self.width
        start, end = work.prompt, work.prompt + work.response
        prefill = prompts * (2 * self.body * start + self.attention(start) + 2 * self.head)
        decode = work.batch * (
            2 * (self.body + self.head) * work.response + self.attention(end) - self.attention(start)
        )
        read = work.batch * sum(range(start + 1, end + 1)) * 2 * self.config.num_hidden_layers * kv_heads * size
        return rates.seconds(prefill, weights) + rates.seconds(decode, work.response * weights + read * self.width)

    def one_pass(self, work: Workload, *, head: bool) -> float:
        """FLOPs of a forward pass over all rows, with logits of the response tokens or without."""
        length = work.prompt + work.response
        logits = 2 * self.head * work.response if head else 0
        return work.batch * (2 * self.body * length + self.attention(length) + logits)

    def update(self, work: Workload, *, epochs: int, critic: bool) -> float:
        """FLOPs of forward and backward passes of the policy and of a critic of its own."""
        return 3 * epochs * (self.one_pass(work, head=True) + critic * self.one_pass(work, head=False))

    def iteration(self, work: Workload, rates: Rates, *, epochs: int, critic: bool) -> float:
        """Seconds of rollout, scoring and update; with a critic (PPO) also of critic and reward model."""
        score = self.one_pass(work, head=True) + 2 * critic * self.one_pass(work, head=False)
        optimizer = 30 * epochs * (1 + critic) * (self.body + self.head)
        prompts = work.batch if critic else work.batch // work.group
        update = rates.seconds(self.update(work, epochs=epochs, critic=critic)) + rates.seconds(moved=optimizer)
        return self.rollout(work, rates, prompts=prompts) + rates.seconds(score) + update


def timed(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Median seconds of one call, the device's work included."""
    seconds = []
    for _ in range(times):
        finish(device)  # what was asked of it before
        started = time.perf_counter()
        run()
        finish(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def finish(device: torch.device) -> None:
    """Wait until the device has done its work; a CPU's is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Of a large product of random matrices and of a copy."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(16 * size * size, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    timed(lambda: (left @ right, target.copy_(source)), device, 3)
    product, copied = timed(lambda: left @ right, device, 10), timed(lambda: target.copy_(source), device, 10)
    return Rates(2 * size**3 / product, 2 * source.nbytes / copied)
