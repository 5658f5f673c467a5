"""docs/doctor.md has a row for each check, written from the same table: ``python tests/doctor/test_page.py``."""

from pathlib import Path

from heedful.configs.checks import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- checks -->\n", "<!-- /checks -->\n"


def table():
    rows = ["| check | | looks at | fix |", "|---|---|---|---|"]
    rows += [
        f"| `{name}`{'*' * one.is_cheap} | {one.levels} | {one.looks_at} | {one.fix} |" for name, one in CHECKS.items()
    ]
    return "\n".join(rows) + "\n"


def page():
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def test_the_page_has_every_check():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/doctor/test_page.py"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
