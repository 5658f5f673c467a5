"""Divergence of a student from its teacher at each token, from hidden states, without storing the logits of all tokens."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.distillation import check_beta, divergence_of_logprobs, log_mixture, same_top_token
from heedful.core.masking import at_least_float32
from heedful.kernels.cpu.products import linear, product
from heedful.kernels.head_logprobs import KEPT, cap_slope, float32_blocks, matrix_parts, token_chunks


class Head(NamedTuple):
    """Output head of a language model: ``scale cap tanh((h W^T + b) / cap)``; without a cap ``scale (h W^T + b)``."""

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    cap: float | None = None


class HeadDivergence(NamedTuple):
    """What `head_divergence` gives of each token. Only the divergence has a gradient."""

    divergence: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"]
    """Of the student, in nats."""
    teacher_entropy: Float[Tensor, " tokens"]
    same_top_token: Bool[Tensor, " tokens"]
    """Whether both have the same most likely token."""


def head_divergence(
    hidden: Float[Tensor, "tokens hidden"],
    head: Head,
    teacher_hidden: Float[Tensor, "tokens teacher_hidden"],
    teacher_head: Head,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    compute_dtype: torch.dtype | None = None,
) -> HeadDivergence:
    """`teacher_divergence` of each token, and what else the same pass knows, from the states before two output heads.

    Logits of student and teacher exist only for a chunk of tokens at a time, also in the backward pass, which for the
    upstream gradient g, p of the student, q of the teacher and m = (1 - beta) p + beta q is

        dx_v = g p_v (r_v - sum_u p_u r_u)        r = log p - log q (beta = 1), (1 - beta) (log p - log m) (0 < beta < 1)
        dx_v = g (p_v - q_v)                      beta = 0

    times the slope of the head's scale and cap, over the temperature. The teacher is constant. No second derivative.

    Args:
        hidden: the student's last hidden state before each token.
        head: the student's output head; its weight and bias may learn.
        teacher_hidden: the teacher's for the same tokens, of any width.
        teacher_head: the teacher's output head, with the same vocabulary.
        beta: 1 is the reverse KL, 0 the forward KL, between them the JSD, as in `teacher_divergence`.
        temperature: of both distributions.
        compute_dtype: dtype of the matrix products; None is that of each model's states. The rest is in at least float32.

    Where the divergence is infinite, it has no gradient, as in `teacher_divergence`.

    Raises ValueError if the numbers of tokens or the vocabularies differ, or ``beta`` is not between 0 and 1.
    """
    check_beta(beta)
    _same_rows(hidden=hidden, teacher_hidden=teacher_hidden, meaning="tokens")
    _same_rows(head=head.weight, teacher_head=teacher_head.weight, meaning="words of the vocabulary")
    options = _Options(
        beta,
        temperature,
        _Map(head.scale, head.cap, compute_dtype or hidden.dtype),
        _Map(teacher_head.scale, teacher_head.cap, compute_dtype or teacher_hidden.dtype),
        torch.is_grad_enabled(),
    )
    of_teacher = teacher_hidden, teacher_head.weight, teacher_head.bias
    return HeadDivergence(*_HeadDivergence.apply(hidden, head.weight, head.bias, *of_teacher, options))


class _Map(NamedTuple):
    scale: float
    cap: float | None
    dtype: torch.dtype


class _Options(NamedTuple):
    beta: float
    temperature: float
    student: _Map
    teacher: _Map
    has_backward: bool
    """False under ``torch.no_grad``, which autograd's `needs_input_grad` does not know."""


