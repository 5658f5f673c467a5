"""The parts of the page that need no JavaScript: what left its band, alarms, curves, yardstick, samples, lineage."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from heedful.apps.plot.charts import Chart, Line, charts_of
from heedful.apps.report.rollouts import read_texts, rollout_files
from heedful.apps.report.runs import (
    RunRecord,
    changed_settings,
    departures,
    differing_settings,
    parents_of,
    seconds_until,
)
from heedful.apps.report.svg import COLOURS, draw, format_number, is_drawable, text
from heedful.configs.trainers import Panel
from heedful.core.best_of_n import expected_best, kl_bound
from heedful.display import counted
from heedful.files import to_json
from heedful.training.alarms import ALARMS

MORE = (
    Panel("repetition", "share of repeated n-grams", "rollout/repeated_frac"),
    Panel("largest ratio", "new / old probability", "policy/ratio_max"),
    Panel("effective share of the batch", "share", "policy/effective_frac"),
    Panel("loss of correct responses", "nats per token", "loss/positive"),
    Panel("responses with lambda 0", "share of responses", "value/lambda_zero_frac"),
    Panel("mean lambda", "lambda", "value/lambda_mean"),
    Panel("independent judge", "mean score per response", "eval/judge_mean", "eval/judge_mean"),
)
"""Panels of runs that learn from their own responses, besides those of `heedful.plot`."""
MOST_PROMPTS, MOST_STEPS = 6, 6
"""Of the samples over time."""
LONGEST_SAMPLE = 600
"""Characters of a sample that are shown."""
FEWEST_OF_N = 4
"""Responses to a prompt from which on a run's own first step is a yardstick."""
BestOfN = Sequence[tuple[int, float, float]]
"""n, the bound on its KL, the expected score of the best of n."""


class MeasuredBestOfN(NamedTuple):
    """What ``heedful evaluate best-of-n`` found."""

    best_of: BestOfN
    temperature: float | None
    """At which it sampled; None if the file does not say."""


def overview(runs: Sequence[RunRecord]) -> str:
    """The runs, with their state and what they are called."""
    rows = [
        [
            f'<span class="key c{place % COLOURS}"></span>{text(run.name)}',
            text(run.algorithm),
            text(run.state),
            f"{run.last_step}",
            text(run.folder),
        ]
        for place, run in enumerate(runs)
    ]
    notes = [f"<li>{text(run.name)}: {text(note)}</li>" for run in runs for note in run.notes]
    listed = f"<ul>{''.join(notes)}</ul>" if notes else ""
    return section("Runs", table(["run", "algorithm", "state", "last step", "folder"], rows) + listed)


def alarms(runs: Sequence[RunRecord]) -> str:
    """What left its healthy band, and the alarms of the runs with their times."""
    left = [
        [
            text(run.name),
            text(one.metric),
            text(one.band),
            f"step {one.first}",
            f"{one.count} of {one.steps}",
            f"{format_number(one.worst)} (step {one.worst_step})",
            text(one.band.source),
        ]
        for run in runs
        for one in departures(run)
    ]
    heads = ["run", "metric", "healthy", "first outside", "steps outside", "worst", "source of the limits"]
    outside = table(heads, left) if left else "<p>No metric with healthy values left them.</p>"
    raised = [
        [
            text(run.name),
            f"step {alarm.step}{_after(run, alarm.step)}",
            text(alarm.alarm),
            text(alarm.message),
            text(ALARMS[alarm.alarm].cause if alarm.alarm in ALARMS else ""),  # other versions have other alarms
            text(_evidence(alarm.evidence)),
        ]
        for run in runs
        for alarm in run.alarms
    ]
    listed = (
        table(["run", "time", "alarm", "what, and the cure", "likely cause", "evidence"], raised)
        if raised
        else "<p>No alarm was raised.</p>"
    )
    limits = "<p>Healthy values are a rule of thumb: leaving them is a reason to look, not an error.</p>"
    return section("Out of the healthy band", outside + limits) + section("Alarms", listed)


def _evidence(evidence: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {format_number(value) if isinstance(value, int | float) else value}"
        for name, value in evidence.items()
    )


def _after(run: RunRecord, step: int) -> str:
    seconds = seconds_until(run, step)
    return "" if seconds is None else f", after {seconds / 60:.1f} min"


