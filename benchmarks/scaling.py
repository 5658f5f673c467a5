"""How time and memory of PPO grow: with the rollout batch, the response, the vocabulary and the model, one at a time.

python benchmarks/scaling.py --output runs/scaling [--only vocabulary] [--smoke]
python benchmarks/scaling.py --output runs/scaling --memory

The first prints a table an axis and draws scaling.png; about 10 minutes on two cores. Every point is a process of its own
(benchmarks/scaling_point.py) with random weights of Qwen3's shape, around a batch of 64, a response of 64, a vocabulary of
8192 and 7 million parameters. Prompts have 32 tokens. By default there is one PPO epoch, and the policy carries the critic.

The second compares the peak memory of responses of 128 and 32 tokens: batch 32, vocabulary 151,936, 19 million parameters
beside the embedding. It does so twice: with micro-batches of as many rows, and of as many tokens as those of the shorter.

The numbers are also in scaling.json, or in memory-rows.json and memory-tokens.json. Nothing else should run at the same time.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

PHASES = ("rollout", "score", "update")
Sizes = tuple[int, int]
"""Layers and hidden size."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement."""

    batch: int = 64
    response: int = 64
    vocabulary: int = 8192
    model: Sizes = (6, 256)

    @property
    def name(self) -> str:
        """The size of its model, as scaling_point.py reads it."""
        return ",".join(map(str, (self.vocabulary, *self.model)))

    @property
    def body(self) -> int:
        """Weights in the layers: 3 H^2 of attention with half as many keys as queries, and 9 H^2 behind it."""
        layers, hidden = self.model
        return 12 * layers * hidden**2

    @property
    def parameters(self) -> int:
        """With the embedding, which is the head as well."""
        return self.body + self.vocabulary * self.model[1]


AXES: dict[str, tuple[Any, ...]] = {
    "batch": (16, 32, 64, 128, 256),
    "response": (32, 64, 128, 256, 512),
    "vocabulary": (512, 2048, 8192, 32_768, 151_936),
    "model": ((2, 96), (3, 192), (6, 256), (10, 384), (11, 640)),
}
"""1, 3, 7, 21 and 59 million parameters."""
SMOKE = Point(batch=2, response=4, vocabulary=300, model=(1, 32))
SMOKE_AXES: dict[str, tuple[Any, ...]] = {
    "batch": (2, 4),
    "response": (4, 8),
    "vocabulary": (300, 600),
    "model": ((1, 32), (1, 64)),
}
LABELS = {
    "batch": "responses an iteration",
    "response": "tokens of a response",
    "vocabulary": "vocabulary",
    "model": "parameters, millions",
}
MEMORY = Point(batch=32, vocabulary=151_936, model=(11, 384))
RESPONSES = (32, 128)
MICRO_BATCHES = {"rows": [], "tokens": ["--micro-batch-tokens", str(16 * (32 + RESPONSES[0]))]}
"""Flags of scaling_point.py: its 16 rows, and beside them the tokens that these have with the shorter response."""
SETTINGS = ("critic", "micro-batch-size", "ppo-epochs", "warmup", "iterations", "device", "dtype")
"""Flags of scaling_point.py that are the same for all points."""
AIM = 1.15
"""What the longer response may cost over the shorter one."""


def measure(points: Sequence[Point], folder: Path, settings: Sequence[str]) -> dict[Point, dict[str, float]]:
    """Each point in a process of its own, models made before in another one."""
    script, found = str(Path(__file__).with_name("scaling_point.py")), {}
    sizes = sorted({point.name for point in points})
    child([script, str(folder), "--make", *sizes])
    for point in points:
        model = folder / point.name.replace(",", "-")
        words = ["--batch", str(point.batch), "--response", str(point.response), *settings]
        found[point] = json.loads(child([script, str(model), *words]).splitlines()[-1])
        print(json.dumps({**asdict(point), **found[point]}), flush=True)
    return found


