"""The report of ``heedful plan``, and changes of a run's settings that make it fit."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

from heedful.configs.online import ROLLOUT_ROWS, RolloutConfig
from heedful.configs.options import TrainingOptions
from heedful.configs.plan import OfflinePlanOptions, OnlinePlanOptions, PlanOptions
from heedful.configs.settings import flag
from heedful.errors import ConfigError
from heedful.planning.memory import GB, Lengths, Plan, ShapeOf, plan_of

C = TypeVar("C")
Change = dict[str, Any]
"""Changes of settings to try."""

LORA: Change = {"lora_rank": 16}
ATTENTION: Change = LORA | {"lora_targets": "q_proj,k_proj,v_proj,o_proj"}
"""Adapters without a mixture's experts. Other models need no less memory with it, so it is never offered for them."""
QLORA: Change = LORA | {"quantize": "4bit"}
CHECKPOINTING: Change = {"gradient_checkpointing": True}
DIVIDING: list[Change] = [
    {"sync_every": "micro-batch"},
    {"replicas": 1},
    {"shard": "full"},
    {"shard": "full", "sync_every": "micro-batch"},
]
"""Changes for a run on several ranks; in one process they have no effect."""
MICRO_BATCHES = ("rollout_micro_batch_size", "micro_batch_size")
OTHERS: list[Change] = [
    {"reference_device": "cpu"},
    {"weights_dtype": "bfloat16"},
    {"optimizer_device": "cpu"},
    {"weights_dtype": "bfloat16", "optimizer": "adamw-8bit"},
    {"weights_dtype": "bfloat16", "optimizer_device": "cpu"},
]


def plan_report(config: TrainingOptions, shape_of: ShapeOf) -> list[str]:
    """Lines with a run's memory, whether it fits, and if not, changes that make it fit.

    The run is planned for a CUDA device and bfloat16, unless ``device`` is cpu or ``dtype`` says otherwise.
    """
    device: Literal["cpu", "cuda"] = "cpu" if config.device == "cpu" else "cuda"
    half = config.dtype in ("bfloat16", "float16") or (config.dtype == "auto" and device == "cuda")
    assert isinstance(config, PlanOptions)
    if isinstance(config, RolloutConfig):
        assert isinstance(config, OnlinePlanOptions)
        lengths = Lengths(config.prompt_tokens + config.max_new_tokens, config.prompt_tokens)
    else:
        assert isinstance(config, OfflinePlanOptions)
        lengths = Lengths(config.max_length)

    def planned(settings: TrainingOptions) -> Plan:
        free = 0 if config.gpu_gb is None else config.gpu_gb * GB
        return plan_of(settings, shape_of, lengths, ranks=config.ranks, device=device, half=half, free=free)

    found = planned(config)
    where = f" on each of {config.ranks} ranks" if config.ranks > 1 else ""
    lines = [*table(found), ""]
    if found.sampled_rows and "sampling" in found.phases:
        how = ", with CUDA graphs" if found.graphs else ""
        how += ", with merged adapters" if found.merges_adapters else ""
        lines.append(f"sampling: {found.sampled_rows} responses at a time{how}")
    lines.append(f"peak: {found.peak / GB:.1f} GB{where}, in the phase {found.peak_phase!r}")
    host, where = found.main_memory(config.ranks), f" of {config.ranks} ranks together" if config.ranks > 1 else ""
    if host:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in host.items())
        lines.append(
            f"main memory{where}: {sum(host.values()) / GB:.1f} GB ({parts}), and what a process takes by itself"
        )
    if config.gpu_gb is None:
        return lines
    if found.peak <= config.gpu_gb * GB:
        return [*lines, f"that fits into {config.gpu_gb:g} GB"]
    changes = what_fits(config, lambda changed: planned(changed).peak, config.gpu_gb * GB)
    return [*lines, f"that does not fit into {config.gpu_gb:g} GB; {advice(changes)}"]


def table(plan: Plan) -> list[str]:
    """Lines with GB of each part in each phase, and the sums."""
    names = dict.fromkeys(name for parts in plan.phases.values() for name in parts)
    width = max(map(len, names))
    lines = [f"{'GB':<{width}}" + "".join(f"{phase:>10}" for phase in plan.phases)]
    for name in names:
        sizes = (parts.get(name, 0) / GB for parts in plan.phases.values())
        lines.append((f"{name:<{width}}" + "".join(f"{size:10.2f}" if size else " " * 10 for size in sizes)).rstrip())
    return [*lines, f"{'together':<{width}}" + "".join(f"{plan.total(phase) / GB:10.2f}" for phase in plan.phases)]


def what_fits(config: C, peak: Callable[[C], float], limit: float) -> list[tuple[str, float]]:
    """Changes of settings that each make a run fit, as flags, with the bytes needed then; the mildest first.

    If no single change is enough, changes are combined; if no combination is enough, the list is empty.

    Args:
        config: settings that do not fit.
        peak: returns the bytes needed by settings.
        limit: the available bytes.
    """

    def size_with(change: Change) -> float:
        changed = _changed(config, change)
        return math.inf if changed is None else peak(changed)

    def added_up(start: Change) -> Change | None:
        made, smallest = start, size_with(start) if start else peak(config)
        for change in ({"micro_batch_size": 1}, {"rollout_micro_batch_size": 8}, CHECKPOINTING, *DIVIDING, *OTHERS):
            size = size_with(made | change)
            if size >= smallest:
                continue
            made, smallest = made | change, size
            if size <= limit:
                for name in [name for name in reversed(made) if name not in start]:  # drop changes that are not needed
                    fewer = {other: value for other, value in made.items() if other != name}
                    made = fewer if size_with(fewer) <= limit else made
                return made
        return None

    halves = [
        [{name: size >> i} for i in range(1, size.bit_length())]
        for name, size in ((n, getattr(config, n, 1) or ROLLOUT_ROWS) for n in MICRO_BATCHES)
    ]
    single = [
        [CHECKPOINTING],
        [{"optimizer": "adamw-8bit"}],
        *([other] for other in OTHERS),
        [LORA, ATTENTION],
        [QLORA],
    ]
    found = [
        next((change for change in alternatives if size_with(change) <= limit), None)
        for alternatives in (*halves, DIVIDING, *single)
    ]
    if not any(found):
        found = [added_up(start) for start in ({}, LORA, QLORA)]
    if not any(found):
        found = [added_up(ATTENTION)]
    return [(_flags(change), size_with(change)) for change in found if change]


def _changed(config: C, change: Change) -> C | None:
    """The settings with a change; None if they have no such setting, have it already, or refuse it."""
    known = {field.name for field in fields(config)}  # type: ignore[arg-type]  # C is a dataclass, which no bound can say
    if not change.keys() <= known or all(getattr(config, name) == value for name, value in change.items()):
        return None
    try:
        return replace(config, **change)  # type: ignore[type-var]  # as above
    except ConfigError:
        return None


def _flags(change: Change) -> str:
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in change.items())


def advice(changes: list[tuple[str, float]]) -> str:
    """The changes that make a run fit, as the end of a sentence."""
    if not changes:
        return (
            "no change of settings known to heedful makes it fit: use a smaller model or shorter texts, or shard the models "
            "over more ranks (--shard full)"
        )
    return "these settings would:" + "".join(f"\n  {flags}  ({size / GB:.1f} GB)" for flags, size in changes)
