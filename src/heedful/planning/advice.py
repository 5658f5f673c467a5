"""Which change of a run's settings makes it fit, and the plan as text."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from heedful.configs.checks import flag
from heedful.errors import ConfigError
from heedful.planning.memory import GB, Plan

C = TypeVar("C")
Change = dict[str, Any]

LORA: Change = {"lora_rank": 16}
ATTENTION: Change = LORA | {"lora_targets": "q_proj,k_proj,v_proj,o_proj"}
"""Adapters that leave a mixture's experts out. A plan of another model has no less for it, so it is never offered there."""
QLORA: Change = LORA | {"quantize": "4bit"}


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
    """Changes of settings that each make a run fit, as flags, with the bytes that it then needs; the mildest first.

    If no single change is enough, the changes are added up until they are; if even that is not, the list is empty.

    Args:
        config: settings that do not fit.
        peak: the bytes that settings need.
        limit: the bytes that there are.
    """
    single = []
    for alternatives in _alternatives(config):
        for change in alternatives:
            changed = _changed(config, change)
            if changed is not None and peak(changed) <= limit:
                single.append((_flags(change), peak(changed)))
                break
    if single:
        return single
    added = [found for start in ({}, LORA, QLORA) for found in _together(config, start, peak, limit)]
    return added or list(_together(config, ATTENTION, peak, limit))


def _together(config: C, start: Change, peak: Callable[[C], float], limit: float) -> Iterator[tuple[str, float]]:
    """Changes on top of a first one, until it fits."""
    changed, made = _changed(config, start), dict(start)
    for change in ({}, *_smallest()):
        better = None if changed is None else _changed(changed, change)
        if better is None or changed is None or (change and peak(better) >= peak(changed)):
            continue
        changed, made = better, made | change
        if peak(changed) <= limit and made:
            for name in [
                name for name in reversed(made) if name not in start
            ]:  # leave out what turned out not to be needed
                fewer = {other: value for other, value in made.items() if other != name}
                without = _changed(config, fewer) if fewer else None
                if without is not None and peak(without) <= limit:
                    changed, made = without, fewer
            yield _flags(made), peak(changed)
            return


def _alternatives(config: Any) -> list[list[Change]]:
    """Single changes, the mildest first; of those in one list the first that is enough will do."""
    sizes = [
        [{name: size} for size in _halves(getattr(config, name, 1))]
        for name in ("rollout_micro_batch_size", "micro_batch_size")
    ]
    single = ([change] for change in ({"gradient_checkpointing": True}, *OTHERS))
    return [*sizes, DIVIDING, *single, [LORA, ATTENTION], [QLORA]]


def _smallest() -> list[Change]:
    """The changes in the order in which they are added up."""
    sizes: list[Change] = [{"micro_batch_size": 1}, {"rollout_micro_batch_size": 8}]
    return [*sizes, {"gradient_checkpointing": True}, *DIVIDING, *OTHERS[1:]]


DIVIDING: list[Change] = [
    {"sync_every": "micro-batch"},
    {"replicas": 1},
    {"shard": "full"},
    {"shard": "full", "sync_every": "micro-batch"},
]
"""Of a run on several ranks; in one process they change nothing."""
OTHERS: list[Change] = [
    {"optimizer": "adamw-8bit"},
    {"reference_device": "cpu"},
    {"weights_dtype": "bfloat16"},
    {"optimizer_device": "cpu"},
    {"weights_dtype": "bfloat16", "optimizer_device": "cpu"},
]


def _halves(size: int) -> list[int]:
    return [size >> i for i in range(1, size.bit_length())]


def _changed(config: C, change: Change) -> C | None:
    """The settings with a change; None if they have no such setting, have it already, or refuse it."""
    known = {field.name for field in fields(config)}  # type: ignore[arg-type]  # C is a dataclass, which no bound can say
    if not change:
        return config
    if not change.keys() <= known or all(getattr(config, name) == value for name, value in change.items()):
        return None
    try:
        return replace(config, **change)  # type: ignore[type-var]  # as above
    except ConfigError:
        return None


def _flags(change: Change) -> str:
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in change.items())
