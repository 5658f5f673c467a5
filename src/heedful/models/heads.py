"""Scalar heads, dropout, gradient checkpointing, and the logit map of causal language models."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.errors import CheckpointError, ConfigError
from heedful.kernels.packing import hidden_states
from heedful.kernels.weights import computing_in_float32


def scalar_head(hidden_size: int, *, std: float) -> nn.Linear:
    """A linear map from a hidden state to one number, with weights N(0, std^2) and bias 0."""
    head = nn.Linear(hidden_size, 1)
    nn.init.normal_(head.weight, std=std) if std else nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, in modules and in float attributes.

    Ratios and KL compare two passes of one policy, so both passes must be the same function. ``model.eval()`` is not
    enough: it also switches gradient checkpointing off, and some attentions read a float attribute instead of a module.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input, and recompute the rest in the backward pass (Chen et al. 2016).

    transformers does so only in training mode. Raises ConfigError if the architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"--gradient-checkpointing: {type(model).__name__} does not support it; leave it out")
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # older name
    enable({"use_reentrant": False})


class LogitMap(NamedTuple):
    """A language model's map from its trunk's states h and head W to logits: ``logits = scale cap tanh(h W^T / cap)``.

    Without a cap (None), ``scale h W^T``. Llama and Qwen have neither; Granite and Cohere scale, Gemma 2 and 4 cap.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """The logits from the head's output."""
        capped = output if self.cap is None else self.cap * torch.tanh(output / self.cap)
        return capped if self.scale == 1 else self.scale * capped


def refuse_not_finite(model: nn.Module, name: str) -> None:
    """Raises CheckpointError, naming ``name`` and the first weight, if the weights of a model have NaN or infinity.

    Rows of an input embedding that is no output head are left out: they concern only texts with their token.
    """
    rows = None
    if isinstance(model, PreTrainedModel):
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        rows = None if ends[1] is not None and ends[0].weight is ends[1].weight else ends[0].weight
    broken = not_finite((name, weight) for name, weight in model.named_parameters() if weight is not rows)
    if broken:
        raise CheckpointError(
            f"{name}: {len(broken)} of its weights are not finite (NaN or infinity), first {broken[0]}; use an earlier "
            "checkpoint, or download it again"
        )


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinity. Reads each once, without a copy."""
    present = ((name, weight.detach()) for name, weight in weights if weight.is_floating_point() and weight.numel())
    ends = {name: torch.stack(weight.aminmax()) for name, weight in present if not weight.is_meta}
    return [name for name, both in ends.items() if not both.isfinite().all()]


@torch.no_grad()
def logit_map(lm: PreTrainedModel) -> LogitMap:
    """Determine a causal language model's logit map.

    Tests the head on four states, and the operations after it on numbers from 2^-10 to 2^20. Raises CheckpointError if
    these are more than a scale and a cap: log-probs computed from trunk and head would be silently wrong.
    """
    trunk, head = lm.base_model, lm.get_output_embeddings()
    if head is None or trunk is lm:
        raise CheckpointError(f"{type(lm).__name__}: it has no separate trunk and output head")
    ids = torch.arange(1, 5, device=next(lm.parameters()).device).unsqueeze(0)
    seen: dict[str, Tensor] = {}

    def replace(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["states"] = inputs[0].float()
        powers = 2.0 ** (torch.arange(output.numel(), device=output.device) % 31 - 10)  # exact in half precision
        seen["output"] = powers.where(powers.frexp().exponent % 3 > 0, -powers).view(output.shape)
        return seen["output"].to(output.dtype)

    was_training = lm.training
    lm.eval()
    hook = head.register_forward_hook(replace)
    logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    hook.remove()
    states = hidden_states(trunk, ids).float()
    lm.train(was_training)
    if not bool(states.isfinite().all()):  # of a model in memory: loading checks others
        refuse_not_finite(lm, lm.name_or_path or type(lm).__name__)
    if not bool(states.any()):
        zero = [name for name, weight in trunk.named_parameters() if not name.endswith("bias") and not weight.any()]
        raise CheckpointError(
            f"{lm.name_or_path or type(lm).__name__}: its hidden states are all zero, so every token is as likely as any "
            f"other; weights that are all zero: {', '.join(zero[:4]) or 'the embeddings of tokens 1 to 4'}. Use an earlier "
            "checkpoint, or download it again"
        )
    rtol = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 2e-2
    if seen and seen["output"].shape == logits.shape and seen["states"].shape == states.shape:
        before = _factor(seen["states"], states)
        output, logits = seen["output"], logits.float()
        small, largest = output.abs() <= 2.0**-8, float(logits.abs().max())
        after = _factor(logits[small], output[small])
        is_capped = largest < 0.5 * abs(after) * 2.0**20
        found = LogitMap(after, largest / abs(after) if is_capped and after else None)
        is_known = torch.allclose(seen["states"], before * states, rtol=rtol, atol=rtol * float(states.abs().max()))
        has_bias = getattr(head, "bias", None) is not None
        if is_known and not (has_bias and before != 1) and torch.allclose(found(output), logits, rtol=rtol):
            return LogitMap(after * before, found.cap and found.cap / before)
    raise CheckpointError(
        f"{type(lm).__name__} does not compute its logits by an output head with an optional scale and cap, so "
        "heedful does not support it; docs/architectures.md lists the architectures that work"
    )


def _factor(numbers: Tensor, of: Tensor) -> float:
    """The factor between ``of`` and ``numbers``; exactly 1 if it is close to 1."""
    factor = float((numbers.double() * of.double()).sum() / of.double().square().sum())
    return 1.0 if abs(factor - 1) < 1e-6 else factor


def check_causal(trunk: PreTrainedModel, name: str) -> None:
    """Raises CheckpointError for a trunk that attends to later tokens, on which values must not depend. Leaves it in
    eval mode."""
    ids = torch.arange(1, 5, device=trunk.device).unsqueeze(0)
    changed = ids.clone()
    changed[0, -1] = 1
    with torch.no_grad(), computing_in_float32(trunk):
        before = hidden_states(trunk.eval(), ids)[:, :-1]
        after = hidden_states(trunk, changed)[:, :-1]
    if not torch.allclose(before, after, atol=1e-4):
        raise CheckpointError(f"{name}: {type(trunk).__name__} looks at later tokens; a value model must be causal")