# Curves -----------------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[RunRecord]) -> str:
    """A chart per quantity; runs of one algorithm share charts."""
    charts = []
    for chart in charts_of([run.curves for run in runs], MORE):
        drawn = [runs[place] for place in sorted({line.run for line in chart.lines})]
        marks = {float(a.step): f"{a.alarm}, step {a.step} ({run.name})" for run in drawn for a in run.alarms}
        charts.append(
            f"<figure><figcaption>{text(chart.title)}</figcaption>{draw(replace(chart, marks=marks))}</figure>"
        )
    said = (
        "Thin lines are training, lines with dots held-out data. The green band holds healthy values, a ring marks a point "
        "outside, a dotted vertical line is an alarm, a cross at the bottom a value that was not finite."
    )
    return section("Curves", f'<p>{said}</p><div class="charts">{"".join(charts)}</div>')


# The yardstick ----------------------------------------------------------------------------------------------------------


def yardstick(runs: Sequence[RunRecord], measured: MeasuredBestOfN | None) -> str:
    """Reward against KL: what training paid for its score, beside the best of n responses of the untrained policy."""
    lines = []
    for place, run in enumerate(runs):
        if "reward/score_mean" not in {metric for line in run.curves.metrics for metric in line}:
            continue
        for names, kind in (
            (("reference/kl", "reward/score_mean"), "points"),
            (("eval/kl", "eval/score_mean"), "held-out"),
        ):
            points = [(line[names[0]], line[names[1]]) for line in run.curves.metrics if set(names) <= set(line)]
            points = [point for point in points if is_drawable(point[0])]
            if points:
                lines.append(Line(points, place, kind))
    if not lines:
        return ""
    own = {run.name: found for run in runs if (found := best_of_first_step(run))} if measured is None else {}
    for found in [measured.best_of] if measured is not None else list(own.values()):
        kept = [one for one in found if one[0] & (one[0] - 1) == 0 or one[0] == found[-1][0]]
        lines.append(Line([(kl, score) for _, kl, score in kept], 0, "yardstick", [f"n={n}" for n, _, _ in kept]))
    if measured is not None:
        said = "Dashed: the best of n responses, as heedful evaluate best-of-n measured it."
        said += _other_temperature(runs, measured)
    elif own:
        said = f"Dashed: the best of n of the first step's responses to a prompt, before any update ({', '.join(own)})."
    else:
        said = (
            "There is no yardstick: run heedful evaluate best-of-n on the untrained policy with --output FILE, and add "
            "--best-of-n FILE."
        )
    if measured is not None or own:
        said += (
            " The KL of best-of-n is its upper bound, log n − (n − 1)/n. A run below the dashed line pays more KL for its "
            "score than picking the best of n would."
        )
    said = f"Small dots are training, a step each; the line with dots is held-out data. {said}"
    chart = Chart("reward against KL", "KL to the reference, nats per response", "mean score per response", lines)
    return section("Reward against KL", f'<p>{text(said)}</p><figure class="wide">{draw(chart)}</figure>')


def _other_temperature(runs: Sequence[RunRecord], measured: MeasuredBestOfN) -> str:
    """What to say if best-of-n sampled at another temperature than a run; nothing else."""
    own = measured.temperature
    others = [run for run in runs if own is not None and run.settings.get("temperature", own) != own]
    if not others:
        return ""
    listed = ", ".join(f"{run.name} at {run.settings['temperature']}" for run in others)
    return f" It sampled at temperature {own:g}, {listed}: measure it anew."


def best_of_first_step(run: RunRecord) -> BestOfN:
    """Best-of-n from the first step's responses, if there are at least `FEWEST_OF_N` to each prompt; else nothing."""
    files = rollout_files(run.folder)
    if 1 not in files:
        return []
    groups: dict[str, list[float]] = {}
    for response in read_texts(files[1]):
        if response["score"] is not None:
            groups.setdefault(response["prompt"], []).append(response["score"])
    n = min((len(scores) for scores in groups.values()), default=0)
    if n < FEWEST_OF_N:
        return []
    expected = zip(*(expected_best(scores[:n], scores[:n]) for scores in groups.values()), strict=True)
    return [(k, kl_bound(k), sum(of_k) / len(groups)) for k, of_k in enumerate(expected, 1)]


# Samples ----------------------------------------------------------------------------------------------------------------


def samples(runs: Sequence[RunRecord]) -> str:
    """Responses to the same prompts over time, side by side; the prompts with the most steps come first."""
    found: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {}
    for place, run in enumerate(runs):
        for sample in (*run.samples, *_logged_samples(run)):
            key = (place, int(sample["step"]))
            found.setdefault(_prompt(sample), {}).setdefault(key, sample)
    if not found:
        return section("Samples over time", "<p>The runs have no samples: train with --sample-every above 0.</p>")
    most = sorted(found, key=lambda prompt: -len(found[prompt]))[:MOST_PROMPTS]
    blocks = []
    for prompt in most:
        steps = sorted(found[prompt])
        kept = spread(steps, MOST_STEPS)
        cards = [_card(runs[place], step, found[prompt][place, step], several=len(runs) > 1) for place, step in kept]
        blocks.append(
            f'<article><h3 dir="auto">{text(_cut(prompt))}</h3><div class="cards" tabindex="0" role="group" '
            f'aria-label="responses over time">{"".join(cards)}</div></article>'
        )
    said = f"{len(most)} of {len(found):,} prompts, those with responses at the most steps; {MOST_STEPS} steps at most."
    return section("Samples over time", f"<p>{said}</p>{''.join(blocks)}")


