"""Commands that another package adds by entry points of the group heedful.commands."""

import sys

import pytest

MODULE = '''
from dataclasses import dataclass
from pathlib import Path
from heedful.configs.settings import Settings

@dataclass(frozen=True, kw_only=True)
class CountConfig(Settings):
    """Count the lines of a file."""

    data: Path
    """File whose lines are counted."""
    plus: int = 0
    """Number that is added."""

def count(config: CountConfig) -> None:
    print("行数", len(config.data.read_text(encoding="utf-8").splitlines()) + config.plus)

def without(config): ...
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as pip installs it, with commands of two names of its own and one of heedful's."""
    (tmp_path / "counting.py").write_text(MODULE, encoding="utf-8")
    about = tmp_path / "counting-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    points = ["count = counting:count", "without = counting:without", "lost = counting:lost", "runs = counting:count"]
    (about / "entry_points.txt").write_text("\n".join(["[heedful.commands]", *points]))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("counting", None)


def test_a_command_of_another_package(heedful, package, written):
    lines = written("文本.jsonl", [{"text": "一"}, {"text": "二"}])
    assert heedful("count", data=lines, plus=5).out == "行数 7\n"
    assert heedful("--help").out.count("counting:count") == 1, "runs is heedful's own"
    assert "Number that is added" in heedful("count", "--help").out


def test_its_mistakes_are_named(heedful, package, written):
    assert "--plus" in heedful("count", data=written("a.jsonl", []), plus="many").message
    assert "must take one argument, annotated" in heedful("without").message
    assert "cannot be imported" in heedful("lost").message
    assert "did you mean 'count'" in heedful("coutn").message


def test_names_of_heedful_stay_its_own(heedful, package, tmp_path):
    assert "counting" not in heedful("runs", "--help").out
