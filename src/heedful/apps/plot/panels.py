"""The metrics to draw for a run, by its algorithm; matplotlib-free."""

from collections.abc import Collection, Sequence

from heedful.configs.trainers import TRAINERS, Panel, rollout_panels

OFFLINE = {name: trainer.panels for name, trainer in TRAINERS.items() if not trainer.is_online}
"""The panels of trainers on given texts, by the name of the command, in their usual order."""


def panels_of(algorithm: str) -> tuple[Panel, ...]:
    """Return the panels of an algorithm, in drawing order; one that is not heedful's is taken for an online one."""
    return TRAINERS[algorithm].panels if algorithm in TRAINERS else rollout_panels(algorithm)


def panels_of_table(metrics: Collection[str]) -> tuple[Panel, ...]:
    """Return the panels of a table that does not name its algorithm: chosen by its loss, else one per metric."""
    names = [name for name in OFFLINE if f"loss/{name}" in metrics]
    panels = OFFLINE[names[0]] if names and "rollout/response_length" not in metrics else rollout_panels()
    if any(panel.training in metrics for panel in panels):
        return panels
    return panels_of_metrics(sorted(metrics))


def panels_of_metrics(metrics: Sequence[str]) -> tuple[Panel, ...]:
    """Return one panel per metric, in their order."""
    return tuple(Panel(metric, "", metric) for metric in metrics)
