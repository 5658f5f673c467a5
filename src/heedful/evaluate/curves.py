"""Learning curves of runs as one picture: a panel a quantity, a colour a run; runs of one algorithm share its panels."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from heedful.errors import CheckpointError, ConfigError, DataError
from heedful.evaluate.output import check_result_file

Points = tuple[list[float], list[float]]
"""Steps and values of a metric."""
ALGORITHMS = {
    "loss/sft": "sft",
    "loss/reward": "reward",
    "loss/dpo": "dpo",
    "reward/tied_frac": "grpo",
    "loss/policy": "ppo",
}
"""The metric that tells a run's algorithm; the first found counts, as GRPO logs ``loss/policy`` too."""
MAX_COLUMNS = 4
WIDTH, HEIGHT, DOTS = 4.2, 3.4, 150
"""Inches of a panel, and dots an inch."""
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans SC", "Microsoft YaHei", "PingFang SC", "WenQuanYi Zen Hei")
"""For names of runs; the first that has a character draws it."""


@dataclass(frozen=True)
class Panel:
    """One quantity over the steps of an algorithm."""

    algorithm: str
    title: str
    quantity: str
    """Label of the upright axis, with the unit."""
    training: str | None = None
    """The metric while training, as a thin line."""
    held_out: str | None = None
    """The metric on held-out prompts, as a line with dots."""
    second: str | None = None
    """A metric on an axis of its own, dotted, where it varies."""
    second_quantity: str = ""
    logarithmic: bool = False
    smoothed: bool = False
    """Training values are means over neighbouring steps, because single steps are noisy."""


ONLINE = (
    Panel("ppo", "PPO: score", "mean score a response", "reward/score_mean", "eval/score_mean"),
    Panel(
        "ppo",
        "PPO: KL to the reference",
        "nats a response",
        "reference/kl",
        "eval/kl",
        second="reference/kl_coef",
        second_quantity="KL coefficient (dotted)",
    ),
    Panel("ppo", "PPO: length", "tokens a response", "rollout/response_length", "eval/response_length"),
    Panel("ppo", "PPO: responses that end", "share of responses", "rollout/eos_frac", "eval/eos_frac"),
    Panel("ppo", "PPO: entropy", "nats a token", "policy/entropy"),
)
"""Of PPO and A2C, and under its own name of GRPO."""
PANELS = (
    Panel("sft", "SFT: loss", "nats a token", "loss/sft", "eval/loss", logarithmic=True),
    Panel("reward", "Reward model: accuracy", "share of pairs", "reward/accuracy", "eval/accuracy", smoothed=True),
    Panel("dpo", "DPO: loss", "mean loss a pair", "loss/dpo", "eval/loss"),
    Panel("dpo", "DPO: accuracy", "share of pairs", "reward/accuracy", "eval/accuracy", smoothed=True),
    *ONLINE,
    Panel("ppo", "PPO: variance explained by values", "share of variance", "value/explained_variance"),
    *(replace(panel, algorithm="grpo", title=panel.title.replace("PPO", "GRPO")) for panel in ONLINE),
)


