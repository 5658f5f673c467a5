"""Learning curves of runs in one picture: one panel per quantity, one colour per run; runs of one algorithm share panels."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from heedful.errors import CheckpointError, ConfigError, DataError
from heedful.evaluate.output import check_result_file
from heedful.files import read_object

COMMAND = re.compile(r"heedful ([a-z0-9]+(?:-[a-z0-9]+)*)")
ACRONYM = re.compile(r"\b(ppo|a2c|grpo|dpo)\b")
MAX_COLUMNS = 4
WIDTH, HEIGHT, DOTS = 4.2, 3.4, 150
"""Size of a panel in inches, and dots per inch."""
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans SC", "Microsoft YaHei", "PingFang SC", "WenQuanYi Zen Hei")
"""Fonts for the names of runs; each character is drawn by the first font that has it."""


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
"""The panels of algorithms that learn from data, by the name of the command, in the order in which they are usually run."""


def panels_of(algorithm: str) -> tuple[Panel, ...]:
    """Return the panels of an algorithm, in the order in which they are drawn: all online algorithms log the same metrics."""
    if algorithm in PANELS:
        return PANELS[algorithm]
    name = ACRONYM.sub(lambda word: word[0].upper(), algorithm).replace("-", " ")
    coefficient = ("reference/kl_coef", "KL coefficient (dotted)")
    return (
        Panel(f"{name}: score", "mean score per response", "reward/score_mean", "eval/score_mean"),
        Panel(f"{name}: KL to the reference", "nats per response", "reference/kl", "eval/kl", *coefficient),
        Panel(f"{name}: length", "tokens per response", "rollout/response_length", "eval/response_length"),
        Panel(f"{name}: responses that end", "share of responses", "rollout/eos_frac", "eval/eos_frac"),
        Panel(f"{name}: entropy", "nats per token", "policy/entropy"),
        Panel(f"{name}: variance explained by values", "share of variance", "value/explained_variance"),
    )


@dataclass(frozen=True)
class RunCurves:
    """The part of a run that is drawn."""

    name: str
    """Name in the legend."""
    algorithm: str
    """The name of the command that ran it."""
    metrics: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl; each has a ``step``."""

    def points(self, metric: str | None) -> tuple[list[float], list[float]]:
        """Return the steps at which a metric was logged, and its values. A value that was not finite is NaN."""
        found = [(line["step"], line[metric]) for line in self.metrics if metric is not None and metric in line]
        return [step for step, _ in found], [value for _, value in found]


def draw_curves(runs: Sequence[str | Path], output: str | Path) -> None:
    """Draw the learning curves of run folders and write them as a picture.

    Args:
        runs: folders of runs, in the order of their colours.
        output: the file to write; its ending (.png, .svg or .pdf) sets the format.

    Raises ConfigError if there are no runs or the picture cannot be written, CheckpointError if a folder is not a run,
    does not say which algorithm it ran, or has not logged a step yet, and DataError if a line of metrics.jsonl is damaged.
    """
    output = Path(output)
    check_result_file(output, what="a picture")
    if not runs:
        raise ConfigError("no run is named: heedful report RUN ..., such as heedful report runs/sft runs/ppo")
    folders = [Path(run) for run in runs]
    found = [read_run(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.partial{output.suffix}")
    figure_of(found).savefig(temporary, dpi=DOTS)
    temporary.replace(output)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' paths without the parts that all of them start with; the last part of each always stays."""
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(shared).as_posix() for path in paths]


def read_run(folder: Path, name: str) -> RunCurves:
    """Read the algorithm and the metrics of a run folder. ``name`` is the run's name in the legend.

    Raises CheckpointError and DataError, as `draw_curves` does.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        inside = sorted(str(below.parent) for below in folder.glob("*/metrics.jsonl"))
        beside = str(folder.parent) if (folder.parent / "metrics.jsonl").is_file() else ""
        hint = f"; did you mean {' '.join(inside) or beside}?" if inside or beside else ""
        state = "is not a run: it has no metrics.jsonl" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"--runs: {folder} {state}{hint}")
    algorithm = read_algorithm(folder)
    metrics = _read_metrics(path)
    if not any(panel.training in line for panel in panels_of(algorithm) for line in metrics):
        raise CheckpointError(f"--runs: {path} has nothing to draw: no step of {algorithm} is logged in it yet")
    return RunCurves(name, algorithm, metrics)


def read_algorithm(folder: Path) -> str:
    """Return the algorithm that a run folder's environment.json names. Raises CheckpointError if it names none."""
    path = folder / "environment.json"
    form = (
        "it names the algorithm that ran: copy it from the original run, or write "
        '{"command": "heedful ALGORITHM"}, such as heedful ppo'
    )
    command = read_object(path, form, needs=["command"])["command"]
    named = COMMAND.fullmatch(command)
    if not named:
        raise CheckpointError(f"{path} does not name an algorithm: got {command!r:.80}; {form}")
    return named[1]


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """Read numbers by their names. null, written for a number that is not finite, becomes NaN."""
    metrics = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # names may hold other ends of lines
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if any(type(value) not in (int, float, type(None)) for value in record.values()):
                raise TypeError("not a number")  # true, or a number as text
            metrics.append({name: math.nan if value is None else float(value) for name, value in record.items()})
            int(record["step"])
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{path}:{number} is damaged: expected an object of numbers with a step, got {line:.80}; delete the line "
                "to draw the rest"
            ) from error
    return metrics


