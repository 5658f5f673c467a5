"""Tables and pictures of the lines that the experiments wrote.

python benchmarks/critic/tables.py runs/critic [--small]

Prints Markdown, and writes OUTPUT/a1.png, a2.png and b.png. A cell is the median over seeds, with the smallest and the
largest; differences are paired by seed, with a bootstrap interval of their mean (10,000 resamples).
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
from results import Results
from settings import ALPHAS

from gradients import PARTS

Line = dict[str, Any]
BySeed = dict[int, float]
WINDOW = 10
"""Steps over which the curves of success are averaged."""


def cell(numbers: Iterable[float]) -> str:
    """The median, and the smallest and largest."""
    found = list(numbers)
    return f"{median(found):.3f} ({min(found):.3f} to {max(found):.3f})" if found else ""


def difference(one: BySeed, other: BySeed) -> str:
    """Median of the paired differences, how many seeds are above 0, and the bootstrap interval of the mean."""
    numbers = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if not numbers:
        return ""
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(numbers, k=len(numbers))) for _ in range(10_000))
    above = sum(number > 0 for number in numbers)
    return f"{median(numbers):+.3f}, {above} of {len(numbers)} above, mean {means[250]:+.3f} to {means[9749]:+.3f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def mean_of_median(lines: Sequence[Line], estimator: str) -> float:
    """Over lengths, the median cosine of an estimator."""
    lengths = sorted({line["length"] for line in lines})
    return fmean(
        median(line["estimators"][estimator]["cosine"] for line in lines if line["length"] == n) for n in lengths
    )


# A1 --------------------------------------------------------------------------------------------------------------------


def a1(lines: Sequence[Line]) -> None:
    lengths = sorted({line["length"] for line in lines})
    at = {n: [line for line in lines if line["length"] == n] for n in lengths}
    print("### A1: cosine with the true gradient\n")
    for n in lengths:
        about = at[n][0]["reference"]
        print(
            f"{n} digits: {len(at[n])} seeds; reference of {about['responses']:,} responses, of which {about['right']:.3f} "
            f"right; cosine of its halves {about['cosine of halves']:.3f}, reliability {about['reliability']:.3f}."
        )
    print()
    for title in ("cosine", "cosine without whitening", "cosine of the mean"):
        rows = [
            [name, *[cell(line["estimators"][name][title] for line in at[n]) for n in lengths]]
            for name in lines[0]["estimators"]
        ]
        table([title, *map(str, lengths)], rows)
    alphas = {alpha: mean_of_median(lines, f"alpha {alpha:g}, pretrained") for alpha in ALPHAS}
    print(f"Mean over lengths of the median cosine with the pretrained critic, by alpha: {alphas}\n")
    known = lines[0]["critics"]
    for title, read in CRITIC_NUMBERS.items():
        rows = [[name, *[cell(read(line["critics"][name]) for line in at[n]) for n in lengths]] for name in known]
        table([title, *map(str, lengths)], rows)
    print("### A1: minutes of one thread\n")
    for n in lengths:
        parts = {part: median(line["seconds"][part] for line in at[n]) / 60 for part in at[n][0]["seconds"]}
        print(f"{n} digits: {parts}, reference {at[n][0]['reference']['seconds'] / 60:.1f}; {at[n][0]['processor']}")


CRITIC_NUMBERS: dict[str, Callable[[Line], float]] = {
    "explained variance": lambda critic: critic["explained variance"],
    "explained variance at the first token": lambda critic: critic["first"]["explained variance"],
    "explained variance in the first half": lambda critic: fmean(
        part["explained variance"] for part in critic["by position"][: PARTS // 2]
    ),
    "bias: mean return minus value": lambda critic: critic["bias"],
    "bias in the first half": lambda critic: fmean(part["bias"] for part in critic["by position"][: PARTS // 2]),
}


def a1_picture(lines: Sequence[Line], file: Path) -> None:
    """Explained variance and bias by position, a line for each seed."""
    lengths = sorted({line["length"] for line in lines})
    figure, panels = plt.subplots(2, len(lengths), figsize=(4 * len(lengths), 6), squeeze=False, sharey="row")
    colours = dict(zip(lines[0]["critics"], plt.colormaps["tab10"].colors, strict=False))
    for column, n in enumerate(lengths):
        for row, what in enumerate(("explained variance", "bias")):
            axes = panels[row][column]
            for line in (line for line in lines if line["length"] == n):
                for name, critic in line["critics"].items():
                    numbers = [part[what] for part in critic["by position"]]
                    places = [(part + 0.5) / PARTS for part in range(PARTS)]
                    axes.plot(places, numbers, color=colours[name], alpha=0.6, label=name)
            axes.set(title=f"{n} digits", xlabel="place in the answer", ylabel=what if column == 0 else "")
            axes.axhline(0, color="grey", linewidth=0.5)
        panels[0][column].set_ylim(-0.5, 1)
    names(panels[0][0])
    save(figure, file)


# A2, B, lag ------------------------------------------------------------------------------------------------------------


def by_arm(lines: Iterable[Line], read: Callable[[Line], float]) -> dict[str, BySeed]:
    found: dict[str, BySeed] = defaultdict(dict)
    for line in lines:
        found[line["arm"]][line["seed"]] = read(line)
    return found


def learning(title: str, lines: Sequence[Line]) -> None:
    """Held-out success at the end by length, and the difference between each arm and the one before."""
    lengths = sorted(lines[0]["held out"], key=int)
    print(f"### {title}: held-out success at the end\n")
    found = {n: by_arm(lines, lambda line, n=n: line["held out"][n]) for n in lengths}
    arms = list(found[lengths[0]])
    minutes = by_arm(lines, lambda line: line["seconds"] / 60)
    tokens = by_arm(lines, lambda line: line["tokens"][-1] / 1e3)
    rows = [
        [
            arm,
            *[cell(found[n][arm].values()) for n in lengths],
            f"{median(tokens[arm].values()):.0f}",
            f"{median(minutes[arm].values()):.1f}",
        ]
        for arm in arms
    ]
    table(["arm", *lengths, "1,000 tokens", "minutes"], rows)
    print("Mean success in training over all steps, those of pretraining included\n")
    whole = {n: by_arm(lines, lambda line, n=n: mean_of(line["right"][n])) for n in lengths}
    table(["arm", *lengths], [[arm, *[cell(whole[n][arm].values()) for n in lengths]] for arm in arms])
    pairs = [*pairwise(arms), (arms[0], arms[-1]), *((arms[-2], arms[0]) for _ in range(len(arms) > 2))]
    rows = [
        [f"{b} minus {a}", *[difference(found[n][b], found[n][a]) for n in lengths]] for a, b in dict.fromkeys(pairs)
    ]
    table(["difference", *lengths], rows)


def mean_of(shares: Sequence[float | None]) -> float:
    """None is a step without a prompt of this length."""
    return fmean(share for share in shares if share is not None)


def equal_seconds(title: str, lines: Sequence[Line]) -> None:
    """Success in training at the seconds at which the fastest arm ends, over the last `WINDOW` steps before."""
    print(f"### {title}: success in training at equal seconds\n")
    until = min(median(seconds.values()) for seconds in [*by_arm(lines, lambda line: line["seconds"]).values()])

    def at(line: Line) -> float:
        steps = sum(second <= until for second in line["seconds after"])
        return fmean(next(iter(line["right"].values()))[max(0, steps - WINDOW) : max(1, steps)])

    found = by_arm(lines, at)
    table(["arm", f"at {until:.0f} s"], [[arm, cell(seeds.values())] for arm, seeds in found.items()])


def smooth(numbers: Sequence[float | None]) -> list[float]:
    """Means over up to `WINDOW` steps; None is a step without a prompt of this length."""
    found = []
    for end in range(1, len(numbers) + 1):
        known = [number for number in numbers[max(0, end - WINDOW) : end] if number is not None]
        found.append(fmean(known) if known else float("nan"))
    return found


def curves(groups: Mapping[str, Sequence[Line]], x: str, file: Path) -> None:
    """Success in training over tokens or seconds: a panel for each group and length, a line for each seed."""
    scale = 1000 if x == "tokens" else 1
    panels_of = [(name, n, lines) for name, lines in groups.items() for n in lines[0]["right"]]
    figure, panels = plt.subplots(1, len(panels_of), figsize=(4.5 * len(panels_of), 4), squeeze=False, sharey=True)
    for axes, (name, n, lines) in zip(panels[0], panels_of, strict=True):
        colours = dict(zip(dict.fromkeys(line["arm"] for line in lines), plt.colormaps["tab10"].colors, strict=False))
        for line in lines:
            axes.plot(
                [at / scale for at in line[x]],
                smooth(line["right"][n]),
                color=colours[line["arm"]],
                alpha=0.7,
                label=line["arm"],
            )
        axes.set(
            title=f"{name}, {n} digits", xlabel="1,000 sampled tokens" if x == "tokens" else "seconds", ylim=(0, 1)
        )
    panels[0][0].set_ylabel(f"right, mean of {WINDOW} steps")
    names(panels[0][0])
    save(figure, file)


def names(axes: Any) -> None:
    """One entry of the legend for each name."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8)


def save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--small", action="store_true", help="the runs of --small")
    options = parser.parse_args()
    of_a1 = [line for line in Results(options.output / "a1.jsonl") if line["small"] == options.small]
    if of_a1:
        a1(of_a1)
        a1_picture(of_a1, options.output / "a1.png")
    rest = [line for line in Results(options.output / "learning.jsonl") if line["small"] == options.small]
    for name in ("tune", "A2", "B", "lag"):
        lines = [line for line in rest if line["experiment"] == name]
        groups = {
            f"{name}, {n:,} prompts": [x for x in lines if x["prompts"] == n] for n in {x["prompts"] for x in lines}
        }
        for title, some in groups.items():
            learning(title, some)
            if name == "B":
                equal_seconds(title, some)
        if groups:
            curves(groups, "tokens", options.output / f"{name.lower()}.png")
        if name == "B" and groups:
            curves(groups, "seconds after", options.output / "b-seconds.png")
    for line in rest:
        if line["experiment"] == "tune critic":
            print(f"critic {line['rate']:g}: explained variance {line['last ten']:.3f}, {line['seconds']:.0f} s")


if __name__ == "__main__":
    main()
