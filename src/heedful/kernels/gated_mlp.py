"""Gated MLPs on a CPU that write over what nothing needs any more, in passes without gradients."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from heedful.kernels.lean import LeanClasses

SILU = (nn.SiLU, SiLUActivation)
M = TypeVar("M", bound=nn.Module)


def use_lean_mlps(model: M, device: torch.device) -> M:
    """Let every gated MLP of a model write over what nothing needs any more, in passes without gradients, if it will be on a
    CPU.

        y = W_down (a(W_gate x) * W_up x),    a an activation such as SiLU        Shazeer 2020, equation 6

    The numbers are the same bit for bit, and so are names of parameters and saved files. MLPs of other formulas stay as they
    are.

    Args:
        model: the model.
        device: where it will be.
    """
    return _MLPS.use_in(model, device)


def _in_place(mlp: Any, x: Tensor) -> Tensor:
    gate = mlp.gate_proj(x)
    gate = nn.functional.silu(gate, inplace=True) if isinstance(mlp.act_fn, SILU) else mlp.act_fn(gate)
    output: Tensor = mlp.down_proj(gate.mul_(mlp.up_proj(x)))
    return output


def _class_of(mlp: Any) -> type[nn.Module] | None:
    """The class that takes an MLP's place; None if it computes something else."""
    kind: type[nn.Module] = type(mlp)
    if not kind.__name__.endswith("MLP") or not _is_plain(mlp):
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            plain: Tensor = kind.forward(self, x)
            return plain
        return _in_place(self, x)

    return type(f"Lean{kind.__name__}", (kind,), {"forward": forward})


@torch.no_grad()
def _is_plain(mlp: Any) -> bool:
    """Whether an MLP has the parts of the formula and computes it, on two random tokens."""
    parts = {name for name, _ in mlp.named_children()} - {"act_fn"}
    products = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if parts != {"gate_proj", "up_proj", "down_proj"} or not all(
        isinstance(product, nn.Linear) for product in products
    ):
        return False
    weight = mlp.gate_proj.weight
    if not hasattr(mlp, "act_fn") or weight.device.type != "cpu":
        return False
    x = torch.randn(1, 2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    return torch.equal(mlp(x), _in_place(mlp, x))


_MLPS = LeanClasses(_class_of)