@dataclass(frozen=True)
class Run:
    """What is drawn of a run."""

    name: str
    algorithm: str
    metrics: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl, ``step`` among the names."""

    def points(self, name: str | None) -> Points:
        """Where a metric was measured and what it was; NaN where it was not finite."""
        found = [(line["step"], line[name]) for line in self.metrics if name is not None and name in line]
        return [step for step, _ in found], [value for _, value in found]


def draw_curves(runs: Sequence[str | Path], output: str | Path) -> None:
    """Draw the learning curves of run folders and write them as a picture.

    Raises ConfigError where there are no runs or the picture cannot be written, CheckpointError for a folder that is no
    run or has not done a step yet, DataError for a damaged line of metrics.jsonl.
    """
    output = Path(output)
    check_result_file(output, what="a picture")
    if not runs:
        raise ConfigError("--runs is missing: the folders of runs, such as --runs runs/sft runs/ppo")
    folders = [Path(run) for run in runs]
    found = [read_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.partial{output.suffix}")
    figure_of(found).savefig(temporary, dpi=DOTS)
    temporary.replace(output)


def read_run(folder: Path, name: str) -> Run:
    """The metrics of a run folder. Raises CheckpointError and DataError."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        inside = sorted(str(below.parent) for below in folder.glob("*/metrics.jsonl"))
        beside = str(folder.parent) if (folder.parent / "metrics.jsonl").is_file() else ""
        hint = f"; did you mean {' '.join(inside) or beside}?" if inside or beside else ""
        state = "is no run: it has no metrics.jsonl" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"--runs: {folder} {state}{hint}")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    metrics = [_metrics(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    algorithm = next((name for metric, name in ALGORITHMS.items() if any(metric in line for line in metrics)), None)
    if algorithm is None:
        raise CheckpointError(f"--runs: {path} has nothing to draw: no step is logged in it yet")
    return Run(name, algorithm, metrics)


def short_names(folders: Sequence[Path]) -> list[str]:
    """The paths of folders without what they have in common at the start; the last part always stays."""
    parts = [folder.resolve().parts for folder in folders]
    shared = 0
    while all(len(own) > shared + 1 and own[shared] == parts[0][shared] for own in parts):
        shared += 1
    return ["/".join(own[shared:]) for own in parts]


def figure_of(runs: Sequence[Run]) -> Figure:
    """The picture: a grid of the panels that some run has values for, and a legend below."""
    panels = [panel for panel in PANELS if any(_has_values(run, panel) for run in runs)]
    rows = math.ceil(len(panels) / MAX_COLUMNS)
    columns = math.ceil(len(panels) / rows)
    keys = [Line2D([], [], color=_colour(i), linewidth=2.5, label=_drawable(run.name)) for i, run in enumerate(runs)]
    keys += [
        Line2D([], [], color="0.35", linewidth=1, alpha=0.7, label="training"),
        Line2D([], [], color="0.35", linewidth=2, marker="o", markersize=4, label="held out"),
    ]
    width = WIDTH * columns
    keys_a_line = max(1, int(width / (0.8 + 0.1 * max(len(str(key.get_label())) for key in keys))))
    height = HEIGHT * rows + 0.25 * math.ceil(len(keys) / keys_a_line)
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for index, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(rows, columns, index + 1), panel, runs)
    _add_legend(figure, keys, keys_a_line)
    return figure


def _add_legend(figure: Figure, keys: Sequence[Line2D], keys_a_line: int) -> None:
    legend = figure.legend(
        handles=keys,
        loc="outside lower center",
        ncols=min(len(keys), keys_a_line),
        frameon=False,
        prop={"family": _installed_fonts()},
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    own = [(_colour(index), run) for index, run in enumerate(runs) if run.algorithm == panel.algorithm]
    window = max(len(run.points(panel.training)[1]) // 20 for _, run in own) if panel.smoothed else 1
    _label_axes(axes, panel, window)
    second = _second_axes(axes, panel, [run for _, run in own])
    for colour, run in own:
        steps, values = run.points(panel.training)
        dot = "o" if len(values) == 1 else ""
        axes.plot(steps, smoothed(values, window), color=colour, linewidth=1, alpha=0.7, marker=dot, markersize=2)
        axes.plot(*run.points(panel.held_out), color=colour, linewidth=2, marker="o", markersize=4)
        if second is not None:
            second.plot(*run.points(panel.second), color=colour, linewidth=1.5, linestyle=":")


def _label_axes(axes: Axes, panel: Panel, window: int) -> None:
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel("step" + (f" (training: mean of {window} steps)" if window > 1 else ""))
    axes.set_ylabel(panel.quantity)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _second_axes(axes: Axes, panel: Panel, runs: Sequence[Run]) -> Axes | None:
    """An axis on the right, for a metric that varies in some run."""
    if not any(len(set(run.points(panel.second)[1])) > 1 for run in runs):
        return None
    second = axes.twinx()
    second.set_ylabel(panel.second_quantity)
    second.spines["top"].set_visible(False)
    return second


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Each value's mean with the ``window - 1`` before it, as far as there are any; as they are for a window below 2."""
    parts = [values[max(0, end - max(window, 1)) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _has_values(run: Run, panel: Panel) -> bool:
    return run.algorithm == panel.algorithm and any(run.points(name)[1] for name in (panel.training, panel.held_out))


def _metrics(line: str, place: str) -> dict[str, float]:
    """One line of metrics.jsonl: numbers by their names; null, which stands for what is not finite, is NaN."""
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is damaged: not JSON ({error}); delete the line to draw the others") from error
    if not isinstance(record, dict) or not all(_is_number(value) for value in record.values()):
        raise DataError(f"{place} is damaged: expected an object of numbers, got {line:.80}")
    if not isinstance(record.get("step"), int):
        raise DataError(f"{place} is damaged: it says no step, got {line:.80}")
    return {name: math.nan if value is None else float(value) for name, value in record.items()}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _colour(index: int) -> str:
    return f"C{index % 10}"


def _installed_fonts() -> list[str]:
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in FONTS if name in installed]


def _drawable(name: str) -> str:
    """A name with escapes for the characters that no font here has."""
    fonts = [font_manager.get_font(font_manager.findfont(family)) for family in _installed_fonts()]
    known = [any(font.get_char_index(ord(letter)) for font in fonts) for letter in name]
    return "".join(c if has else c.encode("unicode_escape").decode() for c, has in zip(name, known, strict=True))
