"""Token log-probs and entropy from hidden states, without storing the logits of all tokens."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.core.masking import at_least_float32, one_per_row
from heedful.kernels.cpu.products import linear, product

CHUNK = 2**22
"""Logits per matrix product."""
SMALLEST_CHUNK, LEARNED_CHUNK = 256, 1024
"""Minimum tokens per chunk, because each chunk reads the full matrix; and where the matrix has a gradient, because each
chunk reads and writes all of it. A CPU's products are too slow to need more than the former."""
BLOCK, CPU_BLOCK = 2**25, 2**19
"""Logits converted to float32 at a time; on a CPU as many as fit its inner caches."""
KEPT = 2**24
"""Maximum logits stored for the backward pass; more are recomputed."""

PART = 2**13
"""Rows of the head's matrix per matrix product of its gradient."""


def head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    ids: Int[Tensor, " tokens"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    cap: float | None = None,
    with_entropy: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each token, and entropy of each distribution, from the hidden states before an output head.

        x = (h W^T + b) / temperature        log p = x[id] - logsumexp(x)        H = -sum_v p_v log p_v

    With a cap c, as in Gemma 2, c tanh((h W^T + b) / c) replaces h W^T + b.

    Equal to `token_logprobs` and `entropy` of the logits. But logits exist only for a chunk of tokens at a time, also
    in the backward pass, which for upstream gradients g and g_H is

        dx_v = g ([v = id] - p_v) - g_H p_v (log p_v + H)

    times the cap's slope 1 - tanh((h W^T + b) / c)^2.

    Args:
        hidden: last hidden state before each token.
        weight: matrix of the output head.
        ids: the tokens.
        bias: bias of the output head.
        temperature: part of the policy, as in `token_logprobs`.
        cap: bound of a logit's absolute value before division by the temperature; None has no cap.
        with_entropy: compute the entropy; else it is zeros.
        compute_dtype: dtype of the matrix products; None is that of ``hidden``. The rest is in at least float32.
    """
    one_per_row(ids=ids, hidden=hidden)
    options = _Options(temperature, cap, with_entropy, compute_dtype or hidden.dtype, torch.is_grad_enabled())
    numbers: tuple[Tensor, Tensor] = _HeadLogprobs.apply(hidden, weight, bias, ids, options)
    return numbers


class _Options(NamedTuple):
    temperature: float
    cap: float | None
    with_entropy: bool
    compute_dtype: torch.dtype
    has_backward: bool
    """False under ``torch.no_grad``, which autograd's `needs_input_grad` does not know."""


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        dtype = options.compute_dtype
        states, matrix, shift = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        learns = options.has_backward and ctx.needs_input_grad[1]
        is_kept = options.has_backward and any(ctx.needs_input_grad) and ids.shape[0] * weight.shape[0] <= KEPT
        kept, in_place = [], _writes_over(states, options)
        logprobs = torch.empty(ids.shape, dtype=at_least_float32(states[:0]).dtype, device=ids.device)
        entropy = torch.zeros_like(logprobs)
        for chunk in token_chunks(ids, weight.shape[0], learns=learns):
            logits = linear(states[chunk], matrix, shift)
            for block in float32_blocks(logits):
                place = logits[block] if in_place else None
                logp = torch.log_softmax(_scaled(logits[block], options), -1, out=place)
                logprobs[chunk][block] = logp.gather(-1, ids[chunk][block].unsqueeze(-1)).squeeze(-1)
                if options.with_entropy:
                    entropy[chunk][block] = -logp.exp().mul_(_finite(logp)).sum(-1)
                del logp, place  # not in memory beside the next block's
            if is_kept:
                kept.append(logits)
            del logits
        ctx.set_materialize_grads(False)  # without a gradient of the entropy (only a metric), skips it
        ctx.save_for_backward(states, matrix, shift, ids, entropy, *kept)
        ctx.options, ctx.dtypes = options, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, upstream_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        states, matrix, shift, ids, entropy, *kept = ctx.saved_tensors
        upstream = torch.zeros_like(entropy) if upstream is None else upstream
        of_entropy, temperature = upstream_entropy if ctx.options.with_entropy else None, ctx.options.temperature
        like = [
            torch.zeros_like(x, dtype=dtype) if wanted else None
            for x, dtype, wanted in zip((states, matrix, shift), ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        d_hidden, d_weight, d_bias = like
        are_logprobs = bool(kept) and _writes_over(states, ctx.options)
        for i, chunk in enumerate(token_chunks(ids, matrix.shape[0], learns=d_weight is not None)):
            logits = kept[i] if kept else linear(states[chunk], matrix, shift)
            d_logits = torch.empty_like(logits)
            for block in float32_blocks(logits):
                _write_gradient(
                    d_logits[block],
                    logits[block],
                    ids[chunk][block].unsqueeze(-1),
                    (upstream[chunk][block] / temperature).unsqueeze(-1),
                    None if of_entropy is None else (of_entropy[chunk][block] / temperature).unsqueeze(-1),
                    entropy[chunk][block].unsqueeze(-1),
                    ctx.options,
                    are_logprobs=are_logprobs,
                )
            if d_hidden is not None:
                d_hidden[chunk] = product(d_logits, matrix)
            if d_weight is not None:
                for part in matrix_parts(matrix):
                    d_weight[part] += product(d_logits.t()[part], states[chunk])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=d_bias.dtype)
            del logits, d_logits
        return d_hidden, d_weight, d_bias, None, None


def _writes_over(states: Tensor, options: _Options) -> bool:
    """Whether log-probs overwrite logits: saves memory on a CPU, and a softmax if they are stored for the backward
    pass. Needs logits in float32, the dtype of log-probs."""
    return options.cap is None and states.device.type == "cpu" and torch.finfo(states.dtype).bits >= 32


def token_chunks(ids: Tensor, vocab: int, *, learns: bool) -> list[slice]:
    """Slices of tokens whose logits are computed at a time."""
    smallest = LEARNED_CHUNK if learns and ids.device.type != "cpu" else SMALLEST_CHUNK
    size = max(smallest, CHUNK // vocab)
    return [slice(start, start + size) for start in range(0, ids.shape[0], size)]


def matrix_parts(matrix: Tensor) -> list[slice]:
    """Slices of the head's rows whose gradient is computed at a time."""
    return [slice(start, start + PART) for start in range(0, matrix.shape[0], PART)]


def float32_blocks(logits: Tensor) -> list[slice]:
    """Slices of a chunk's tokens that are converted to float32 at a time."""
    size = max(1, (CPU_BLOCK if logits.device.type == "cpu" else BLOCK) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def _scaled(logits: Tensor, options: _Options) -> Tensor:
    scaled = at_least_float32(logits)
    if options.cap is not None:
        scaled = options.cap * torch.tanh(scaled / options.cap)
    return scaled if options.temperature == 1 else scaled / options.temperature


def _write_gradient(  # noqa: PLR0917  one number per token each, all needed
    place: Tensor,
    kept: Tensor,
    ids: Tensor,
    g: Tensor,
    g_entropy: Tensor | None,
    entropy: Tensor,
    options: _Options,
    *,
    are_logprobs: bool,
) -> None:
    """Write the gradient of a block of logits in place, in as few passes over memory as possible.

    ``kept`` are its logits or log-probs.
    """
    x = kept if are_logprobs else _scaled(kept, options)
    if g_entropy is not None:
        logp = x if are_logprobs else x.log_softmax(-1)
        finite = logp if are_logprobs else _finite(logp)  # kept ones are already finite
        del x
        d = logp.exp().mul_((finite + entropy).mul_(g_entropy).add_(g)).neg_()
    elif are_logprobs:
        d = torch.exp(x, out=place).mul_(-g)
    else:
        d = (torch.softmax(x, -1, out=place) if place.dtype == x.dtype else x.softmax(-1)).mul_(-g)
    d.scatter_add_(-1, ids, g)
    if options.cap is not None:
        d = d * cap_slope(kept, options.cap)
    if d is not place:
        place.copy_(d)


def cap_slope(logits: Tensor, cap: float) -> Tensor:
    """Derivative of the capped logits by the logits before the cap."""
    return 1 - torch.tanh(at_least_float32(logits) / cap).square()


def _finite(logp: Tensor) -> Tensor:
    """Replace log-probs of -inf by a finite number, in place, so that their product with probability 0 is 0."""
    return logp.clamp_(min=-1e30)
