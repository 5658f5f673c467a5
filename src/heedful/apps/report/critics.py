"""The part of the page about critics: what their values know of the returns that came, in the last steps of a run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful import core
from heedful.apps.plot.critic_charts import Judged, critic_charts, lambda_named, numbers
from heedful.apps.report.rollouts import read_values, rollout_files
from heedful.apps.report.runs import RunRecord
from heedful.apps.report.sections import section, table
from heedful.apps.report.svg import draw, format_number, text

STEPS, MOST_TOKENS = 10, 200_000
"""The most that are read, from the last step backwards."""
HOW_TO_READ = (
    "Return: all rewards that came from the token on (Monte Carlo). The coloured line is the critic. Dashed: its value of "
    "the prompt alone, as if it stood at every token. Dotted: the mean return of the prompt's other responses, a group's "
    "baseline. Calibrated values lie on the diagonal; the shade is one standard deviation of the returns. The variance "
    "explained is 1 where values are right, 0 where they are as good as a constant, and drawn down to -1. The advantage is "
    "the weight in the policy's gradient: its variance is a share of that of the return minus its mean, and the dotted "
    "upright is the run's lambda."
)


class _Read(NamedTuple):
    judged: Judged
    steps: Sequence[int]


def critics(runs: Sequence[RunRecord]) -> str:
    """Pictures and numbers of each run with a critic; of one that kept no responses, how to get them. Raises DataError."""
    parts, is_drawn = [], False
    for place, run in enumerate(runs):
        heading = f"<h3>{text(run.name)}</h3>"
        read = _read(run)
        if read is not None:
            parts.append(heading + _of_run(read, place))
            is_drawn = True
        elif any("value/mean" in line for line in run.curves.metrics):
            without = (
                "The run kept no values in rollouts/: its curves are above. Train with --rollouts all to see here how well "
                "the values are calibrated, what they explain by place and length, and what they save of the variance."
            )
            parts.append(f"{heading}<p>{without}</p>")
    if not parts:
        return ""
    said = f"<p>{HOW_TO_READ}</p>" if is_drawn else ""
    return section("The critic", said + "".join(parts))


def _of_run(read: _Read, place: int) -> str:
    judged, steps = read
    responses, tokens = len(judged.actions), int(judged.actions.sum())
    which = f"Steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"Step {steps[0]}"
    said = f"{which}: {responses:,} responses, {tokens:,} values; {lambda_named(judged.gae_lambda)}, gamma {judged.gamma:g}."
    heads = ["predicted by", "variance explained", "at the first token", "bias", "variance of the advantage left"]
    rows = [[text(row.name), *(_number(number) for number in row[1:])] for row in numbers(judged)]
    charts = [
        f"<figure><figcaption>{text(chart.title)}</figcaption>{draw(chart)}</figure>"
        for chart in critic_charts(judged, place)
    ]
    return f'<p>{text(said)}</p>{table(heads, rows)}<div class="charts">{"".join(charts)}</div>'


def _number(number: float | None) -> str:
    return "—" if number is None or math.isnan(number) else format_number(round(number, 3))


def _read(run: RunRecord) -> _Read | None:
    """The last steps' responses; None if the run kept no values."""
    settings, parts, lengths, steps, tokens = run.settings, [], [], [], 0
    size = int(settings.get("samples_per_prompt") or 1)
    for step, path in sorted(rollout_files(run.folder).items(), reverse=True)[:STEPS]:
        values, rewards, mask, starts, known = map(torch.from_numpy, read_values(path))
        known &= tokens + mask.sum(dim=1).cumsum(dim=0) <= MOST_TOKENS
        if len(known) % size:
            size = 1
        whole = known.view(len(known) // size, size).all(dim=1).repeat_interleave(size)
        if whole.any():
            parts.append(_actions(values[whole], rewards[whole], mask[whole], starts[whole], run))
            lengths.append(mask[whole].sum(dim=1))
            steps.append(step)
            tokens += int(mask[whole].sum())
    if not parts:
        return None
    longest = max(mask.shape[1] for *_, mask in parts)
    values, rewards, actions = (
        torch.cat([pad(one, (0, longest - one.shape[1])) for one in kind]) for kind in zip(*parts, strict=True)
    )
    alpha = settings.get("gae_lambda_alpha")
    gae_lambda: float | Tensor = float(settings.get("gae_lambda", 0.95))
    if alpha is not None:
        gae_lambda = core.adaptive_lambda(actions.sum(dim=1), alpha=float(alpha))
    gamma = float(settings.get("gamma", 1.0))
    return _Read(Judged(values, rewards, actions, torch.cat(lengths), gamma, gae_lambda, size), steps[::-1])


def _actions(
    values: Tensor, rewards: Tensor, mask: Tensor, starts: Tensor, run: RunRecord
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, rewards and mask of a step's actions, as the run's settings have them: of tokens, turns, or whole responses.
    ``starts``: the first tokens of turns."""
    actions, size = mask, run.settings.get("action")
    if size == "response" or (size is None and run.settings.get("importance_level", "token") != "token"):
        rewards, actions = core.response_rewards(rewards, mask), core.first_in_mask(mask)
    elif size == "turn":
        rewards, actions = core.action_rewards(rewards, mask, starts), starts
    return values, core.rescale(rewards, actions) if run.settings.get("whiten_rewards") else rewards, actions