def figure_of(runs: Sequence[RunCurves]) -> Figure:
    """Return the picture: a grid of the panels for which some run has values, and a legend below it."""
    panels = []
    for algorithm in (*PANELS, *sorted({run.algorithm for run in runs} - PANELS.keys())):
        own = [run for run in runs if run.algorithm == algorithm]
        for panel in panels_of(algorithm):
            if any(run.points(metric)[1] for run in own for metric in (panel.training, panel.held_out)):
                panels.append((panel, algorithm))
    rows = math.ceil(len(panels) / MAX_COLUMNS)
    columns = math.ceil(len(panels) / rows)
    fonts = [name for name in FONTS if name in {font.name for font in font_manager.fontManager.ttflist}]
    colours = [f"C{i % 10}" for i in range(len(runs))]
    keys = [
        Line2D([], [], color=colour, linewidth=2.5, label=_drawable(run.name, fonts))
        for run, colour in zip(runs, colours, strict=True)
    ]
    keys += [
        Line2D([], [], color="0.35", linewidth=1, alpha=0.7, label="training"),
        Line2D([], [], color="0.35", linewidth=2, marker="o", markersize=4, label="held out"),
    ]
    width = WIDTH * columns
    keys_per_line = max(1, int(width / (0.8 + 0.1 * max(len(str(key.get_label())) for key in keys))))
    height = HEIGHT * rows + 0.25 * math.ceil(len(keys) / keys_per_line)
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for index, (panel, algorithm) in enumerate(panels, 1):
        drawn = [(colour, run) for colour, run in zip(colours, runs, strict=True) if run.algorithm == algorithm]
        _draw_panel(figure.add_subplot(rows, columns, index), panel, drawn)
    legend = figure.legend(
        handles=keys,
        loc="outside lower center",
        ncols=min(len(keys), keys_per_line),
        frameon=False,
        prop={"family": fonts},
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[tuple[str, RunCurves]]) -> None:
    """Draw runs, each with its colour, that are all of the panel's algorithm."""
    window = max(1, *(len(run.points(panel.training)[1]) // 20 for _, run in runs)) if panel.smoothed else 1
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
    second = None
    if any(len(set(run.points(panel.second)[1])) > 1 for _, run in runs):
        second = axes.twinx()
        second.set_ylabel(panel.second_quantity)
        second.spines["top"].set_visible(False)
    for colour, run in runs:
        steps, values = run.points(panel.training)
        recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
        means = [sum(part) / len(part) for part in recent]
        dot = "o" if len(values) == 1 else ""
        axes.plot(steps, means, color=colour, linewidth=1, alpha=0.7, marker=dot, markersize=2)
        axes.plot(*run.points(panel.held_out), color=colour, linewidth=2, marker="o", markersize=4)
        if second is not None:
            second.plot(*run.points(panel.second), color=colour, linewidth=1.5, linestyle=":")


def _drawable(name: str, families: Sequence[str]) -> str:
    """Return a name with escapes in place of the characters that no installed font has."""
    fonts = [font_manager.get_font(font_manager.findfont(family)) for family in families]
    return "".join(
        letter if any(font.get_char_index(ord(letter)) for font in fonts) else letter.encode("unicode_escape").decode()
        for letter in name
    )
