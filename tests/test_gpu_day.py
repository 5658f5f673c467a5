"""The kit for a GPU (benchmarks/gpu_day): its rows on the CPU; a row that hangs or fails does not stop the others."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jsonl import read_jsonl

KIT = Path(__file__).parents[1] / "benchmarks" / "gpu_day"


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.syspath_prepend(str(KIT.parent))
    monkeypatch.syspath_prepend(str(KIT))


@pytest.fixture
def kit():
    return importlib.import_module("day")


@pytest.fixture
def options(kit, tmp_path):
    return kit.parser().parse_args(["--dry", "--out", str(tmp_path), "--device", "cpu"])


def test_the_table_has_each_row_and_a_calls_rows_fit_into_its_minutes(kit):
    text = (KIT / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (\d+) \|", text, re.MULTILINE)
    assert table == [(row.name, row.call, f"{row.limit:g}") for row in kit.ROWS]
    for call, minutes in {"numbers": 5, "speed": 7}.items():
        assert kit.MINUTES[call] == minutes
        assert kit.INSTALL + sum(row.limit for row in kit.ROWS if row.call == call) <= 60 * minutes


def test_a_row_that_hangs_or_fails_is_written_down_and_does_not_stop_the_call(kit, options):
    row = kit.NAMES["versions"]
    assert not kit.run_row(row, 0.05, options)
    assert not kit.run_row(replace(row, environment={"PYTHONHOME": "/nowhere"}), 60, options)
    hung, failed = read_jsonl(options.out / "results.jsonl")
    assert (hung["ended"], failed["ended"]) == ("stopped after 0 s", "with status 1")
    assert not hung["right"]
    assert not failed["right"]
    assert any("encodings" in said for said in failed["said"]), "the log's last lines have the cause"


def test_speed_is_refused_before_numbers_and_after_wrong_ones(kit, tmp_path, capsys):
    found, out = tmp_path / "numbers.jsonl", tmp_path / "out"
    names = [row.name for row in kit.ROWS if row.call == "numbers"]
    good = [{"row": name, "ended": "in time", "right": True} for name in names]
    wrong = [{"row": "truth", "what": "log-probs", "value": "nan", "limit": 1, "right": False}]
    for lines, why in ((good[:-1], "has no result of doctor; first: run.sh numbers"), (wrong + good, "in truth; mend")):
        found.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        assert kit.main(["--dry", "speed", f"--numbers={found}", f"--out={out}"]) == 2
        assert why in capsys.readouterr().err
    assert list(out.iterdir()) == [], "nothing was measured"
    found.write_text("".join(json.dumps(line) + "\n" for line in good), encoding="utf-8")
    assert kit.refusal(found) is None


@pytest.mark.exhaustive
def test_the_whole_kit_runs_dry(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "WORK", tmp_path / "work")
    assert kit.main(["--dry", f"--out={tmp_path}", "numbers", "speed"]) == 0
    lines = read_jsonl(tmp_path / "results.jsonl")
    assert [line["row"] for line in lines if "ended" in line] == list(kit.NAMES)
