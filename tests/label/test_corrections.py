"""A list of single labels, and corrections of them by owners, which keep what was said."""

import json

import pytest

from heedful import DataError
from heedful.apps.label import NotHeldError, Project, export_project, listing, project_statistics
from heedful.cli.main import main
from labelling import send
from refusals import refused

FIRST = {"preferred": 0, "strength": 3, "both_bad": False}
SECOND = {"preferred": 1, "strength": 2, "both_bad": False}


@pytest.fixture
def labelled(new_project, item):
    """Two people differ about the cat, and agree about the dog."""
    made = new_project()
    made.add_items([item("pair", "问 猫", "甲", "乙", needed=2), item("pair", "问 狗", "丙", "丁", needed=2)])
    for person, answer in (("p2", FIRST), ("p2", FIRST), ("p3", SECOND), ("p3", FIRST)):
        send(made, person, answer)
    return made


def ids(project, **asked):
    return [(one.item.prompt, one.person.name) for one in listing.chosen(project.labels(), **asked)]


def test_the_list_by_person_difference_and_text(labelled):
    newest_first = [("问 狗", "Ada"), ("问 猫", "Ada"), ("问 狗", "张伟"), ("问 猫", "张伟")]
    assert ids(labelled) == newest_first
    assert ids(labelled, person="p2") == [("问 狗", "张伟"), ("问 猫", "张伟")]
    assert ids(labelled, differ=True) == [("问 猫", "Ada"), ("问 猫", "张伟")]
    assert ids(labelled, search="丁", person="p3") == [("问 狗", "Ada")], "in an answer"
    assert ids(labelled, search=labelled.items()[0].item_id, differ=True, person="p2") == [("问 猫", "张伟")]
    assert ids(labelled, search="nothing") == []


def test_a_correction_counts_and_keeps_what_was_said(labelled):
    wrong = labelled.labels()[2].event
    before = project_statistics(labelled)
    assert (before["agreement"]["pair"]["share"]["value"], before["corrected"]) == (0.5, 0)
    done = labelled.correct("p1", wrong.event_id, FIRST, nonce="c1", reason="看错了")
    twice = labelled.correct("p1", wrong.event_id, FIRST, nonce="c1", reason="看错了")
    assert twice == done, "recorded once"
    after = project_statistics(labelled)
    assert (after["agreement"]["pair"]["share"]["value"], after["corrected"]) == (1.0, 1)
    (step,) = labelled.corrections(wrong.event_id)
    assert step.person == "p1"
    assert [step.content[name] for name in ("old", "answer", "reason")] == [SECOND, FIRST, "看错了"]
    assert wrong in labelled.events(), "what was said stays"
    result = export_project(labelled)
    records = [
        json.loads(line) for name in result.files if name.startswith("pref") for line in result.files[name].splitlines()
    ]
    (record,) = [one for one in records if one["feedback"]["event"] == wrong.event_id]
    assert (record["chosen"], record["feedback"]["corrected_by"]) == ("甲", "p1")
    assert any("1 label with an answer corrected by an owner" in note for note in result.manifest["notes"])
    events = [json.loads(line) for line in result.files["events.jsonl"].splitlines()]
    assert [one["kind"] for one in events][-1] == "correct"
    labelled.close()
    with Project.open(labelled.folder) as again:
        assert [one.event.content["answer"] for one in again.labels()][2] == FIRST
        again.correct("p1", wrong.event_id, {"strength": 4}, nonce="c2")
        assert [step.content["old"]["strength"] for step in again.corrections(wrong.event_id)] == [2, 3]


def test_corrections_that_cannot_be(labelled):
    label, last = (labelled.labels()[at].event.event_id for at in (0, -1))
    for who, answer, fragment in (
        ("p2", SECOND, "张伟 is annotator; only owners correct labels of others"),
        ("p1", {"preferred": 2}, "preferred must be one of 0, 1"),
        ("p1", {"rating": 2}, "has no field 'rating'"),
        ("p1", FIRST, "nothing was corrected"),
    ):
        with refused(DataError, fragment):
            labelled.correct(who, label, answer, nonce="c")
    assert labelled.corrections(label) == []
    labelled.undo("p3", "u")
    with pytest.raises(DataError, match=r"no counting label has the id .*; it may have been taken back"):
        labelled.correct("p1", last, SECOND, nonce="c")
    last = labelled.labels()[-1].event
    labelled.correct("p1", last.event_id, FIRST, nonce="c")
    with pytest.raises(NotHeldError, match="the owner has corrected it"):
        labelled.undo("p3", "v")
    assert labelled.labels()[-1].event.content["answer"] == FIRST


def test_texts_ratings_and_rankings_are_corrected_too(new_project, item):
    project = new_project()
    project.add_items([item("ranking", "排", "a", "b", "c"), item("rating", "分", "x"), item("demonstration", "写")])
    for answer in ({"ranks": [1, 2, 3]}, {"rating": 3, "flags": ["hallucination"]}, {"text": "好"}):
        send(project, "p2", answer)
    new = [{"ranks": [3, 2, 1]}, {"rating": 7}, {"text": "更好 😀\u2028"}]
    for label, answer in zip(project.labels(), new, strict=True):
        project.correct("p1", label.event.event_id, answer, nonce=label.event.event_id)
    said = [one.event.content["answer"] for one in project.labels()]
    assert said == [new[0], {"rating": 7, "flags": ["hallucination"]}, new[2]]


def test_the_commands(labelled, capsys):
    folder = str(labelled.folder)
    labelled.close()
    assert main(["label", "list", folder, "--differ", "--person", "Ada"]) == 0
    said = capsys.readouterr().out
    assert "问 猫" in said
    assert said.endswith("1 of 1 label\n")
    label = said.split()[0]
    (labelled.folder / "rounds" / "1" / "labels").mkdir(parents=True)
    (labelled.folder / "rounds" / "1" / "labels" / "numbers.json").write_text('{"events": 99}', encoding="utf-8")
    assert main(["label", "correct", folder, label, "--answer", '{"preferred": 0}', "--reason", "看错了"]) == 0
    assert "A round has already trained on this label" in capsys.readouterr().out
    assert main(["label", "list", folder, "--search", "猫"]) == 0
    assert "Ada (corrected by an owner)" in capsys.readouterr().out
    assert main(["label", "withdraw", folder, "--items", labelled.items()[0].item_id]) == 0
    assert main(["label", "correct", folder, label, "--answer", '{"strength": 4}']) == 0
    assert 'Corrected by owner: {"preferred": 0, "strength": 4' in capsys.readouterr().out, "also of a withdrawn item"
    assert main(["label", "withdraw", folder, "--items", labelled.items()[0].item_id, "--back"]) == 0
    assert main(["label", "correct", folder, label, "--answer", "better"]) == 2
    assert "--answer 'better' is not JSON" in capsys.readouterr().err
    assert main(["label", "list", folder, "--person", "谁"]) == 2
    assert "there is no person '谁' in the project; it has p1 (owner), p2 (张伟), p3 (Ada)" in capsys.readouterr().err
    assert main(["label", "stats", folder]) == 0
    assert "1 label corrected by an owner" in capsys.readouterr().out
