"""`Learner`: all models and state of an online run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful import core
from heedful.algorithms.online.average import WeightAverage, averaged
from heedful.algorithms.online.prompts import Prompts
from heedful.algorithms.online.ptx import PretrainingMix
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.data.batches import AdaptiveMicroBatch, Batch
from heedful.distributed.sharding import LockstepForwards, gathered_on_first, is_sharded, lockstep_forwards
from heedful.engines.sampler import Sampler
from heedful.engines.teacher_forced import token_outputs, token_values
from heedful.errors import CheckpointError
from heedful.models.policy import Policy, TokenOutputs
from heedful.models.save import save_policy, save_value_model
from heedful.models.value_model import ValueModel
from heedful.rewards import Reward
from heedful.rewards.models import model_rewards
from heedful.training.non_finite import NonFiniteGuard
from heedful.training.optimization import Schedule
from heedful.training.state import (
    load_optimizer_state,
    load_scaler_state,
    load_trained_weights,
    random_state,
    scaler_state,
    set_random_state,
    trained_weights,
)
from heedful.types import MicroBatch

C_co = TypeVar("C_co", bound=RolloutConfig, covariant=True)


@dataclass
class Learner(Generic[C_co]):
    """A policy with its critic, reference, optimizer, controllers and random numbers.

    ``config``, ``rewards``, ``judges``, ``sampler`` and ``reference`` do not change; `state_dict` has all the rest but
    ``async_sampler``.
    """

    config: C_co
    policy: Policy
    reference: Policy | None
    """None if not needed."""
    critic: ValueModel | None
    """A separate network; None with a value head on the policy, or without a critic."""
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    kl: core.FixedKL | core.AdaptiveKL
    score_norm: core.ScoreNorm
    average: WeightAverage | None
    ptx: PretrainingMix | None
    prompts: Prompts
    generator: torch.Generator
    rewards: Sequence[Reward]
    sampler: Sampler
    judges: Sequence[Reward] = ()
    """Rewards that select among evaluated models (``--selection-rewards``); not trained on."""
    entropy: core.EntropyControl = field(default_factory=lambda: core.EntropyControl(0.0))
    """The coefficient of the entropy bonus."""
    non_finite_guard: NonFiniteGuard = field(default_factory=lambda: NonFiniteGuard(None))
    async_sampler: Sampler | None = None
    """Samples rollout batches, on servers, during earlier updates; None: ``sampler`` does, when they are needed. A resumed
    run samples them anew."""
    adaptive: AdaptiveMicroBatch = field(default_factory=AdaptiveMicroBatch)
    """Micro-batch that fits into memory in training. Sampling and passes without gradients use the sampler's; reward
    models have their own."""

    def close(self) -> None:
        """Close the connection to servers, or the user's engine, and end environments, if any."""
        for sampler in filter(None, (self.async_sampler, self.sampler)):
            sampler.close()

    @property
    def micro_batch(self) -> MicroBatch:
        """Maximum rows and tokens per pass: the settings' values, or less after memory ran out."""
        return self.adaptive.within(self.config.micro_batch)

    @property
    def adaptives(self) -> dict[str, AdaptiveMicroBatch]:
        """All adaptive micro-batches, by name."""
        of_rewards = {name: reward.adaptive for name, reward in model_rewards([*self.rewards, *self.judges])}
        return {"learning": self.adaptive, "sampling": self.sampler.adaptive, **of_rewards}

    @property
    def trained(self) -> Sequence[Policy | ValueModel]:
        """The networks in training."""
        policy = [self.policy] if self.config.trains_policy else []
        return policy if self.critic is None else [*policy, self.critic]

    def token_outputs(
        self, model: Policy | None, batch: Batch, *, with_entropy: bool = False, with_states: bool = False
    ) -> TokenOutputs:
        """A teacher-forced pass of the policy or the reference over responses, without gradients (`token_outputs`)."""
        assert model is not None
        return token_outputs(
            model,
            batch,
            temperature=self.config.temperature,
            micro_batch=self.config.scoring_micro_batch,
            adaptive=self.sampler.adaptive,
            with_entropy=with_entropy,
            with_states=with_states,
        )

    def critic_values(self, batch: Batch) -> torch.Tensor:
        """Values ``[batch, time]`` of a critic with its own network, without gradients."""
        assert self.critic is not None
        micro_batch = self.config.scoring_micro_batch
        return token_values(self.critic, batch, micro_batch=micro_batch, adaptive=self.sampler.adaptive)

    @property
    def pulls_trunk(self) -> bool:
        """Whether the value loss of a head on the policy's trunk also trains the trunk."""
        config = self.config
        return (
            isinstance(config, OnlineConfig)
            and config.estimator.critic
            and self.critic is None
            and config.value_coef > 0
        )

    @property
    def is_warming_up(self) -> bool:
        """Whether only the critic learns from the next rollout batch (``critic_warmup_steps``)."""
        config = self.config
        return isinstance(config, OnlineConfig) and self.schedule.done < config.critic_warmup_steps

    def lockstep_forwards(self) -> LockstepForwards | None:
        """The policy's pass of a micro-batch, which ranks with a sharded policy make together."""
        return lockstep_forwards((self.policy, lambda: self.policy.dummy_loss(with_values=self.pulls_trunk)))

    def update_coefficients(
        self: "Learner[OnlineConfig]", metrics: Mapping[str, float], *, is_warming_up: bool = False
    ) -> dict[str, float]:
        """Update the coefficients of KL penalty and entropy bonus; returns those of this step."""
        config, kl, entropy = (
            self.config,
            metrics.get("reference/kl", math.nan),
            metrics.get("policy/entropy", math.nan),
        )
        used: dict[str, float] = {}
        if config.kl_coef > 0:
            used["reference/kl_coef"] = self.kl.coef
            if not is_warming_up and math.isfinite(kl):
                self.kl.update(kl, config.rollout_batch_size)
        if self.entropy.target is not None:
            used["policy/entropy_coef"] = self.entropy.coef
            if not is_warming_up and math.isfinite(entropy):
                self.entropy.update(entropy)
        return used

    def parts(self) -> tuple[Sequence[PreTrainedModel], PreTrainedTokenizerBase]:
        """The models to save, without heedful's own heads, and their tokenizer."""
        models = [model.trunk if isinstance(model, ValueModel) else model.lm for model in self.trained]
        return models, self.sampler.renderer.tokenizer

    def save(self, folder: Path) -> None:
        """Write the policy (its average, if there is one) in Hugging Face format, and a separate critic in a
        subfolder; the critic alone if the policy does not learn."""
        tokenizer = self.sampler.renderer.tokenizer
        if not self.config.trains_policy:
            assert self.critic is not None
            save_value_model(self.critic, tokenizer, folder)
            return
        with averaged(self.average):
            save_policy(self.policy, tokenizer, folder, stop_ids=self.sampler.stop_ids)
        if self.critic is not None:
            save_value_model(self.critic, tokenizer, folder / "value_model")

    def unsharded(self) -> Self:
        """An unsharded learner for saving (`RunLearner.unsharded`), with the average's weights if there is one."""
        if not is_sharded(self.policy):
            return self
        with averaged(self.average):
            policy = gathered_on_first(self.policy)
        critic = None if self.critic is None else gathered_on_first(self.critic)
        return self if policy is None else replace(self, policy=policy, critic=critic, average=None)

    def state_dict(self) -> dict[str, Any]:
        """The state for bitwise resuming, without frozen weights."""
        return {
            "policy": trained_weights(self.policy),
            "critic": None if self.critic is None else trained_weights(self.critic),
            "grad_scaler": scaler_state(self.policy),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "score_norm": self.score_norm.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "ptx": None if self.ptx is None else self.ptx.order.state_dict(),
            "prompts": self.prompts.order.state_dict(),
            "random": random_state(self.generator),
            "skipped_in_a_row": self.non_finite_guard.in_a_row,
            "micro_batches": {name: adaptive.state_dict() for name, adaptive in self.adaptives.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, with the same settings.

        Raises CheckpointError if only one of state and learner has a critic, an average or PPO-ptx records.
        """
        for name, flag in (("critic", "--critic"), ("average", "--ema-decay"), ("ptx", "--ptx-data")):
            is_saved, is_here = state[name] is not None, getattr(self, name) is not None
            if is_saved != is_here:
                has, lacks = ("the saved state", "this run") if is_saved else ("this run", "the saved state")
                raise CheckpointError(
                    f"{has} has a {name} ({flag}), but {lacks} has none; resume with the same settings"
                )
        load_trained_weights(self.policy, state["policy"])
        if self.critic is not None:
            load_trained_weights(self.critic, state["critic"])
        load_scaler_state(self.policy, state["grad_scaler"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if isinstance(self.kl, core.AdaptiveKL):  # a fixed coefficient is a setting
            self.kl.load_state_dict(state["kl"])
        if self.entropy.target is not None:
            self.entropy.load_state_dict(state["entropy"])
        self.score_norm = core.ScoreNorm(**state["score_norm"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.ptx is not None:
            self.ptx.order.load_state_dict(state["ptx"])
        self.prompts.order.load_state_dict(state["prompts"])
        set_random_state(self.generator, state["random"])
        self.non_finite_guard.in_a_row = state["skipped_in_a_row"]
        for name, adaptive in self.adaptives.items():
            adaptive.load_state_dict(state["micro_batches"].get(name, {}))
