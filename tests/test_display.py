"""Tables of samples: readable at their width, whatever the language, and with nothing that a terminal would obey."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from heedful.display import print_table, shown


def printed(rows, width):
    file = io.StringIO()
    print_table(Console(file=file, width=width), "", rows)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 100])
def test_a_table_keeps_to_its_width(width):
    """A Chinese character takes two columns."""
    row = {
        "prompt": "请说大的反义词。" * 4,
        "SFT answer": "当然，是小。" * 9,
        "SFT reward": -12.345,
        "PPO answer": "x" * 70,
    }
    lines = printed([row], width)
    assert {cell_len(line) for line in lines} == {width}
    table = "\n".join(lines)
    for text in ("请", "反", "当然", "x", "-12.35"):
        assert text in table
    assert sum(line.count("x") for line in lines) == 70


def test_numbers_take_no_more_than_they_need():
    """Their headings have a word a line, so the texts keep the room; a lone figure stands at the right."""
    lines = printed([{"text": "a", "chosen score": 1.0, "n": 3}], 60)
    assert lines[1:3] == ["┃      ┃ chosen ┃   ┃", "┃ text ┃  score ┃ n ┃"]
    assert "│   1.00 │ 3 │" in lines[4]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.126, "0.13"),
        (-0.001, "0.00"),
        (-1.5, "-1.50"),
        (3, "3"),
        ("a\nb\x1b[1m", "a\\nb\\x1b[1m"),
        ("[red]好", "[red]好"),
    ],
)
def test_values_as_text(value, text):
    assert shown(value) == text
    assert shown("长" * 301) == "长" * 299 + "…"
