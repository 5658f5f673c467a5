"""Show an exam: in the terminal, as one HTML page that needs nothing else, or as JSON. All three have the same tables."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import style as styles
from matplotlib.colors import to_hex

from heedful.apps.exam.measures import Record
from heedful.apps.plot.style import current_theme, mix
from heedful.configs.exam import ExamConfig
from heedful.display import Screen, harmless, print_table
from heedful.files import check_output_file, to_json, write_text
from heedful.redact import without_secrets_of

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MARK = "heedful exam"
"""The generator that a page names, and by which an earlier page is known."""
TITLES = {
    "accuracy": "Accuracy",
    "calibration": "Calibration",
    "margins": "Margins",
    "length": "Length",
    "baselines": "Baselines",
    "ensemble": "Other rewards on the pairs",
    "probes": "Probes",
    "edits": "Random edits of chosen responses",
    "search": "Search under the policy",
    "foretold": "Over-optimisation foretold",
}
EXPLAINED = {
    "accuracy": "Share of pairs whose chosen response scores strictly higher.",
    "calibration": "If the reward is sure of an order with probability p, it should be right in a share p of the pairs.",
    "margins": "Quantiles of the chosen response's score minus the rejected one's; scale is the standard deviation of all "
    "scores.",
    "length": "A reward that follows length is good in one bucket and bad in the other.",
    "baselines": "A reward no better than these has learned no more than they know. A tie is half right.",
    "ensemble": "How often another reward orders a pair the other way.",
    "probes": "flips: the spoilt response scores above the chosen one it was made from (a tie is one half). "
    "above rejected: it scores above the rejected one.",
    "edits": "raised: share of chosen responses for which random edits find a text that scores higher. gain: by how many "
    "scales.",
    "search": "Scores above those of the chosen responses, in scales: of the policy's answers, of the best of n, and of "
    "that after random edits.",
    "foretold": "Score of the best of k answers, chosen by the reward, under the reward and under the judge. rise: 1 is as "
    "good as choosing by the judge, 0 is chance.",
}
"""What each part says, in a sentence."""


def check_page(config: ExamConfig) -> None:
    """Check, before any work is done, that the page can be written and that no file but an earlier one is lost.

    Raises ConfigError.
    """
    if config.output is not None:
        check_output_file(
            config.output, MARK, overwrite=config.overwrite, what="a file for the page, such as exam.html"
        )


def show(record: Record, config: ExamConfig) -> None:
    """Print an exam, and write its page if the settings name a file."""
    screen = Screen(soft_wrap=True)
    hidden = without_secrets_of(config)
    numbers = hidden(to_json({"made by": MARK, **record}, indent=2)) + "\n"
    if config.json:
        screen.print(numbers, end="", markup=False, highlight=False)
    else:
        _print(screen, record)
    if config.output is not None:
        is_json = config.output.suffix.lower() == ".json"
        config.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(config.output, numbers if is_json else hidden(html_page(record)))
        if not config.json:
            screen.print(harmless(f"the page is in {config.output}"), markup=False, highlight=False)


def _print(screen: Screen, record: Record) -> None:
    def line(text: str, style: str = "") -> None:
        screen.print(harmless(text), markup=False, highlight=False, style=style)

    line(f"{record['reward']}: {record['score']:.0f} of 100", "bold")
    line(record["verdict"])
    print_table(screen, "what the score is made of", _terms(record))
    if record["worst"]:
        rows = [{name: value for name, value in one.items() if name != "gap"} for one in record["worst"]]
        print_table(screen, "the worst examples: a worse response that scores higher", rows)
    for title, explained, numbers, tables in sections(record):
        screen.print()
        line(title, "bold")
        line(explained)
        for name, value in numbers:
            line(f"{name}: {value}")
        for rows in tables:
            print_table(screen, "", rows)
    if record["not_done"]:
        print_table(screen, "not done", record["not_done"])


def html_page(record: Record) -> str:
    """The page as HTML: all of its style is inside, all text of data and models is escaped, and it has no script."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: harmless(value) if isinstance(value, str) else value,  # before it is escaped
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        mark=MARK,
        record=record,
        terms=[{name: _shown(value) for name, value in row.items()} for row in _terms(record)],
        sections=[
            (title, explained, numbers, [[_cells(row) for row in rows] for rows in tables])
            for title, explained, numbers, tables in sections(record)
        ],
        worst=[
            {**one, **{name: f"{one[name]:z.2f}" for name in ("better score", "worse score", "gap")}}
            for one in record["worst"]
        ],
        settings={name: _shown(value) for name, value in record["settings"].items() if value not in ("", [])},
        light=_colours("default"),
        dark=_colours("dark_background"),
    )


def sections(record: Record) -> Iterator[tuple[str, str, list[tuple[str, str]], list[list[Record]]]]:
    """Each part's title, its sentence, its numbers in words, and its tables."""
    for name, part in record["parts"].items():
        numbers = [(label, _shown(value)) for label, value in part.items() if not isinstance(value, list)]
        tables = [rows for rows in part.values() if isinstance(rows, list) and rows]
        yield TITLES[name], EXPLAINED[name], numbers, tables


def _terms(record: Record) -> list[Record]:
    return [{"term": one["term"], "is": one["formula"], "value": one["value"]} for one in record["terms"]]


def _cells(row: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    """A row's values in words; a share also as a number from 0 to 1, to be drawn as a bar."""
    bars = (
        "flips",
        "above rejected",
        "accuracy",
        "its accuracy",
        "the reward's",
        "other order",
        "only this one",
        "right",
    )
    return {name: (_shown(value), value if name in bars and value is not None else None) for name, value in row.items()}


def _shown(value: Any) -> str:
    """A number, an interval, a list of names, or a text."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return " to ".join(map(_shown, value))
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:z.3f}" if isinstance(value, float) else str(value)


def _colours(style: str) -> dict[str, str]:
    """The colours of heedful's pictures on a light or a dark page."""
    with styles.context(style):
        theme = current_theme()
    found = {
        "page": theme.page,
        "text": theme.text,
        "muted": theme.muted,
        "good": theme.positive,
        "bad": theme.negative,
    }
    return {name: to_hex(colour) for name, colour in found.items()} | {"line": to_hex(mix(theme.page, theme.text, 0.2))}
