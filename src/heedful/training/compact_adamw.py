"""AdamW for weights in bfloat16, and with its moments in main memory."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from heedful.core.rounding import stochastic_round
from heedful.distributed.sharding import first_held, held

PART = 2**24
"""Weights that are stepped at a time: their float32 copies take a part of the memory that the whole would."""
BLOCK = 2**20
"""Weights whose noise has a seed of its own, so that a rank makes little noise beside that of its part of a tensor."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose moments may be on another device than the weights, and whose weights may be in bfloat16.

    Each step is torch's own, on float32 copies of the weights and their gradients where the moments are; weights in bfloat16
    are then rounded at random (`heedful.core.stochastic_round`), so that steps too small for bfloat16 count on average.
    With float32 weights the numbers are those of `torch.optim.AdamW`. Of weights that are divided among ranks, each rank has
    the moments of its parts and steps those.

    Args:
        groups: parameter groups, each with ``lr`` and ``weight_decay``.
        betas, eps: Adam's.
        device: of the moments and the step; None is that of the weights.
        seed: of the noise.

    The noise of a weight depends on the seed, its step and its place only, so it is the same on any number of ranks, after a
    run has gone on, and whatever else draws random numbers.
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here steps with a closure
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
                [state["step"].to(mean.device, copy=True)],
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
        """Set the state, with the moments in the dtype and on the device that they have: torch would take the weights'."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for i, saved in state_dict["state"].items():
            device = self.device or parameters[i].device
            moments = {name: saved[name].to(device, copy=True) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameters[i]] = {"step": saved["step"].clone()} | moments


def _noise(of_tensor: tuple[int, int, int], count: int, first: int, stepped: Tensor) -> Tensor:
    """For each stepped weight a number of 0 to 2^16 - 1, int32, whatever part of its tensor they are.

    Args:
        of_tensor: the run's seed, the steps before, the tensor's place in the optimizer. No two have the same noise.
        count: weights in the tensor.
        first: where in it the stepped weights begin.
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
    """A number of 56 bits for some numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")
