"""What the page of rounds reads: projects without rounds, half-written metrics, long curves, damaged files; no torch."""

import json
import subprocess
import sys

import pytest

from heedful import DataError
from heedful.apps.label.rounds_page import MOST_POINTS, rounds_of, trained_on


@pytest.fixture
def begun(tmp_path):
    """A project whose first round is being trained."""
    folder = tmp_path / "rounds" / "1"
    folder.mkdir(parents=True)
    agreement = {"pair": {"items": 3, "share": {"value": 0.7}}}
    steps = {"sample": {"asked": 5}, "label": {"pairs": 5, "labels": 6, "statistics": {"agreement": agreement}}}
    notes = {"round": 1, "settings": {"labels": 5}, "before": "甲", "steps": steps}
    (folder / "round.json").write_text(json.dumps(notes, ensure_ascii=False), encoding="utf-8")
    return tmp_path


def test_half_a_line_and_what_is_no_number_are_left_out(begun, tmp_path_factory):
    none = rounds_of(tmp_path_factory.mktemp("无"))
    assert (none["rounds"], set(map(tuple, none["across"].values()))) == ([], {()})
    run = begun / "rounds" / "1" / "reward"
    run.mkdir()
    lines = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "reward/accuracy": 0.6},
        {"step": 2, "reward/accuracy": None},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "reward/acc'
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    page = rounds_of(begun)
    (one,) = page["rounds"]
    assert (one["step"], one["agreement"]["share"]["value"], one["label"]) == ("reward", 0.7, {"pairs": 5, "labels": 6})
    assert {curve["name"]: curve["points"] for curve in one["curves"]["reward"]} == {
        "accuracy": [[1, 0.6]],
        "accuracy, held out": [[0, 0.5]],
    }
    assert (page["across"]["labels"], page["across"]["agreement"], page["across"]["kl"]) == ([5], [0.7], [None])


def test_long_curves_keep_their_ends(begun):
    run = begun / "rounds" / "1" / "ppo"
    run.mkdir()
    text = "".join(json.dumps({"step": step, "reward/score_mean": float(step)}) + "\n" for step in range(5000))
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    points = rounds_of(begun)["rounds"][0]["curves"]["ppo"][0]["points"]
    assert len(points) == MOST_POINTS
    assert (points[0], points[-1]) == ([0, 0.0], [4999, 4999.0])
    assert points == sorted(points)


def test_notes_with_other_values_than_a_round_writes(begun):
    """The page leaves them out; what undo needs to know is named, and so is a damaged file."""
    path = begun / "rounds" / "1" / "round.json"
    notes = json.loads(path.read_text("utf-8"))
    notes["steps"]["label"] = {"pairs": "五", "statistics": ["甲"]}
    path.write_text(json.dumps(notes), encoding="utf-8")
    page = rounds_of(begun)
    assert (page["across"]["labels"], page["rounds"][0]["agreement"]) == ([None], None)
    (path.parent / "labels").mkdir()
    (path.parent / "labels" / "numbers.json").write_text('{"events": "三"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"numbers\.json: events must be a whole number, and is a text; restore it"):
        trained_on(begun)
    path.write_text('{"round', encoding="utf-8")
    with pytest.raises(DataError, match=r"round\.json: line 1 is not valid JSON"):
        rounds_of(begun)


def test_reading_loads_no_torch():
    code = "import sys, heedful.apps.label.rounds_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
