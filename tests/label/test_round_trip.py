"""An export holds the labels of all, and gives them back: as many, by the same people, about the same answers."""

import pytest

from heedful import DataError
from heedful.apps.label import Project, export_project
from heedful.apps.label.importing import add, read_items_text
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from labelling import send

CRITERIA = ("{name: 有用, scale: 5}",)


@pytest.fixture
def project(tmp_path, item, items, answers):
    """Three people, of whom one labels for evaluation only, each of them on every item."""
    with Project.create(tmp_path / "p", ProjectSettings(overlap=0, repeats=0, criteria=CRITERIA)) as made:
        for name, standing in (("张伟", "active"), ("Ada", "active"), ("评测", "held-out")):
            made.add_person(name, "annotator", standing)
        for task in answers:
            made.add_items(items(3, task, needed=2))
        made.add_items([item("demonstration", "写", "草稿 😀", needed=2)])
        for person in ("p2", "p3", "p4"):
            while (held := made.next_item(person)) is not None:
                is_asked = held.item.task in ("pair", "ranking", "rating")
                said = {"criteria": [{"有用": 4} for _ in held.item.candidates]} if is_asked else {}
                send(made, person, answers[held.item.task] | said, comment=f"{person} 的备注")
        yield made


def said(project):
    """Who says what about which item, with the comment."""
    return sorted(
        (one.item.item_id, one.person.name, str(one.event.content["answer"]), one.event.content["comment"])
        for one in project.labels()
    )


def test_the_labels_of_all_come_back(project, tmp_path, capsys):
    assert len(said(project)) == 48
    assert main(["label", "export", str(project.folder), "--output", str(tmp_path / "out")]) == 0
    again = tmp_path / "again"
    assert main(["label", "new", str(again), "--criteria", *CRITERIA]) == 0
    assert main(["label", "import", str(again), "--data", str(tmp_path / "out" / "items.jsonl"), "--with-labels"]) == 0
    assert "Added 16 items and 48 labels" in capsys.readouterr().out
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
        assert (len(copy.items()), copy.labels()) == (16, []), "without the flag there are no labels"
    with pytest.raises(DataError, match=r"import.jsonl:1: `feedback.labels`, which are not"):
        read_items_text(text.replace('"standing": "removed"', '"standing": 7'))
