"""``heedful look``: responses of a run in the terminal, each token above its number; without colour the numbers stay."""

import math
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.text import Text

from heedful.apps.plot.whole_tokens import SHOWN
from heedful.apps.report.inspector import Tokenizers
from heedful.apps.report.rollouts import ENDS, QUANTITIES, Response, read_step, rollout_files, without_rollouts
from heedful.apps.report.runs import read_record
from heedful.configs.report import LookConfig
from heedful.display import Screen, counted, harmless
from heedful.errors import ConfigError
from heedful.redact import redact_printed

POSITIVE, NEGATIVE = (43, 123, 186), (224, 112, 42)
"""Colours of the strongest numbers, as on the page."""
OTHERS = "  │ "
"""Before each line of what the other one said."""


def look(config: LookConfig) -> None:
    """Print responses of a step, those with the largest numbers first, or the one of a row.

    Raises CheckpointError if the folder is no run or has no responses, ConfigError if there is no such step, row or number,
    DataError if a file is damaged.
    """
    screen = Screen()
    run = read_record(config.run, config.run.name)
    files = rollout_files(config.run)
    if not files:
        raise without_rollouts(config.run)
    step = max(files) if config.step is None else config.step
    if step not in files:
        raise ConfigError(f"--step {step}: {config.run / 'rollouts'} has steps {_ranges(sorted(files))}")
    responses = read_step(files[step])
    if not responses:
        raise ConfigError(f"--step {step}: the step has no responses; name another")
    known = [one.name for one in QUANTITIES if any(r.numbers[one.name] is not None for r in responses)]
    if not known:
        raise ConfigError(f"--step {step}: its responses have no numbers of tokens; name another step")
    by = known[0] if config.by is None else config.by
    if by not in known:
        raise ConfigError(f"--by {by}: the responses of step {step} have none; they have {', '.join(known)}")
    chosen = _chosen(responses, config, by)
    _print(screen, f"{config.run}, step {step}: {len(chosen)} of {len(responses)} responses; coloured by {by}")
    texts, note = Tokenizers().texts(run, chosen)
    if note:
        _print(screen, note)
    limit = max((_largest(response, by) for response in responses), default=0.0)
    by_turn = run.settings.get("action") == "turn"
    for response, of_tokens in zip(chosen, texts, strict=True):
        _print(screen, "")
        show(screen, response, of_tokens, by, limit, by_turn=by_turn)
    if config.row is not None:
        _table(screen, chosen[0], texts[0])


def show(
    screen: Screen, response: Response, texts: Sequence[str], by: str, limit: float, *, by_turn: bool = False
) -> None:
    """Print a response: its numbers as a whole, its prompt, then lines of tokens above their numbers, turn by turn.

    ``by_turn``: each turn is one action, with one advantage and value.
    """
    whole = {"score": response.score, "KL": response.kl}
    said = [
        f"row {response.row}",
        *(f"{name} {format_number(value)}" for name, value in whole.items() if value is not None),
    ]
    said += [counted(len(response.ids), "token")]
    said += [counted(len(response.turns), "turn")] if response.turns else []
    said += [ENDS.get(response.finish, "ended")]
    said += [
        f"{name} {format_number(value)}"
        for name, value in response.rewards.items()
        if value is not None and len(response.rewards) > 1
    ]
    _print(screen, " · ".join(said))
    _print(screen, response.prompt)
    numbers = response.numbers[by]
    if not response.turns:
        _tokens(screen, texts, numbers, limit)
    for number, turn in enumerate(response.turns, 1):
        of_turn = response.of_turn(turn) if by_turn else {}
        named = [f"turn {number}", *(f"{name} {format_number(value)}" for name, value in of_turn.items())]
        _print(screen, " · ".join(named), Style(bold=True))
        place = slice(turn.start, turn.end)
        _tokens(screen, texts[place], None if numbers is None else numbers[place], limit)
        if turn.reward is not None:
            _print(screen, f"reward {format_number(turn.reward)}", Style(bold=True))
        for call in turn.calls:
            _print(screen, f"calls {call}")
        for role, words in turn.said:
            _print(screen, textwrap.indent(f"{role}: {words}", OTHERS, lambda _: True), Style(dim=True))
    if response.failure:
        _print(screen, f"The environment {response.failure}")


