"""Draw tokens in a row, with coloured bands of numbers below: advantages, KL, values and rewards, token by token."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from heedful.apps.plot.style import (
    Colour,
    Picture,
    Theme,
    as_text,
    current_theme,
    drawable,
    format_number,
    listed,
    mix,
    picture,
    save,
    text_width,
)
from heedful.apps.plot.whole_tokens import SHOWN, token_texts
from heedful.display import counted
from heedful.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from heedful.algorithms.online.experience import Experience

MARGIN, GAP, LINE_GAP = 12.0, 1.5, 14.0
"""Spaces in points, as all sizes here: around the picture; between cells; between lines of tokens."""
TOKEN_SIZE, NUMBER_SIZE, LABEL_SIZE, TITLE_SIZE = 12.0, 8.5, 9.0, 11.0
TOKEN_HEIGHT, BAND_HEIGHT, TITLE_HEIGHT = 24.0, 16.0, 26.0
NARROWEST = 16.0


def tokens(
    tokens: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    *,
    title: str = "",
    limits: Mapping[str, float] | None = None,
    width: float = 9.0,
    path: str | Path | None = None,
) -> Picture:
    """Draw tokens in a row, wrapped, and below them a coloured band with the numbers of each quantity.

    Blue is positive, orange is negative, the page's colour is 0. The tokens have the colours of the first quantity.

    Args:
        tokens: ``[time]``, the text of each token. White space is drawn as ␣ and ↵.
        values: by the name of a quantity, ``[time]`` numbers. None leaves a cell empty; NaN and infinity are hatched.
        title: drawn above.
        limits: by the name of a quantity, the magnitude of the full colour; use the same for pictures to compare. The default
            is the quantity's largest magnitude.
        width: of the picture, in inches.
        path: where to save the picture.

    Raises ConfigError if there are no tokens or no values, or if a quantity does not have one number per token.
    """
    bands = {name: [None if x is None else float(x) for x in listed(numbers)] for name, numbers in values.items()}
    _check(tokens, bands)
    largest = {name: _largest(band) for name, band in bands.items()} | dict(limits or {})
    texts = [drawable(token.translate(SHOWN)) for token in tokens]
    rows = list(zip(*bands.values(), strict=True))
    widths = [
        max(NARROWEST, _token_width(text), *map(_number_width, row)) for text, row in zip(texts, rows, strict=True)
    ]
    label_width = max(text_width(drawable(name), LABEL_SIZE) for name in bands) + 8

    lines = _wrap(widths, width * 72 - 2 * MARGIN - label_width)
    title_height = TITLE_HEIGHT if title else 0.0
    line_height = TOKEN_HEIGHT + BAND_HEIGHT * len(bands)
    height = 2 * MARGIN + title_height + len(lines) * (line_height + LINE_GAP) - LINE_GAP
    figure, theme = picture(width, height / 72), current_theme()
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width * 72), ylim=(height, 0))  # one unit is a point, y goes down
    axes.axis("off")
    if title:
        axes.text(MARGIN, MARGIN + TITLE_HEIGHT / 2 - 5, title, size=TITLE_SIZE, weight="bold", va="center")
    for index, line in enumerate(lines):
        top, left = MARGIN + title_height + index * (line_height + LINE_GAP), MARGIN + label_width
        for place, name in enumerate(bands):
            middle = top + TOKEN_HEIGHT + (place + 0.5) * BAND_HEIGHT
            axes.text(MARGIN, middle, name, size=LABEL_SIZE, color=theme.muted, va="center")
        for t in line:
            wide = widths[t] - GAP
            colours = [_colour(value, largest[name], theme) for name, value in zip(bands, rows[t], strict=True)]
            head = Rectangle((left, top), wide, TOKEN_HEIGHT - GAP, facecolor=colours[0], linewidth=0)
            _draw_cell(axes, head, texts[t], TOKEN_SIZE, theme)
            for place, (value, colour) in enumerate(zip(rows[t], colours, strict=True)):
                y = top + TOKEN_HEIGHT + place * BAND_HEIGHT
                cell = Rectangle((left, y), wide, BAND_HEIGHT - GAP, facecolor=colour, linewidth=0)
                if value is not None and not math.isfinite(value):
                    cell.set(hatch="////", hatchcolor=mix(theme.page, theme.text, 0.25))
                _draw_cell(axes, cell, _shown(value), NUMBER_SIZE, theme)
            left += widths[t]
    as_text(axes.texts)
    save(figure, path)
    return figure


def experience(
    experience: "Experience",
    row: int,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    title: str | None = None,
    limits: Mapping[str, float] | None = None,
    path: str | Path | None = None,
) -> Picture:
    """Draw one response of a step of `heedful.ppo_steps`, token by token, with the values of the update (`tokens`).

    - advantage: ``A_t`` in the loss, whitened if so configured;
    - KL: ``log pi(token) - log ref(token)`` in nats (k1), if the step had a reference;
    - value: ``V_t``, the critic's, of the text before the token, if the step had a critic;
    - reward: ``r_t``, the score with its penalties at its token (mostly the last), minus the KL penalty.

    Args:
        experience: of a step.
        row: index of the response, from 0.
        tokenizer: the policy's.
        title: drawn above; None is the prompt.
        limits: as for `tokens`.
        path: where to save the picture.

    Raises ConfigError if there is no such row, or the response has no token.
    """
    count = len(experience.rows)
    if not 0 <= row < count:
        raise ConfigError(
            f"plot.experience: row is {row}; the experience has {counted(count, 'response')}, 0 to {count - 1}"
        )
    mask = experience.mask[row]
    ids = experience.batch.ids[row, -len(mask) :][mask].tolist()
    if not ids:
        raise ConfigError(f"plot.experience: the response in row {row} has no token")
    values: dict[str, list[float | None]] = {"advantage": experience.advantages[row][mask].tolist()}
    if experience.old_logprobs is not None and experience.ref_logprobs is not None:
        values["KL"] = (experience.old_logprobs - experience.ref_logprobs)[row][mask].tolist()
    if experience.old_values is not None:
        values["value"] = experience.old_values[row][mask].tolist()
    values["reward"] = experience.rewards[row][mask].tolist()
    if title is None:
        prompt = experience.completions[row].prompt.prompt
        title = prompt if isinstance(prompt, str) else prompt[-1].content
    return tokens(token_texts(ids, tokenizer), values, title=title, limits=limits, path=path)


def _check(tokens: Sequence[str], bands: Mapping[str, Sequence[float | None]]) -> None:
    if not len(tokens):
        raise ConfigError("plot.tokens: tokens is empty; give at least one token")
    if not bands:
        raise ConfigError(
            "plot.tokens: values is empty; give at least one quantity, such as {'advantage': [0.5, -0.1]}"
        )
    for name, band in bands.items():
        if len(band) != len(tokens):
            raise ConfigError(
                f"plot.tokens: values[{name!r}] has {counted(len(band), 'number')} for {counted(len(tokens), 'token')}; "
                "give one per token"
            )


def _largest(band: Sequence[float | None]) -> float:
    return max((abs(x) for x in band if x is not None and math.isfinite(x)), default=0.0)


def _shown(value: float | None) -> str:
    return "" if value is None else format_number(value)


def _token_width(text: str) -> float:
    return text_width(text, TOKEN_SIZE) + 7


def _number_width(value: float | None) -> float:
    return text_width(_shown(value), NUMBER_SIZE) + 5


def _wrap(widths: Sequence[float], room: float) -> list[list[int]]:
    """Indices of the tokens of each line; a line has at least one."""
    lines: list[list[int]] = []
    used = math.inf
    for place, width in enumerate(widths):
        if used + width > room:
            lines.append([])
            used = 0.0
        lines[-1].append(place)
        used += width
    return lines


def _colour(value: float | None, largest: float, theme: Theme) -> Colour:
    return theme.page if value is None or not math.isfinite(value) else theme.shade(value, largest)


def _draw_cell(axes: Axes, cell: Rectangle, text: str, size: float, theme: Theme) -> None:
    """Add a filled rectangle with a text in its middle."""
    axes.add_patch(cell)
    x, y = cell.get_center()
    axes.text(x, y, text, size=size, color=theme.ink(to_rgb(cell.get_facecolor())), ha="center", va="center_baseline")
