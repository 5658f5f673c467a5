"""What ``heedful plan`` prints."""

from typing import Literal

from heedful.configs.online import RolloutConfig
from heedful.configs.plan import OnlinePlanOptions, PlanConfig
from heedful.planning.advice import table, what_fits
from heedful.planning.memory import GB, Plan
from heedful.planning.work import Lengths, ShapeOf, Trainer, plan_of


def plan_report(config: PlanConfig, shape_of: ShapeOf) -> list[str]:
    """Lines that say what a run needs, whether it fits, and if not, what would.

    The run is planned for a CUDA device and bfloat16, unless ``device`` is cpu or ``dtype`` says otherwise.
    """
    lengths = planned_lengths(config)
    device: Literal["cpu", "cuda"] = "cpu" if config.device == "cpu" else "cuda"
    half = config.dtype in ("bfloat16", "float16") or (config.dtype == "auto" and device == "cuda")

    def planned(changed: Trainer) -> Plan:
        return plan_of(changed, shape_of, lengths, ranks=config.ranks, device=device, half=half)

    found = planned(config)
    where = f" on each of {config.ranks} ranks" if config.ranks > 1 else ""
    lines = [*table(found), "", f"most: {found.peak / GB:.1f} GB{where}, in the phase {found.peak_phase!r}"]
    if config.gpu_gb is None:
        return lines
    if found.peak <= config.gpu_gb * GB:
        return [*lines, f"that fits into {config.gpu_gb:g} GB"]
    changes = what_fits(config, lambda changed: planned(changed).peak, config.gpu_gb * GB)
    return [*lines, f"that does not fit into {config.gpu_gb:g} GB; {advice(changes)}"]


def planned_lengths(config: PlanConfig) -> Lengths:
    """The lengths that a plan is asked for."""
    if isinstance(config, RolloutConfig):
        assert isinstance(config, OnlinePlanOptions)
        return Lengths(config.prompt_tokens + config.max_new_tokens, config.prompt_tokens)
    assert config.max_length is not None
    return Lengths(config.max_length)


def advice(changes: list[tuple[str, float]]) -> str:
    """What makes a run fit, as the end of a sentence."""
    if not changes:
        return (
            "no change of settings that heedful knows makes it fit: take a smaller model or shorter texts, or divide the "
            "models among more ranks (--shard full)"
        )
    return "what would:" + "".join(f"\n  {flags}  ({size / GB:.1f} GB)" for flags, size in changes)
