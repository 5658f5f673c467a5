"""On-policy distillation: divergences between a student's and a teacher's next-token distributions, and the sampled reward.

The student is the policy: it samples the response. The teacher is frozen and gives its distribution at each of the same
tokens. Gradients flow only into the student.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.core.logprobs import kl_estimate
from heedful.core.masking import at_least_float32, same_shape

__all__ = ["same_top_token", "teacher_advantages", "teacher_divergence"]


def teacher_divergence(
    logits: Float[Tensor, "*shape vocab"],
    teacher_logits: Float[Tensor, "*shape vocab"],
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """Divergence between the student's p and the teacher's q at each token, in nats, over the whole vocabulary.

        beta = 1        reverse KL      KL(p || q) = sum_v p_v (log p_v - log q_v)
        beta = 0        forward KL      KL(q || p)
        else            JSD             beta KL(q || m) + (1 - beta) KL(p || m),    m = (1 - beta) p + beta q

    with p = softmax(logits / temperature), and q likewise. Agarwal et al. 2024 ("On-Policy Distillation of Language
    Models", GKD), eq. 3 is the JSD. The reverse KL is that of MiniLLM (Gu et al. 2024): a student that cannot have all of
    the teacher's answers keeps the likely ones; the forward KL spreads over all of them.

    The ends 0 and 1 are special cases, as in TRL 1.16's DistillationTrainer, and the function jumps there: the JSD itself
    goes to 0 at both ends, since the mixture m becomes one of the two. Near them it is about ``beta KL(q || p)`` and
    ``(1 - beta) KL(p || q)``. So a beta of 0.99 has a gradient a hundredth of that of 1; change the learning rate too.

    Args:
        logits: the student's, or its log-probs; each row predicts one token.
        teacher_logits: the teacher's for the same tokens; constants. Same vocabulary.
        beta: which divergence, from 0 to 1, as above.
        temperature: of both distributions; part of the policy, as in `token_logprobs`.

    A token of probability 0 (a logit of ``-inf``) under both models contributes nothing. If the teacher excludes a token
    that the student may sample, the reverse KL is infinite; if the student excludes one of the teacher's, the forward
    KL is. The result is then ``inf``, and its gradient 0 at this position: no finite step would repair it, and the other
    positions keep theirs. The JSD is at most ``-beta log beta - (1 - beta) log(1 - beta)``, and always has a gradient.

    Raises ValueError if ``beta`` is not between 0 and 1.
    """
    same_shape(logits=logits, teacher_logits=teacher_logits)
    check_beta(beta)
    logp, logq = (
        torch.log_softmax(at_least_float32(x) / temperature, dim=-1) for x in (logits, teacher_logits.detach())
    )
    return divergence_of_logprobs(logp, logq, beta)


def teacher_advantages(
    logprobs: Float[Tensor, "batch time"],
    teacher_logprobs: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Advantage of each sampled token in on-policy distillation: ``A_t = log q(y_t) - log p(y_t)``; zero outside the mask.

    The negative k1 estimate of the reverse KL at the token, p the student and q the teacher (Lu and Thinking Machines
    Lab 2025, "On-Policy Distillation"). It is a reward with discount 0: each token is marked by itself, and not charged for
    the tokens after it. As the advantage of `policy_gradient` it has, in expectation over tokens sampled from p, minus the
    gradient of `teacher_divergence` with beta 1 at the same states:

        E_{y ~ p} [A_y grad log p(y)] = -grad KL(p || q)

    That holds at temperature 1 or the common one, for tokens sampled without top-k or top-p from the same weights, and
    for advantages that are not whitened. It needs one log-prob per token of the teacher, and has more variance.

    Args:
        logprobs: of the sampled tokens under the student that sampled them.
        teacher_logprobs: of the same tokens under the teacher.
        response_mask: True on response tokens.

    Detached. ``-inf`` where the teacher excludes the token.
    """
    same_shape(2, logprobs=logprobs, teacher_logprobs=teacher_logprobs, response_mask=response_mask)
    kl = kl_estimate(logprobs.detach(), teacher_logprobs.detach(), kind="k1")
    return torch.where(response_mask, -kl, 0.0)


def same_top_token(
    logits: Float[Tensor, "*shape vocab"], teacher_logits: Float[Tensor, "*shape vocab"]
) -> Bool[Tensor, "*shape"]:
    """Whether student and teacher have the same most likely token. Its mean over tokens is their agreement."""
    same_shape(logits=logits, teacher_logits=teacher_logits)
    return logits.argmax(-1) == teacher_logits.argmax(-1)


def check_beta(beta: float) -> None:
    """Raises ValueError if beta selects no divergence."""
    if not 0 <= beta <= 1:
        raise ValueError(
            f"beta is {beta}; it must be from 0 (forward KL) to 1 (reverse KL), and between them is the JSD's weight"
        )


def divergence_of_logprobs(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """`teacher_divergence` of log-probs ``[..., vocab]`` that are normalised."""
    if beta == 1:
        return _kl(logp, logq)
    if beta == 0:
        return _kl(logq, logp)
    mixture = log_mixture(logp, logq, beta)
    return beta * _kl(logq, mixture) + (1 - beta) * _kl(logp, mixture)


def log_mixture(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """``log((1 - beta) p + beta q)``, about -1e30 where both are 0."""
    return torch.logaddexp(_finite(logp) + math.log(1 - beta), _finite(logq) + math.log(beta))


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    p = logp.exp()
    is_infinite = ((p > 0) & (logq == -math.inf)).any(-1)
    return torch.where(is_infinite, math.inf, (p * (_finite(logp) - _finite(logq))).sum(-1))


def _finite(logp: Tensor) -> Tensor:
    """Log-probs of -inf become a finite number, so that products with probability 0 are 0; they have no gradient."""
    return logp.clamp(min=-1e30)
