"""What of metrics.jsonl a tracker still lacks."""

import json
import math

import pytest

from heedful.tracking.clients import Place
from heedful.tracking.trackers import START, Records


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


RECORDS = [{"step": 0, "eval/x": 1.0}, {"step": 1, "损失": 0.5}, {"step": 1, "eval/x": None}, {"step": 2, "损失": 0.25}]


def test_each_line_has_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*RECORDS), encoding="utf-8")
    records = Records(path, START)
    first, rest = records.read(1), records.read()
    assert [tuple(r.place) for r in first + rest] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert first[0].metrics == {"eval/x": 1.0}
    assert math.isnan(rest[1].metrics["eval/x"])
    assert records.read() == []


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = lines(*RECORDS)
    path.write_text(whole[:-9], encoding="utf-8")
    records = Records(path, START)
    assert len(records.read()) == 3
    path.write_text(whole, encoding="utf-8")
    assert [tuple(r.place) for r in records.read()] == [(2, 0)]


def test_what_was_sent_is_not_read_again_though_the_file_has_other_bytes(tmp_path):
    """A run that resumes from step 1 writes step 2 again, with other times."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*RECORDS[:3], {"step": 2, "损失": 0.25, "time/x": 1}, {"step": 3, "损失": 0.1}), "utf-8")
    assert [tuple(r.place) for r in Records(path, Place(2, 0)).read()] == [(3, 0)]
    assert [tuple(r.place) for r in Records(path, Place(1, 0)).read()] == [(1, 1), (2, 0), (3, 0)]
    assert len(Records(path, START).read()) == 5


def test_what_is_no_number_costs_no_other(tmp_path):
    """Somebody has added a text to a line; the lines before it were lost with it."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        lines({"step": 0, "x": 1}, {"step": 1, "x": 2, "note": "猫", "y": [1]}, {"step": 2, "x": 3}), "utf-8"
    )
    assert [(tuple(r.place), r.metrics) for r in Records(path, START).read()] == [
        ((0, 0), {"x": 1.0}),
        ((1, 0), {"x": 2.0}),
        ((2, 0), {"x": 3.0}),
    ]


def test_lines_that_could_not_be_read_are_next_again(tmp_path):
    """A number too large for any tracker, in the last of three lines, until somebody takes it out."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": 0, "x": 1}, {"step": 1, "x": 10**400}), "utf-8")
    records = Records(path, START)
    with pytest.raises(OverflowError):
        records.read()
    path.write_text(lines({"step": 0, "x": 1}, {"step": 1, "x": 2}), "utf-8")
    assert [tuple(r.place) for r in records.read()] == [(0, 0), (1, 0)]


def test_a_torn_line_is_no_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 1}\n{"st\n[1]\n{"step": 1, "x": 2}\n', "utf-8")
    assert [tuple(r.place) for r in Records(path, START).read()] == [(0, 0), (1, 0)]