class _HeadDivergence(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes them by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        student = [None if x is None else x.to(options.student.dtype) for x in (hidden, weight, bias)]
        teacher = [
            None if x is None else x.to(options.teacher.dtype) for x in (teacher_hidden, teacher_weight, teacher_bias)
        ]
        has_backward = options.has_backward and any(ctx.needs_input_grad)
        is_kept = has_backward and 2 * hidden.shape[0] * weight.shape[0] <= KEPT
        divergence = torch.empty(hidden.shape[0], dtype=at_least_float32(hidden[:0]).dtype, device=hidden.device)
        entropy, teacher_entropy = torch.empty_like(divergence), torch.empty_like(divergence)
        same_top, kept = torch.empty_like(divergence, dtype=torch.bool), []
        for chunk in token_chunks(hidden, weight.shape[0], learns=has_backward and ctx.needs_input_grad[1]):
            outputs, teacher_outputs = _outputs(student, chunk), _outputs(teacher, chunk)
            for block in float32_blocks(outputs):
                logp, logq = _both_logprobs(outputs[block], teacher_outputs[block], options)
                divergence[chunk][block] = divergence_of_logprobs(logp, logq, options.beta)
                same_top[chunk][block] = same_top_token(logp, logq)
                entropy[chunk][block] = _entropy_of(logp)
                teacher_entropy[chunk][block] = _entropy_of(logq)
                del logp, logq  # not in memory beside the next block's
            kept += [outputs, teacher_outputs] if is_kept else []
            del outputs, teacher_outputs
        ctx.mark_non_differentiable(entropy, teacher_entropy, same_top)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*student, *teacher, divergence, *kept)
        ctx.options, ctx.dtypes = options, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return divergence, entropy, teacher_entropy, same_top

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 7
        (*student, t_hidden, t_weight, t_bias, divergence), kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        teacher, options = [t_hidden, t_weight, t_bias], ctx.options
        states, matrix, _ = student
        d_hidden, d_weight, d_bias = (
            torch.zeros_like(x, dtype=dtype) if wanted else None
            for x, dtype, wanted in zip(student, ctx.dtypes, ctx.needs_input_grad, strict=False)
        )
        for i, chunk in enumerate(token_chunks(states, matrix.shape[0], learns=d_weight is not None)):
            outputs = kept[2 * i] if kept else _outputs(student, chunk)
            teacher_outputs = kept[2 * i + 1] if kept else _outputs(teacher, chunk)
            d_outputs = torch.empty_like(outputs) if kept else outputs  # each block is read before it is written
            for block in float32_blocks(outputs):
                factor = upstream[chunk][block].masked_fill(divergence[chunk][block].isinf(), 0.0)
                factor = factor * (options.student.scale / options.temperature)
                logp, logq = _both_logprobs(outputs[block], teacher_outputs[block], options)
                d = _slope_by_logits(logp, logq, options.beta).mul_(factor.unsqueeze(-1))
                del logp, logq
                if options.student.cap is not None:
                    d = d * cap_slope(outputs[block], options.student.cap)
                d_outputs[block] = d
                del d
            del outputs, teacher_outputs
            if d_hidden is not None:
                d_hidden[chunk] = product(d_outputs, matrix)
            if d_weight is not None:
                for part in matrix_parts(matrix):
                    d_weight[part] += product(d_outputs.t()[part], states[chunk])
            if d_bias is not None:
                d_bias += d_outputs.sum(0, dtype=d_bias.dtype)
            del d_outputs
        return d_hidden, d_weight, d_bias, None, None, None, None


def _outputs(model: list[Tensor | None], chunk: slice) -> Tensor:
    """What a head's matrix gives of some tokens, before scale, cap and temperature."""
    states, matrix, shift = model
    assert states is not None
    assert matrix is not None
    return linear(states[chunk], matrix, shift)


def _both_logprobs(outputs: Tensor, teacher_outputs: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    return (
        _logprobs(outputs, options.student, options.temperature),
        _logprobs(teacher_outputs, options.teacher, options.temperature),
    )


def _logprobs(outputs: Tensor, head: _Map, temperature: float) -> Tensor:
    logits = at_least_float32(outputs)
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    factor = head.scale / temperature
    return (logits if factor == 1 else logits * factor).log_softmax(-1)


def _entropy_of(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)


def _slope_by_logits(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Derivative of the divergence by the student's logits over the temperature; finite where the divergence is."""
    p = logp.exp()
    if beta == 0:
        return p.sub_(logq.exp())
    other = logq.clamp(min=-1e30) if beta == 1 else log_mixture(logp, logq, beta)
    ratio = logp.clamp(min=-1e30).sub_(other)
    del other
    ratio.sub_((p * ratio).sum(-1, keepdim=True))
    return p.mul_(ratio).mul_(1.0 if beta == 1 else 1 - beta)


def _same_rows(*, meaning: str, **tensors: Tensor) -> None:
    (name, x), (other, y) = tensors.items()
    if len(x) != len(y):
        raise ValueError(f"{name} has {len(x)} {meaning}, but {other} has {len(y)}; they must be equal")
