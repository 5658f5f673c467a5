"""What a run's settings make the planner count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from heedful.configs.dpo import DPOConfig
from heedful.configs.kto import KTOConfig
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.configs.online_dpo import OnlineDPOConfig
from heedful.configs.reward_model import RewardConfig
from heedful.configs.sft import SFTConfig
from heedful.planning.memory import Network, Sampling, Work
from heedful.planning.shapes import Shape

Trainer = SFTConfig | RewardConfig | DPOConfig | KTOConfig | RolloutConfig
"""The settings of a trainer."""
ShapeOf = Callable[[str], Shape]
"""Gives the shape of the model of a name."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest text, and of the longest prompt in it."""

    longest: int
    prompt: int = 0


def work_of(
    config: Trainer, shape_of: ShapeOf, lengths: Lengths, *, device: Literal["cpu", "cuda"], half: bool
) -> Work:
    """What a run does, as far as memory is concerned.

    Args:
        config: the settings.
        shape_of: gives the shape of each model that the settings name.
        lengths: of the texts. Every text is taken to be as long as the longest.
        device: where the run is.
        half: whether products are in a half precision.
    """
    shape = shape_of(config.model)
    is_pairs = isinstance(config, DPOConfig | RewardConfig | OnlineDPOConfig)
    limit = config.micro_batch.of_pairs if is_pairs else config.micro_batch
    per_item = 2 if is_pairs else 1
    batch = _batch(config)
    rows = min(limit.rows, batch)
    if limit.tokens is not None:
        rows = min(rows, max(per_item, limit.tokens // lengths.longest // per_item * per_item))
    policy = Network(
        shape=shape.trunk if isinstance(config, RewardConfig) else shape,
        trained="adapters" if config.lora_rank else "all",
        output="score" if isinstance(config, RewardConfig) else "logits",
        lora_rank=config.lora_rank,
        four_bit=config.quantize == "4bit",
    )
    online = config if isinstance(config, RolloutConfig) else None
    engine = config if isinstance(config, OnlineConfig) else None
    return Work(
        device=device,
        half=half,
        policy=policy,
        critic=None if engine is None else _critic(engine, policy, shape_of),
        value_head=engine is not None and engine.estimator.critic and engine.critic == "shared",
        reference=None if isinstance(config, SFTConfig | RewardConfig) else _reference(config, policy, shape_of),
        reference_is_freed=isinstance(config, DPOConfig | KTOConfig) and config.reference is not None,
        rewards=tuple(_rewards(online, shape_of)) if online else (),
        half_weights=config.weights_dtype == "bfloat16",
        optimizer=config.optimizer,
        optimizer_on_device=config.optimizer_device == "same",
        averages_weights=online is not None and online.ema_decay > 0,
        checkpointing=config.gradient_checkpointing,
        with_entropy=engine is not None and engine.has_entropy_bonus,
        rows=rows,
        length=lengths.longest,
        responses=lengths.longest - lengths.prompt,
        batch=batch,
        rollout=0 if online is None else online.rollout_batch_size,
        sampling=None if online is None else _sampling(online, lengths),
    )


def _batch(config: Trainer) -> int:
    """Rows of an optimizer step."""
    if isinstance(config, OnlineDPOConfig):
        return 2 * config.minibatch_size // config.samples_per_prompt
    if isinstance(config, RolloutConfig):
        return config.minibatch_size
    return config.batch_size * (1 if isinstance(config, SFTConfig | KTOConfig) else 2)


def _sampling(config: RolloutConfig, lengths: Lengths) -> Sampling:
    rows = min(config.rollout_micro_batch_size, config.rollout_batch_size)
    return Sampling(
        rows=rows,
        prompt=lengths.prompt,
        new_tokens=lengths.longest - lengths.prompt,
        keeps_copy=config.cuda_graphs,
    )


def _reference(config: DPOConfig | KTOConfig | RolloutConfig, policy: Network, shape_of: ShapeOf) -> Network | None:
    """A reference with weights of its own."""
    on_device = config.reference_device == "same"
    if config.reference is None and (config.lora_rank or isinstance(config, DPOConfig | KTOConfig)):
        return None  # the policy itself, or none; DPO's on the CPU is a copy that takes nothing here
    if isinstance(config, RolloutConfig) and not config.needs_reference and not config.score_norm_samples:
        return None
    shape = policy.shape if config.reference is None else shape_of(config.reference)
    return Network(shape=shape, four_bit=policy.four_bit, on_device=on_device)


def _critic(config: OnlineConfig, policy: Network, shape_of: ShapeOf) -> Network | None:
    """A critic with a network of its own."""
    if not config.estimator.critic or config.critic == "shared":
        return None
    if config.critic == "reward":
        start = next((r.removeprefix("model:") for r in config.rewards if r.startswith("model:")), config.model)
    else:
        start = config.value_model or config.model
    return Network(
        shape=shape_of(start).trunk,
        trained=policy.trained,
        output="score",
        lora_rank=policy.lora_rank,
        four_bit=policy.four_bit,
        shares_weights=bool(config.lora_rank) and config.critic == "separate" and start == config.model,
    )


def _rewards(config: RolloutConfig, shape_of: ShapeOf) -> list[Network]:
    names = [reward.removeprefix("model:") for reward in config.rewards if reward.startswith("model:")]
    return [Network(shape=shape_of(name).trunk, output="score") for name in names]
