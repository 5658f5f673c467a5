"""AdamW for bfloat16 weights, and for moments in main memory."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heedful.core.rounding import stochastic_round
from heedful.devices import upload
from heedful.distributed.sharding import first_held, held

PART = 2**24
"""Number of weights per chunk: float32 copies are made only for a chunk, to save memory."""
BLOCK = 2**20
"""Number of weights per noise seed, so that a rank generates little noise beyond its own shard."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with weights in float32 or bfloat16, and moments on any device.

    Each step is torch's AdamW on float32 copies of weights and gradients, on the moments' device. bfloat16 weights are
    then rounded stochastically (`heedful.core.stochastic_round`), so that steps too small for bfloat16 count on
    average. With float32 weights the numbers equal `torch.optim.AdamW`. With sharded weights, each rank steps its own
    shards.

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
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for i, (parameter, group) in enumerate(pairs):
            if parameter.grad is not None:
                self._step(i, parameter, parameter.grad, group)

    def _step(self, i: int, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(parameter, dtype=torch.float32, device=self.device or parameter.device)
            state |= {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        weights, gradients = held(parameter).view(-1), held(gradient).reshape(-1)
        means, squares = held(state["exp_avg"]).view(-1), held(state["exp_avg_sq"]).view(-1)
        for start in range(0, weights.numel(), PART):
            part = slice(start, start + PART)
            mean, square = means[part], squares[part]
            stepped = weights[part].to(mean.device, torch.float32, copy=True)
            adamw(
                [stepped],
                [gradients[part].to(mean.device, torch.float32)],
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
            if parameter.dtype == torch.bfloat16:
                of_tensor, first = (self.seed, int(state["step"]), i), first_held(parameter) + start
                stepped = stochastic_round(stepped, _noise(of_tensor, parameter.numel(), first, stepped))
            weights[part] = stepped.to(weights.device)
        state["step"] += 1

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state; moments keep their dtype and device (torch would use those of the weights)."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for i, saved in state_dict["state"].items():
            device = self.device or parameters[i].device
            moments = {name: saved[name].to(device, copy=True) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameters[i]] = {"step": saved["step"].clone()} | moments


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