def _tokens(screen: Screen, texts: Sequence[str], numbers: Sequence[float] | None, limit: float) -> None:
    """Print lines of tokens above their numbers."""
    cells = [harmless(one.translate(SHOWN)) or "∅" for one in texts]
    values = [""] * len(cells) if numbers is None else [format_number(value) for value in numbers]
    widths = [max(cell_len(cell), len(value)) + 1 for cell, value in zip(cells, values, strict=True)]
    for line in wrapped(widths, screen.width):
        above, below = Text(), Text(style="dim")
        for t in line:
            pad = " " * (widths[t] - 1 - cell_len(cells[t]))
            above.append(cells[t] + pad, _style(numbers[t], limit) if numbers is not None else "")
            above.append(" ")
            below.append(values[t].ljust(widths[t]))
        for one in (above, below) if numbers is not None else (above,):
            one.rstrip()
            screen.print(one, soft_wrap=True)


def format_number(value: float) -> str:
    """A number with its sign in a few characters."""
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:+.2f}"
    return f"{value:+.0e}" if abs(value) < 0.01 else f"{value:+.3g}"


def wrapped(widths: Sequence[int], room: int) -> list[list[int]]:
    """Places of the tokens of each line, none wider than ``room`` but a token that is so by itself."""
    lines: list[list[int]] = []
    used = room + 1
    for place, width in enumerate(widths):
        if used + width > room + 1:  # the space behind a line's last token needs no room
            lines.append([])
            used = 0
        lines[-1].append(place)
        used += width
    return lines


def _chosen(responses: Sequence[Response], config: LookConfig, by: str) -> list[Response]:
    if config.row is None:
        return sorted(responses, key=lambda one: -_largest(one, by))[: config.count]
    if config.row >= len(responses):
        raise ConfigError(
            f"--row {config.row}: the step has {counted(len(responses), 'response')}, 0 to {len(responses) - 1}"
        )
    return [responses[config.row]]


def _largest(response: Response, by: str) -> float:
    numbers = response.numbers[by] or ()
    return max((abs(value) for value in numbers if math.isfinite(value)), default=0.0)


def _style(value: float, limit: float) -> Style:
    if not math.isfinite(value) or limit <= 0 or value == 0:
        return Style()
    strength = min(1.0, abs(value) / limit)
    if strength < 0.02:
        return Style()
    red, green, blue = (round(255 + (part - 255) * strength) for part in (POSITIVE if value > 0 else NEGATIVE))
    return Style(color="black", bgcolor=Color.from_rgb(red, green, blue))


def _table(screen: Screen, response: Response, texts: Sequence[str]) -> None:
    """Print every number of a response, a line per token."""
    names = [name for name, numbers in response.numbers.items() if numbers is not None]
    cells = [harmless(one.translate(SHOWN)) or "∅" for one in texts]
    wide = max(map(cell_len, cells), default=0)
    _print(screen, "")
    _print(screen, f"{'token':>5}  {'text':<{max(wide, 4)}}  " + "  ".join(f"{name:>9}" for name in names))
    turns = {turn.start: f"turn {number}" for number, turn in enumerate(response.turns, 1)}
    for t, cell in enumerate(cells):
        if t in turns:
            _print(screen, turns[t])
        pad = " " * (max(wide, 4) - cell_len(cell))
        row = "  ".join(f"{format_number((response.numbers[name] or [])[t]):>9}" for name in names)
        _print(screen, f"{t:>5}  {cell}{pad}  {row}")


def _ranges(steps: Sequence[int]) -> str:
    """Whole numbers in a few words: 1 to 110, or 10, 20, 30."""
    if list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps[:20])) + (" ..." if len(steps) > 20 else "")


def _print(screen: Screen, text: str, style: Style | None = None) -> None:
    screen.print(harmless(redact_printed(text)), style=style, markup=False, highlight=False, soft_wrap=True)
