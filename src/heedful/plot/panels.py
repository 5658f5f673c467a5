"""The metrics to draw for a run, by its algorithm; matplotlib-free."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

ACRONYM = re.compile(r"\b(ppo|a2c|grpo|dpo)\b")


@dataclass(frozen=True)
class Panel:
    """One quantity over the steps of a run."""

    title: str
    quantity: str
    """Label of the vertical axis, with the unit."""
    training: str
    """Metric measured during training, drawn as a thin line."""
    held_out: str | None = None
    """Metric measured on held-out prompts, drawn as a line with dots."""
    second: str | None = None
    """Metric drawn as a dotted line on an axis of its own, if it varies."""
    second_quantity: str = ""
    logarithmic: bool = False
    smoothed: bool = False
    """Draw training values as means over neighbouring steps, because single steps are noisy."""


PANELS: Mapping[str, tuple[Panel, ...]] = {
    "sft": (Panel("SFT: loss", "nats per token", "loss/sft", "eval/loss", logarithmic=True),),
    "reward": (Panel("Reward model: accuracy", "share of pairs", "reward/accuracy", "eval/accuracy", smoothed=True),),
    "dpo": (
        Panel("DPO: loss", "mean loss per pair", "loss/dpo", "eval/loss"),
        Panel("DPO: accuracy", "share of pairs", "reward/accuracy", "eval/accuracy", smoothed=True),
    ),
    "kto": (
        Panel("KTO: loss", "mean loss per response", "loss/kto", "eval/loss"),
        Panel("KTO: accuracy", "share of responses", "reward/accuracy", "eval/accuracy", smoothed=True),
    ),
}
"""The panels of offline algorithms, by the name of the command, in their usual order."""
ONLINE = ""
"""The algorithm of a table of an online algorithm's metrics, which does not name the algorithm."""


def panels_of(algorithm: str) -> tuple[Panel, ...]:
    """Return the panels of an algorithm, in drawing order. All online algorithms log the same metrics."""
    if algorithm in PANELS:
        return PANELS[algorithm]
    name = ACRONYM.sub(lambda word: word[0].upper(), algorithm).replace("-", " ")
    of = f"{name}: " if name else ""
    coefficient = ("reference/kl_coef", "KL coefficient (dotted)")
    return (
        Panel(f"{of}score", "mean score per response", "reward/score_mean", "eval/score_mean"),
        Panel(f"{of}KL to the reference", "nats per response", "reference/kl", "eval/kl", *coefficient),
        Panel(f"{of}length", "tokens per response", "rollout/response_length", "eval/response_length"),
        Panel(f"{of}responses that end", "share of responses", "rollout/eos_frac", "eval/eos_frac"),
        Panel(f"{of}entropy", "nats per token", "policy/entropy"),
        Panel(f"{of}variance explained by values", "share of variance", "value/explained_variance"),
        Panel(f"{of}KL of the update", "nats per token", "policy/approx_kl"),
        Panel(f"{of}clipped", "share of tokens", "policy/clip_frac"),
    )


def panels_of_table(metrics: Collection[str]) -> tuple[Panel, ...]:
    """Return the panels of a table that does not name its algorithm: chosen by its loss, else one per metric."""
    names = [name for name in PANELS if f"loss/{name}" in metrics]
    panels = PANELS[names[0]] if names and "rollout/response_length" not in metrics else panels_of(ONLINE)
    if any(panel.training in metrics for panel in panels):
        return panels
    return panels_of_metrics(sorted(metrics))


def panels_of_metrics(metrics: Sequence[str]) -> tuple[Panel, ...]:
    """Return one panel per metric, in their order."""
    return tuple(Panel(metric, "", metric) for metric in metrics)
