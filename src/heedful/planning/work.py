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
from heedful.planning.divided import Ranks, memory, of_rank
from heedful.planning.memory import Network, Plan, Sampling, Work, plan
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


def plan_of(
    config: Trainer,
    shape_of: ShapeOf,
    lengths: Lengths,
    *,
    ranks: int,
    device: Literal["cpu", "cuda"],
    half: bool,
) -> Plan:
    """The bytes that each part of a run needs on each of its ranks, phase by phase. Arguments are those of `work_of`."""
    is_divided = config.shard == "full" and ranks > 1
    work = work_of(config, shape_of, lengths, device=device, half=half, is_divided=is_divided)
    among = Ranks(ranks=ranks, replicas=config.replicas, sync_every=config.sync_every)
    return memory(work, among) if is_divided else plan(of_rank(work, among))


def work_of(
    config: Trainer,
    shape_of: ShapeOf,
    lengths: Lengths,
    *,
    device: Literal["cpu", "cuda"],
    half: bool,
    is_divided: bool = False,
) -> Work:
    """What a run does, as far as memory is concerned; all of its ranks together.

    Args:
        config: the settings.
        shape_of: gives the shape of each model that the settings name.
        lengths: of the texts. Every text is taken to be as long as the longest.
        device: where the run is.
        half: whether products are in a half precision.
        is_divided: models are divided among ranks, so that none shares another's weights.
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
        **_experts(config, shape),
    )
    online = config if isinstance(config, RolloutConfig) else None
    engine = config if isinstance(config, OnlineConfig) else None
    reference = None
    if not isinstance(config, SFTConfig | RewardConfig):
        reference = _reference(config, policy, shape_of, is_divided)
    return Work(
        device=device,
        half=half,
        policy=policy,
        critic=None if engine is None else _critic(engine, policy, shape_of, is_divided),
        value_head=engine is not None and engine.estimator.critic and engine.critic == "shared",
        reference=reference,
        reference_is_freed=isinstance(config, DPOConfig | KTOConfig) and reference is not None,
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
        per_item=per_item,
        rollout=0 if online is None else online.rollout_batch_size,
        scored_rows=None if online is None else _scored_rows(online, lengths),
        sampling=None if online is None or online.sampler else _sampling(online, lengths),
        sends_copy=online is not None and online.sampler_weights == "nccl",
    )


def _batch(config: Trainer) -> int:
    """Rows of an optimizer step."""
    if isinstance(config, OnlineDPOConfig):
        return 2 * config.minibatch_size // config.samples_per_prompt
    if isinstance(config, RolloutConfig):
        return config.minibatch_size
    return config.batch_size * (1 if isinstance(config, SFTConfig | KTOConfig) else 2)


def _scored_rows(config: RolloutConfig, lengths: Lengths) -> int:
    """Rows that policy, reference and critic read at a time before an update."""
    limit, rows = config.scoring_micro_batch, config.rollout_batch_size
    if limit.tokens is not None:
        rows = min(rows, max(1, limit.tokens // lengths.longest))
    return min(rows, limit.rows)


def _sampling(config: RolloutConfig, lengths: Lengths) -> Sampling:
    limit = config.rollout_micro_batch
    rows = min(limit.rows, config.rollout_batch_size)
    if limit.tokens is not None:  # a row that has more is sampled by itself
        rows = min(rows, max(1, limit.tokens // lengths.longest))
    return Sampling(
        rows=rows,
        prompt=lengths.prompt,
        new_tokens=lengths.longest - lengths.prompt,
        keeps_copy=config.cuda_graphs,
    )


def _reference(
    config: DPOConfig | KTOConfig | RolloutConfig, policy: Network, shape_of: ShapeOf, is_divided: bool
) -> Network | None:
    """A reference with weights of its own."""
    on_device = config.reference_device == "same"
    is_own = config.reference is not None or is_divided
    if not is_own and (config.lora_rank or isinstance(config, DPOConfig | KTOConfig)):
        return None  # the policy itself, or none; DPO's on the CPU is a copy that takes nothing here
    if isinstance(config, DPOConfig) and not config.needs_reference:
        return None
    if isinstance(config, RolloutConfig) and not config.loads_reference:
        return None
    shape = policy.shape if config.reference is None else shape_of(config.reference)
    as_policy = policy.float32_experts if config.lora_rank else config.weights_dtype == "float32"
    return Network(
        shape=shape,
        four_bit=policy.four_bit,
        on_device=on_device,
        float32_experts=config.reference is None and as_policy,
    )


def _critic(config: OnlineConfig, policy: Network, shape_of: ShapeOf, is_divided: bool) -> Network | None:
    """A critic with a network of its own."""
    if not config.estimator.critic or config.critic == "shared":
        return None
    if config.critic == "reward":
        start = next((r.removeprefix("model:") for r in config.rewards if r.startswith("model:")), config.model)
    else:
        start = config.value_model or config.model
    shape = shape_of(start).trunk
    return Network(
        shape=shape,
        trained=policy.trained,
        output="score",
        lora_rank=policy.lora_rank,
        four_bit=policy.four_bit,
        shares_weights=bool(config.lora_rank)
        and config.critic == "separate"
        and start == config.model
        and not is_divided,
        **_experts(config, shape),
    )


def _experts(config: Trainer, shape: Shape) -> dict[str, bool]:
    """Whether adapters are on experts, which then stay in float32."""
    adapted = bool(config.lora_rank) and shape.has_adapted_experts(config.lora_targets)
    return {"adapts_experts": adapted, "float32_experts": adapted}


def _rewards(config: RolloutConfig, shape_of: ShapeOf) -> list[Network]:
    scorers = (*config.rewards, *config.best_by)
    names = [scorer.removeprefix("model:") for scorer in scorers if scorer.startswith("model:")]
    return [Network(shape=shape_of(name).trunk, output="score") for name in names]
