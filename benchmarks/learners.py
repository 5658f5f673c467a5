"""A learner made of models that are there already, for benchmarks that measure or compare parts of an iteration."""

from collections.abc import Sequence

import torch

from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.prompts import Prompts
from heedful.algorithms.online.start import kl_control
from heedful.configs.online import OnlineConfig
from heedful.core.score_norm import ScoreNorm
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.data.splits import BatchOrder
from heedful.engines.sampler import Sampler
from heedful.models.policy import Policy
from heedful.models.value_model import ValueModel
from heedful.rewards import Reward
from heedful.training.optimization import Schedule, make_optimizer


def learner_of(
    config: OnlineConfig,
    policy: Policy,
    reference: Policy,
    critic: ValueModel | None,
    *,
    renderer: Renderer,
    prompts: Sequence[EncodedPrompt] = (),
    rewards: Sequence[Reward] = (),
    stop_ids: Sequence[int] = (),
) -> Learner:
    """One learning rate for all that learns; scores stay as they are."""
    optimizer = make_optimizer([(module, config.learning_rate) for module in (policy, critic)], config)
    order = BatchOrder(max(1, len(prompts)), 1, config.seed)
    return Learner(
        config=config,
        policy=policy,
        reference=reference,
        critic=critic,
        optimizer=optimizer,
        schedule=Schedule(optimizer, config.steps, config),
        kl=kl_control(config),
        score_norm=ScoreNorm(),
        average=None,
        ptx=None,
        prompts=Prompts(prompts, order, config.samples_per_prompt),
        generator=torch.Generator().manual_seed(0),
        rewards=rewards,
        sampler=Sampler(config, renderer, tuple(stop_ids), config.rollout_micro_batch),
    )
