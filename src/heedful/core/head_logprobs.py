"""Token log-probs and entropy straight from hidden states, without the logits of all tokens in memory."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.core.masking import at_least_float32

CHUNK_OF_LOGITS = {"cpu": 2**22}
"""Logits computed at a time, by kind of device: as many float32 numbers as a CPU's cache holds; 2^26 elsewhere."""
SMALLEST_CHUNK = 256
"""Tokens a chunk at least: each adds to the gradient of the whole output head."""
KEPT_LOGITS = 2**24
"""Logits kept for the backward pass, 64 MiB in float32; more are computed again there."""


def head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    ids: Int[Tensor, " tokens"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each token and entropy of each distribution, from the states before an output head.

        x = (h W^T + b) / temperature        log p = x[id] - logsumexp(x)        H = -sum_v p_v log p_v

    The same numbers as `token_logprobs` and `entropy` give of the logits, which here exist for a chunk of tokens at a time,
    in the backward pass too. With upstream gradients g and g_H that is

        dx_v = g ([v = id] - p_v) - g_H p_v (log p_v + H)

    ``compute_dtype`` (None: that of ``hidden``) is that of the matrix products; all else is in at least float32. Entropy is
    zeros unless ``with_entropy``.
    """
    options = _Options(temperature, with_entropy, compute_dtype or hidden.dtype)
    numbers: tuple[Tensor, Tensor] = _HeadLogprobs.apply(hidden, weight, bias, ids, options)
    return numbers


class _Options(NamedTuple):
    temperature: float
    with_entropy: bool
    compute_dtype: torch.dtype


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        temperature, with_entropy, compute_dtype = options
        states, matrix = hidden.to(compute_dtype), weight.to(compute_dtype)
        shift = None if bias is None else bias.to(compute_dtype)
        vocab = weight.shape[0]
        chunk = max(SMALLEST_CHUNK, CHUNK_OF_LOGITS.get(hidden.device.type, 2**26) // vocab)
        parts = [slice(start, start + chunk) for start in range(0, ids.shape[0], chunk)]
        is_kept = any(ctx.needs_input_grad) and ids.shape[0] * vocab <= KEPT_LOGITS
        kept = []
        logsumexp = torch.empty(ids.shape, dtype=at_least_float32(states[:0]).dtype, device=ids.device)
        logprobs, entropy = torch.empty_like(logsumexp), torch.zeros_like(logsumexp)
        for part in parts:
            logits = torch.nn.functional.linear(states[part], matrix, shift)
            scaled = _scaled(logits, temperature)
            logsumexp[part] = scaled.logsumexp(-1)
            logprobs[part] = scaled.gather(-1, ids[part].unsqueeze(-1)).squeeze(-1) - logsumexp[part]
            if with_entropy:
                logp = scaled - logsumexp[part].unsqueeze(-1)
                p = logp.exp()
                entropy[part] = -p.mul_(logp.masked_fill_(p == 0, 0.0)).sum(-1)
            if is_kept:
                kept.append(logits)
        ctx.save_for_backward(states, matrix, shift, ids, logsumexp, entropy, *kept)
        ctx.parts, ctx.options = parts, options
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, upstream_entropy: Tensor) -> tuple[Tensor | None, ...]:
        states, matrix, shift, ids, logsumexp, entropy, *kept = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(states, dtype=ctx.dtypes[0]) if for_hidden else None
        d_weight = torch.zeros_like(matrix, dtype=ctx.dtypes[1]) if for_weight else None
        d_bias = torch.zeros_like(shift, dtype=ctx.dtypes[2]) if for_bias else None
        for i, part in enumerate(ctx.parts):
            logits = kept[i] if kept else torch.nn.functional.linear(states[part], matrix, shift)
            logp = _scaled(logits, ctx.options.temperature) - logsumexp[part].unsqueeze(-1)
            p = logp.exp()
            g = upstream[part].unsqueeze(-1)
            if ctx.options.with_entropy:
                logp = logp.masked_fill_(p == 0, 0.0).add_(entropy[part].unsqueeze(-1))
                d_logits = p.mul_(logp.mul_(upstream_entropy[part].unsqueeze(-1)).add_(g)).neg_()
            else:
                d_logits = p.mul_(-g)
            d_logits.scatter_add_(-1, ids[part].unsqueeze(-1), g)
            d_logits = (d_logits if ctx.options.temperature == 1 else d_logits.div_(ctx.options.temperature)).to(
                states.dtype
            )
            if d_hidden is not None:
                d_hidden[part] = d_logits @ matrix
            if d_weight is not None:
                d_weight += d_logits.t() @ states[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=d_bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = at_least_float32(logits)
    return scaled if temperature == 1 else scaled / temperature