def spread(places: Sequence[Any], most: int) -> list[Any]:
    """At most so many of some places, the first and the last among them, evenly between."""
    if len(places) <= most:
        return list(places)
    return [places[round(i * (len(places) - 1) / (most - 1))] for i in range(most)]


def _logged_samples(run: RunRecord) -> list[dict[str, Any]]:
    """Of runs with --rollouts all: the responses to the first step's prompts, whenever they came again."""
    files = rollout_files(run.folder)
    if not files:
        return []
    wanted = {response["prompt"] for response in read_texts(next(iter(files.values())))[: 8 * MOST_PROMPTS]}
    return [one for path in files.values() for one in read_texts(path) if one["prompt"] in wanted]


def _prompt(sample: Mapping[str, Any]) -> str:
    return str(sample.get("prompt", ""))


def _card(run: RunRecord, step: int, sample: Mapping[str, Any], *, several: bool) -> str:
    numbers = [
        f"{name} {format_number(value)}"
        for name, value in sample.items()
        if name not in ("step", "prompt", "response") and isinstance(value, int | float)
    ]
    head = f"{run.name}, step {step}" if several else f"step {step}"
    return (
        f'<div class="card"><h4>{text(head)}</h4><p dir="auto" class="text">{text(_cut(str(sample["response"])))}</p>'
        f"<p class=small>{text(' · '.join(numbers))}</p></div>"
    )


def _cut(shown: str) -> str:
    return shown if len(shown) <= LONGEST_SAMPLE else f"{shown[:LONGEST_SAMPLE]} … ({len(shown):,} characters)"


# Lineage ----------------------------------------------------------------------------------------------------------------


def lineage(runs: Sequence[RunRecord]) -> str:
    """What each run was made from and with; the settings that are not at their defaults, and those that differ."""
    parts = []
    if len(runs) > 1:
        rows = [[text(name), *map(_setting, values)] for name, values in differing_settings(runs).items()]
        differ = table(["setting", *(text(run.name) for run in runs)], rows) if rows else "<p>None.</p>"
        parts.append(f"<h3>Settings that differ between the runs</h3>{differ}")
    for run in runs:
        parts.append(f"<h3>{text(run.name)}</h3>{_parents(run)}{_data(run)}{_settings(run)}")
    return section("Lineage and settings", "".join(parts))


def _parents(run: RunRecord) -> str:
    rows = [
        [
            f"{'&emsp;' * (parent.depth - 1)}{text(parent.setting)}",
            text(parent.model),
            text(parent.algorithm or "not a run of heedful on this machine"),
            text(parent.digest[:16]),
        ]
        for parent in parents_of(run)
    ]
    return table(["made from", "model", "trained by", "hash"], rows) if rows else ""


def _data(run: RunRecord) -> str:
    facts = run.facts
    data = facts.get("data") if isinstance(facts.get("data"), dict) else {}
    rows = [[text(name), text(str(content)[:16])] for name, content in (data or {}).items()]
    versions = facts.get("versions") if isinstance(facts.get("versions"), dict) else {}
    words = [f"{name} {version}" for name, version in (versions or {}).items()]
    words += [f"{name} {facts[name]}" for name in ("seed", "device", "dtype", "revision", "python") if facts.get(name)]
    listed = table(["data", "hash"], rows) if rows else ""
    return f"{listed}<p class=small>{text(' · '.join(words))}</p>" if words else listed


def _settings(run: RunRecord) -> str:
    rows = [
        [text(name), _setting(value), _setting(default)] for name, (value, default) in changed_settings(run).items()
    ]
    if not rows:
        return ""
    heading = f"<summary>{counted(len(rows), 'setting')} of {text(run.name)} not at default</summary>"
    return f"<details>{heading}{table(['setting', 'value', 'default'], rows)}</details>"


def _setting(value: Any) -> str:
    shown = "—" if value is None or value == "" else value if isinstance(value, str) else to_json(value)
    return text(_cut(shown))


# HTML -------------------------------------------------------------------------------------------------------------------


def section(title: str, content: str) -> str:
    """A part of the page with its heading."""
    name = re.sub(r"\W+", "-", title.lower())
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{content}</section>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; it scrolls sideways on a narrow screen."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