def child(words: Sequence[str]) -> str:
    """Standard output of a script in a process of its own; what it says goes on where it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)
    return done.stdout


def table(axis: str, points: Sequence[Point], found: dict[Point, dict[str, float]]) -> str:
    """Markdown: what varies, seconds, and memory."""
    names = [*PHASES, "iteration", "tokens a second", "peak GB", "above imports GB"]
    lines = [f"| {LABELS[axis]} | {' | '.join(names)} |", "|---:" * (1 + len(names)) + "|"]
    for point in points:
        seconds = [found[point][phase] for phase in PHASES]
        peak, imports = found[point]["peak_gb"], found[point]["imports_gb"]
        cells = [tick(point, axis), *(f"{one:.3g} s" for one in (*seconds, sum(seconds)))]
        cells += [f"{point.batch * point.response / sum(seconds):.0f}", f"{peak:.2f}", f"{peak - imports:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def value_of(point: Point, axis: str) -> float:
    """Where a point lies on an axis."""
    return point.parameters / 1e6 if axis == "model" else getattr(point, axis)


def tick(point: Point, axis: str) -> str:
    """The same in writing."""
    return f"{value_of(point, axis):.2g}" if axis == "model" else f"{value_of(point, axis):,}"


def draw(axes_of: dict[str, list[Point]], found: dict[Point, dict[str, float]], path: Path) -> None:
    """A panel an axis: seconds of each phase, and dashed the memory above the imports."""
    columns = min(2, len(axes_of))
    rows = -(-len(axes_of) // columns)
    figure = Figure(figsize=(5.6 * columns, 4.2 * rows + 0.4), layout="constrained")
    for i, (axis, points) in enumerate(axes_of.items()):
        panel = figure.add_subplot(rows, columns, i + 1)
        memory = draw_panel(panel, axis, points, found)
    keys = [*panel.get_legend_handles_labels()[0], *memory.get_legend_handles_labels()[0]]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    figure.savefig(path, dpi=150)


def draw_panel(panel: Axes, axis: str, points: Sequence[Point], found: dict[Point, dict[str, float]]) -> Axes:
    """Seconds on the left, logarithmic as what varies is; gigabytes on the right, which is returned."""
    values = [value_of(point, axis) for point in points]
    for phase in PHASES:
        panel.plot(values, [found[point][phase] for point in points], marker="o", markersize=4, label=f"{phase}, s")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_xticks(values, [tick(point, axis) for point in points])
    panel.minorticks_off()
    panel.set_xlabel(LABELS[axis])
    panel.set_ylabel("seconds an iteration")
    panel.grid(alpha=0.25, linewidth=0.6)
    memory = panel.twinx()
    above = [found[point]["peak_gb"] - found[point]["imports_gb"] for point in points]
    memory.plot(values, above, color="0.35", linestyle="--", marker="s", markersize=3, label="memory, GB")
    memory.set_ylabel("peak memory above the imports, GB")
    memory.set_ylim(0, 1.15 * max(above))
    return memory


def run_axes(options: argparse.Namespace, settings: Sequence[str]) -> None:
    """Every axis, or one: tables, picture and JSON."""
    base, chosen = (SMOKE, SMOKE_AXES) if options.smoke else (Point(), AXES)
    names = [options.only] if options.only else list(chosen)
    axes_of = {axis: [replace(base, **{axis: value}) for value in chosen[axis]] for axis in names}
    different = list(dict.fromkeys(point for points in axes_of.values() for point in points))
    found = measure(different, options.output / "models", settings)
    write(options.output / "scaling.json", found, settings)
    for axis, points in axes_of.items():
        print("\n" + table(axis, points, found))
    draw(axes_of, found, options.output / "scaling.png")


def run_memory(options: argparse.Namespace, settings: Sequence[str]) -> None:
    """The memory of a long response over that of a short one."""
    base = SMOKE if options.smoke else MEMORY
    points = [replace(base, response=response) for response in RESPONSES]
    body = f"{base.body / 1e6:.1f} million parameters beside the embedding"
    print(f"batch {base.batch}, vocabulary {base.vocabulary:,}, {body}")
    for name, more in MICRO_BATCHES.items():
        found = measure(points, options.output / "models", [*settings, *more])
        write(options.output / f"memory-{name}.json", found, [*settings, *more])
        print(f"\nmicro-batches of as many {name}\n\n" + table("response", points, found))
        short, long = (found[point] for point in points)
        total = long["peak_gb"] / short["peak_gb"]
        above = (long["peak_gb"] - long["imports_gb"]) / (short["peak_gb"] - short["imports_gb"])
        print(f"\npeak memory {total:.3f} times, above the imports {above:.3f} times (aim: at most {AIM})\n")


def write(path: Path, found: dict[Point, dict[str, float]], settings: Sequence[str]) -> None:
    """All numbers, and the flags they were made with."""
    rows = [{**asdict(point), "parameters": point.parameters, **one} for point, one in found.items()]
    path.write_text(json.dumps({"flags": list(settings), "points": rows}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for models, about 1.5 GB, and results")
    parser.add_argument("--only", choices=list(AXES), help="this axis alone")
    parser.add_argument("--memory", action="store_true", help="the memory of a long response over that of a short one")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs")
    for name in SETTINGS:
        parser.add_argument(f"--{name}", help="as of scaling_point.py")
    options = parser.parse_args()
    given = [(name, getattr(options, name.replace("-", "_"))) for name in SETTINGS]
    settings = [word for name, value in given if value is not None for word in (f"--{name}", value)]
    options.output.mkdir(parents=True, exist_ok=True)
    (run_memory if options.memory else run_axes)(options, settings)


if __name__ == "__main__":
    main()
