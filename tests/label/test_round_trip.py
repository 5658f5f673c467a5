"""An export holds the labels of all, and gives them back: as many, by the same people, about the same answers."""

import pytest

from heedful import DataError
from heedful.apps.label import Candidate, Item, Project, export_project, item_id
from heedful.apps.label.importing import add, read_items_text
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings

CRITERIA = ("{name: 有用, scale: 5}",)
ANSWERS = {
    "pair": {"preferred": 1, "strength": 3, "both_bad": False},
    "ranking": {"ranks": [2, 1, 2]},
    "rating": {"rating": 6, "flags": ["hallucination"]},
    "demonstration": {"text": "第一\u2028行 😀"},
    "correction": {"text": "更好"},
}
COUNTS = {"pair": 2, "ranking": 3, "rating": 1, "demonstration": 1, "correction": 1}


@pytest.fixture
def project(tmp_path):
    """Three people, of whom one labels for evaluation only, each of them on every item."""
    settings = ProjectSettings(overlap=0, repeats=0, criteria=CRITERIA)
    with Project.create(tmp_path / "p", settings) as made:
        for name, standing in (("张伟", "active"), ("Ada", "active"), ("评测", "held-out")):
            made.add_person(name, "annotator", standing)
        for task, count in COUNTS.items():
            for i in range(3):
                candidates = tuple(Candidate(f"{task} {k} 😀") for k in range(count))
                made.add_items([Item(item_id(task, f"问 {i}", candidates), task, f"问 {i}", candidates, needed=2)])
        for person in ("p2", "p3", "p4"):
            while (held := made.next_item(person)) is not None:
                task, nonce, comment = held.item.task, f"{len(made.events())}", f"{person} 的备注"
                said = {"criteria": [{"有用": 4}] * COUNTS[task]} if task in ("pair", "ranking", "rating") else {}
                answer = ANSWERS[task] | said
                made.label(person, held.item.item_id, answer, nonce=nonce, seconds=1, comment=comment)
        yield made


def said(project):
    """Who says what about which item, with the comment."""
    return sorted(
        (one.item.item_id, one.person.name, str(one.event.content["answer"]), one.event.content["comment"])
        for one in project.labels()
    )


def test_the_labels_of_all_come_back(project, tmp_path, capsys):
    assert len(said(project)) == 45
    assert main(["label", "export", str(project.folder), "--output", str(tmp_path / "out")]) == 0
    again = tmp_path / "again"
    assert main(["label", "new", str(again), "--criteria", *CRITERIA]) == 0
    assert main(["label", "import", str(again), "--data", str(tmp_path / "out" / "items.jsonl"), "--with-labels"]) == 0
    assert "Added 15 items and 45 labels" in capsys.readouterr().out
    with Project.open(again) as copy:
        assert said(copy) == said(project)
        standings = {one.name: one.standing for one in copy.people()}
        assert standings == {"owner": "active", "张伟": "removed", "Ada": "removed", "评测": "held-out"}
        text = export_project(copy).files["items.jsonl"].decode()
        assert add(copy, read_items_text(text), with_labels=True)["labels"] == 0, "each is taken once"
        first, second = (
            {name: one.manifest["files"][name]["records"] for name in one.files if name != "events.jsonl"}
            for one in (export_project(project), export_project(copy))
        )
        assert first == second, "the same records to train on"
    with Project.create(tmp_path / "without", ProjectSettings()) as copy:
        add(copy, read_items_text(text))
        assert (len(copy.items()), copy.labels()) == (15, []), "without the flag there are no labels"
    with pytest.raises(DataError, match=r"import.jsonl:1: `feedback.labels`, which are not"):
        read_items_text(text.replace('"standing": "removed"', '"standing": 7'))
