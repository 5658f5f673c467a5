"""AdamW for bfloat16 weights, and for moments in main memory or in 8 bits."""

import functools
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heedful.core.rounding import stochastic_round
from heedful.devices import device_module, upload
from heedful.distributed.sharding import first_held, held

PART = 2**24
"""Number of weights per chunk: float32 copies are made only for a chunk, to save memory."""
BLOCK = 2**20
"""Number of weights per noise seed, so that a rank generates little noise beyond its own shard."""
SMALLEST_8_BIT, BLOCK_8_BIT = 4096, 256
"""Smallest tensor with moments in 8 bits, and moments with a scale of their own: bitsandbytes' numbers."""


class _Part(NamedTuple):
    """A chunk of a weight tensor, with what its step needs."""

    weights: Tensor
    gradients: Tensor
    state: dict[str, Any]
    where: slice
    """Its place in the moments that this rank has."""
    group: Mapping[str, Any]
    of_tensor: tuple[int, int, int]
    """Seeds the noise; see `_noise`."""
    size: int
    """Number of weights in the whole tensor."""
    first: int
    """Index of its first weight there."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with weights in float32 or bfloat16, and moments on any device.

    Each step is torch's AdamW on float32 copies of weights and gradients, on the moments' device. bfloat16 weights are
    then rounded stochastically on their own device (`heedful.core.stochastic_round`), so that steps too small for bfloat16
    count on average. With moments on another device, the next chunk travels there while a chunk is stepped. With float32
    weights the numbers equal `torch.optim.AdamW`. With sharded weights, each rank steps its own shards.

    Args:
        groups: parameter groups, each with ``lr`` and ``weight_decay``.
        betas, eps: Adam's.
        device: device of moments and step; None is the weights' device.
        seed: seed of the noise.

    A weight's noise depends only on the seed, the step and its index. So it is the same on any number of ranks and
    after resuming, and independent of other random numbers.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})
        self.device, self.seed = device, seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used here
        """Step all weights that have gradients."""
        assert closure is None
        ahead: deque[tuple[_Part, _Copies]] = deque()
        for part in self._parts():
            ahead.append((part, _Copies(part, self.device or part.weights.device)))
            if len(ahead) > 1 or not ahead[0][1].travel:
                self._step(*ahead.popleft())
        while ahead:
            self._step(*ahead.popleft())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1

    def _parts(self) -> Iterator[_Part]:
        """Chunks of all weights that have gradients."""
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for i, (parameter, group) in enumerate(pairs):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state |= {"step": torch.tensor(0.0)} | self._moments(parameter)
            weights, gradients = held(parameter).view(-1), held(parameter.grad).reshape(-1)
            of_tensor, first = (self.seed, int(state["step"]), i), first_held(parameter)
            for start in range(0, weights.numel(), PART):
                where = slice(start, min(start + PART, weights.numel()))
                yield _Part(
                    weights[where], gradients[where], state, where, group, of_tensor, parameter.numel(), first + start
                )

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments before the first step."""
        zeros = torch.zeros_like(parameter, dtype=torch.float32, device=self.device or parameter.device)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def _step(self, part: _Part, copies: "_Copies") -> None:
        stepped, gradients = copies.arrived()
        self._update(stepped, gradients, part)
        stepped = upload(stepped, part.weights.device)
        if part.weights.dtype == torch.bfloat16:
            stepped = stochastic_round(stepped, _noise(part.of_tensor, part.size, part.first, stepped))
        part.weights.copy_(stepped)

    def _update(self, stepped: Tensor, gradients: Tensor, part: _Part) -> None:
        """Step float32 copies of weights, and their moments, in place."""
        state, group = part.state, part.group
        mean, square = (held(state[name]).view(-1)[part.where] for name in ("exp_avg", "exp_avg_sq"))
        adamw(
            [stepped],
            [gradients],
            [mean],
            [square],
            [],
            [upload(state["step"].clone(), mean.device)],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state without a copy, as torch does; moments keep their dtype and device (torch takes the weights')."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for i, saved in state_dict["state"].items():
            device = self.device or parameters[i].device
            self.state[parameters[i]] = {name: x if name == "step" else x.to(device) for name, x in saved.items()}


class _Copies:
    """Float32 copies of a chunk's weights and gradients on the moments' device.

    From an accelerator they travel without being waited for, into pinned memory where torch has it for the device.
    """

    def __init__(self, part: _Part, device: torch.device) -> None:
        of_weights = device_module(part.weights.device)
        self.travel = device.type != part.weights.device.type
        queues = self.travel and hasattr(of_weights, "Event")
        both = (part.weights.float(), part.gradients.float())
        self.copies = [one.to(device, non_blocking=queues, copy=one is part.weights) for one in both]
        self.event = of_weights.Event() if queues else None
        if self.event is not None:
            self.event.record()

    def arrived(self) -> list[Tensor]:
        """Both copies, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.copies


class EightBitAdamW(CompactAdamW):
    """`CompactAdamW` with bitsandbytes' moments in 8 bits (Dettmers et al. 2022), in float32 for small tensors, as there."""

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.numel() < SMALLEST_8_BIT:
            return super()._moments(parameter)
        state = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
        scales = torch.zeros(-(-parameter.numel() // BLOCK_8_BIT), device=parameter.device)
        return {"state1": state, "state2": state.clone(), "absmax1": scales, "absmax2": scales.clone()}

    def _update(self, stepped: Tensor, gradients: Tensor, part: _Part) -> None:
        from bitsandbytes import functional

        state, group = part.state, part.group
        if "state1" not in state:
            super()._update(stepped, gradients, part)
            return
        blocks = slice(part.where.start // BLOCK_8_BIT, -(-part.where.stop // BLOCK_8_BIT))
        functional.optimizer_update_8bit_blockwise(
            "adam", gradients, stepped, state["state1"][part.where], state["state2"][part.where],
            *group["betas"], 0.0, 0.0, group["eps"], int(state["step"]) + 1, group["lr"],
            *_maps(stepped.device), state["absmax1"][blocks], state["absmax2"][blocks], group["weight_decay"],
        )  # fmt: skip


@functools.cache
def _maps(device: torch.device) -> list[Tensor]:
    """The 256 numbers that bitsandbytes has for each of the two moments."""
    from bitsandbytes import functional

    return [functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]


def _noise(of_tensor: tuple[int, int, int], count: int, first: int, stepped: Tensor) -> Tensor:
    """An integer of 0 to 2^16 - 1 (int32) per stepped weight, independent of the sharding.

    Args:
        of_tensor: (seed of the run, steps so far, index of the tensor in the optimizer); seeds the noise.
        count: number of weights in the tensor.
        first: index of the first stepped weight.
        stepped: ``[weights]``, at least one.
    """
    before, device = first // BLOCK * BLOCK, stepped.device
    blocks = [
        torch.randint(
            2**16,
            (min(BLOCK, count - start),),
            dtype=torch.int32,
            device=device,
            generator=torch.Generator(device).manual_seed(_hash(*of_tensor, start // BLOCK)),
        )
        for start in range(before, first + len(stepped), BLOCK)
    ]
    return torch.cat(blocks)[first - before :][: len(stepped)]


def _hash(*numbers: int) -> int:
    """A 56-bit hash of numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")
