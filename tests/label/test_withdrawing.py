"""Withdrawing wrongly imported items: by import or one by one, with their labels kept, and back again."""

import pytest

from heedful.apps.label import ExportOptions, NotHeldError, Project, export_project, project_statistics
from heedful.apps.label.importing import add, read_items
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from jsonl import write_jsonl
from labelling import send

PAIR = {"preferred": 0, "strength": 3, "both_bad": False}


def write(path, *prompts):
    return write_jsonl(path, ({"prompt": prompt, "chosen": "甲 😀", "rejected": "乙"} for prompt in prompts))


@pytest.fixture
def project(tmp_path):
    """Two imports, of three and two pairs."""
    with Project.create(tmp_path / "项目", ProjectSettings(name="撤回", overlap=0, repeats=0)) as made:
        made.add_person("张伟", "annotator")
        add(made, read_items(write(tmp_path / "好.jsonl", "一", "二", "三")))
        add(made, read_items(write(tmp_path / "wrong.jsonl", "三", "四", "五")))
        yield made


def left(project, person="p2"):
    """The prompts that a person is still given."""
    prompts = []
    while (held := project.next_item(person)) is not None:
        prompts.append(held.item.prompt)
        send(project, person, PAIR)
    return prompts


def test_an_import_is_withdrawn_and_put_back(project):
    for _ in range(4):
        send(project, "p2", PAIR)
    (wrong, good) = project.batches()
    assert [wrong["batch"], wrong["items"], wrong["labels"]] == ["2 wrong.jsonl", 2, 1]
    assert [good["batch"], good["items"], good["labels"]] == ["1 好.jsonl", 3, 3], "what was there is of the first"
    assert project.withdraw("p1", batch="2", reason="错了") == 2
    assert project.withdraw("p1", batch="2") == 0, "a second time changes nothing"
    assert project.events()[-1].content["reason"] == "错了"
    assert [one.prompt for one in project.items()] == ["一", "二", "三"]
    assert project.next_item("p2") is None
    assert project.is_over()
    assert project.progress("p2")["left"] == 0
    assert [one.item.prompt for one in project.labels()] == ["一", "二", "三"]
    found = project_statistics(project)
    assert (found["labels"], found["left_out"]["withdrawn"]) == (3, 1)
    result = export_project(project)
    assert result.manifest["left_out"] == {"withdrawn items": 1}
    assert len(result.files["items.jsonl"].splitlines()) == 3
    kept = export_project(project, ExportOptions(withdrawn="keep"))
    assert (kept.manifest["left_out"], len(kept.files["items.jsonl"].splitlines())) == ({}, 5)
    project.close()
    with Project.open(project.folder) as again:
        assert len(again.withdrawn()) == 2
        assert again.withdraw("p1", batch="2 wrong.jsonl", back=True) == 2
        assert [one.item.prompt for one in again.labels()] == ["一", "二", "三", "四"]
        assert left(again) == ["五"]


def test_an_item_that_somebody_holds_is_withdrawn(project):
    held = project.next_item("p2")
    project.save_draft("p2", held.item.item_id, {"answer": PAIR})
    assert project.withdraw("p1", items=[held.item.item_id]) == 1
    with pytest.raises(NotHeldError, match="the owner has withdrawn this item") as caught:
        project.label("p2", held.item.item_id, PAIR, nonce="n", seconds=1)
    assert caught.value.code == "withdrawn"
    assert project.next_item("p2").item.prompt == "二"
    project.withdraw("p1", items=[held.item.item_id], back=True)
    assert left(project) == ["二", "一", "三", "四", "五"]


def test_what_was_labelled_and_withdrawn_is_not_given_back_by_undo(project):
    event = send(project, "p2", PAIR)
    project.withdraw("p1", items=[event.content["item"]])
    assert project.undo("p2", "u")[1].item.prompt == "二"
    with pytest.raises(NotHeldError, match="the owner has withdrawn its item"):
        project.redo("p2", "r")
    project.withdraw("p1", items=[event.content["item"]], back=True)
    project.redo("p2", "r")
    assert [one.item.prompt for one in project.labels()] == ["一"]


def test_hidden_repeats_screening_and_held_out_people_leave_withdrawn_items_out(tmp_path, item):
    settings = ProjectSettings(overlap=0, repeats=0.5, screening_items=2)
    with Project.create(tmp_path / "p", settings) as project:
        screening = [item("rating", f"筛 {i}", "x", screening=True) for i in range(3)]
        project.add_items([*screening, *(item("pair", f"问 {i}", "a", "b") for i in range(40))])
        project.add_person("新人", "annotator")
        late = project.add_person("评测", "annotator", "held-out").person_id
        project.withdraw("p1", items=[screening[0].item_id])
        assert project.next_item("p2").item.prompt == "筛 1"
        project.set_person("p2", standing="active")
        for _ in range(15):
            send(project, "p2", PAIR)
        gone = [one.item.item_id for one in project.labels()]
        project.withdraw("p1", items=gone)
        count = len(project.items()) - 2
        assert len(left(project, late)) - sum(one.event.content["repeat"] for one in project.labels()) == count
        before = len(project.events())
        left(project)
        again = {one.content["item"] for one in project.events(before) if one.kind == "label"}
        assert again & {*gone} == set()


def test_an_item_that_was_withdrawn_is_not_imported_again(project, tmp_path):
    project.withdraw(None, batch="2")
    added = add(project, read_items(write(tmp_path / "again.jsonl", "四")), with_labels=True)
    assert (added["items"], added["labels"]) == (0, 1)
    assert len(project.batches()) == 2, "an import that added nothing is no batch"
    assert project.labels() == []
    assert len(project.labels(also_withdrawn=True)) == 1


def test_the_command(project, capsys):
    folder = str(project.folder)
    single = project.items()[0].item_id
    project.close()
    assert main(["label", "withdraw", folder]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == ["2 wrong.jsonl", "1 好.jsonl"]
    assert said[0].endswith("  2 items, 0 labels")
    assert main(["label", "withdraw", folder, "--batch", "2", "--reason", "错了"]) == 0
    assert main(["label", "withdraw", folder, "--items", single]) == 0
    assert main(["label", "withdraw", folder, "--batch", "2", "--back"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 items withdrawn; labels are kept.",
        "1 item withdrawn; labels are kept.",
        "2 items put back; labels are kept.",
    ]
    assert main(["label", "withdraw", folder, "--batch", "9"]) == 2
    assert "there is no import '9' in this project; it has 1 好.jsonl, 2 wrong.jsonl" in capsys.readouterr().err
    assert main(["label", "withdraw", folder, "--items", "x"]) == 2
    assert "there is no item 'x'" in capsys.readouterr().err
    assert main(["label", "withdraw", folder, "--back"]) == 2
