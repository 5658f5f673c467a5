"""How noisy the estimate of the policy gradient is that a rollout batch gives."""

import torch
from torch import Tensor

from heedful.algorithms.online.experience import Experience
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.ppo import backward_minibatch, make_experience
from heedful.configs.online import OnlineConfig

BATCHES = 4
"""Rollout batches that are looked at."""


def noise(learner: Learner[OnlineConfig]) -> float | None:
    """Share of noise in the squared norm of the policy gradient of a rollout batch, from the gradients g and h of its halves.

        E |g - h|^2 / E |g + h|^2

    The gradient of the batch is (g + h) / 2. Half of the difference has the same variance and mean 0, so the numerator is
    the trace of the variance and the denominator that plus the square of the mean: 1 where a batch says nothing, 0 where it
    says all. A scale of the loss cancels out, so methods that scale advantages differently can be compared. Advantages are
    estimated in the whole batch, as in training; responses to a prompt stay together. Means are over `BATCHES` batches at the
    model as it is. None if no batch has a gradient.
    """
    apart = together = 0.0
    for _ in range(BATCHES):
        experience = make_experience(learner, rollout(learner, next(learner.prompts)))
        each = learner.config.samples_per_prompt
        half = len(experience.rows) // each // 2 * each
        if half:
            first, second = (_gradient(learner, experience, start, half) for start in (0, half))
            apart += sum(float((g - h).square().sum()) for g, h in zip(first, second, strict=True))
            together += sum(float((g + h).square().sum()) for g, h in zip(first, second, strict=True))
    return apart / together if together else None


def _gradient(learner: Learner[OnlineConfig], experience: Experience, start: int, count: int) -> list[Tensor]:
    """The gradient of the policy's loss on ``count`` responses, without an optimizer step."""
    part = experience.select(torch.arange(start, start + count, device=experience.rows.device))
    learner.optimizer.zero_grad(set_to_none=True)
    recorder = Recorder(learner, experience.kl)
    backward_minibatch(learner, part, recorder, learner.micro_batch)
    weights = [weight for weight in learner.policy.lm.parameters() if weight.requires_grad]
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    learner.optimizer.zero_grad(set_to_none=True)
    return found
