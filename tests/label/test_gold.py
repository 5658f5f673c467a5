"""Gold questions: in everybody's whole work, told to nobody, counted by themselves, trained on only if that is asked."""

import itertools

import pytest

from heedful import DataError
from heedful.apps.label import ExportOptions, ImportOptions, Project, export_project, project_statistics
from heedful.apps.label.importing import add, read_items_text
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from jsonl import lines
from labelling import send
from refusals import refused

RIGHT = {"preferred": 0, "strength": 3, "both_bad": False}
WRONG = {"preferred": 1, "strength": 3, "both_bad": False}


def gold_file(count):
    return lines({"prompt": f"质检 {i}", "chosen": "对 😀", "rejected": "错"} for i in range(count))


@pytest.fixture
def make(memory, item):
    """``make(work, gold, **settings)`` is a project with so many pairs and gold questions, in memory or in a ``folder``."""

    def project(work, questions, folder=None, **settings):
        options = {"overlap": 0, "repeats": 0, "gold": 0.1, "seed": 7, **settings}
        made = Project.create(folder, ProjectSettings(**options)) if folder else memory(**options).project
        made.add_items([item("pair", f"问 {i}", "对 😀", "错") for i in range(work)])
        if questions:
            add(made, read_items_text(gold_file(questions), options=ImportOptions(gold=True)))
        made.add_person("张伟", "annotator")
        return made

    return project


def work_through(project, person="p2", answer=lambda _: RIGHT, most=10_000):
    """Label what a person is given; return for each whether it was a gold question."""
    given = []
    while len(given) < most and (held := project.next_item(person)) is not None:
        send(project, person, answer(held.item))
        given.append(held.item.gold is not None)
    return given


def test_they_are_spread_over_a_persons_whole_work(make):
    """20 among 200: each comes once, none after the rest, and no quarter of the work is without them."""
    given = work_through(make(200, 20))
    places = [at for at, is_gold in enumerate(given) if is_gold]
    assert (len(given), len(places)) == (220, 20)
    quarters = [sum(55 * q <= at < 55 * (q + 1) for at in places) for q in range(4)]
    assert min(quarters) >= 2, quarters


def test_few_questions_last_for_the_whole_work_and_the_share_is_the_most(make):
    """Five among 200 are not used up at the beginning, though the share would allow 20."""
    places = [at for at, is_gold in enumerate(work_through(make(200, 5))) if is_gold]
    assert (len(places), max(places) > 100) == (5, True)
    given = work_through(make(200, 200, gold=0.05))
    assert 0.02 < sum(given) / len(given) < 0.09
    assert len(given) - sum(given) == 200
    assert sum(work_through(make(50, 20, gold=0))) == 0


def test_everybody_gets_them_and_the_work_is_shared(make):
    project = make(120, 12)
    added = [project.add_person(name, "annotator", standing) for name, standing in (("Ada", None), ("评", "held-out"))]
    counts = dict.fromkeys(["p2", *(one.person_id for one in added)], 0)
    while any(found := {one: work_through(project, one, most=1) for one in counts}.values()):  # in turn
        for one, given in zip(counts, found, strict=True):
            counts[one] += sum(given)
    assert all(5 <= count <= 12 for count in counts.values()), counts
    work = [one for one in project.labels() if one.item.gold is None and one.person.standing == "active"]
    assert len(work) == 120


def test_what_the_page_counts_does_not_tell(make):
    """With every label one more is done and one fewer is left, whatever it was."""
    project = make(60, 6)
    seen = [project.progress("p2")]
    while send(project, "p2", RIGHT):
        seen.append(project.progress("p2"))
    assert {(b["done"] - a["done"], b["own"] - a["own"]) for a, b in itertools.pairwise(seen)} == {(1, 1)}
    assert len({one["done"] + one["left"] for one in seen[:-1]}) == 1
    assert seen[-1]["left"] == 0


def test_accuracy_by_person_and_nothing_else_is_mixed_with_it(make, tmp_path, capsys):
    project = make(40, 8, tmp_path / "p", gold=0.4)
    wrong = [one.item_id for one in project.items() if one.gold is not None][:2]
    work_through(project, answer=lambda one: WRONG if one.item_id in wrong else RIGHT)
    asked = [one for one in project.labels() if one.item.gold is not None]
    expected = 1 - sum(one.item.item_id in wrong for one in asked) / len(asked)
    found = project_statistics(project)
    project.close()
    (person,) = (one for one in found["people"] if one["person"] == "p2")
    assert found["gold"]["value"] == person["gold"]["value"] == expected < 1
    assert (person["gold"]["count"], person["gold"]["low"] < expected < person["gold"]["high"]) == (len(asked), True)
    assert (found["labels"], found["left_out"]["gold"]) == (40, len(asked))
    assert main(["label", "stats", str(project.folder)]) == 0
    assert f"Gold questions answered correctly: {100 * expected:.1f} %" in capsys.readouterr().out


def test_exported_only_if_asked_and_imported_again_as_gold(make, tmp_path):
    project = make(20, 5, gold=0.5)
    asked = sum(work_through(project))
    result = export_project(project)
    assert asked > 0
    assert result.manifest["left_out"] == {"gold questions": asked}
    assert sum(len(text.splitlines()) for name, text in result.files.items() if name.startswith("pref")) == 20
    assert export_project(project, ExportOptions(gold="keep")).manifest["left_out"] == {}
    with Project.create(tmp_path / "again", ProjectSettings(gold=0.5)) as again:
        add(again, read_items_text(result.files["items.jsonl"].decode()))
        assert [one.gold for one in again.items()] == [one.gold for one in project.items()]


def test_undo_gives_the_same_question_again(make):
    project = make(10, 10, gold=0.5)
    while (held := project.next_item("p2")).item.gold is None:
        send(project, "p2", RIGHT)
    send(project, "p2", RIGHT)
    assert project.undo("p2", "u")[1].item == held.item


def test_records_that_are_no_gold_questions(make):
    for record, fragment in (
        ({"prompt": "问", "responses": ["a", "b"]}, "a gold question without its answer"),
        ({"prompt": "问"}, "a gold question without its answer"),
        ({"prompt": "问", "completion": "x", "rating": 9}, "`rating` is 9"),
    ):
        with refused(DataError, fragment):
            read_items_text(lines([record]), options=ImportOptions(gold=True))
    project = make(1, 0)
    with pytest.raises(DataError, match="already in the project and is not a gold question"):
        add(project, read_items_text(gold_file(1).replace("质检 0", "问 0"), options=ImportOptions(gold=True)))


def test_the_command(tmp_path, capsys):
    folder, path = str(tmp_path / "p"), tmp_path / "gold.jsonl"
    path.write_text(gold_file(3), encoding="utf-8")
    assert main(["label", "new", folder, "--gold", "0.2"]) == 0
    assert main(["label", "import", folder, "--data", str(path), "--gold"]) == 0
    with Project.open(folder) as project:
        assert [one.gold for one in project.items()] == [{"preferred": 0, "strength": None, "both_bad": False}] * 3
        assert project.next_item("p1") is None, "there is no other work"
    assert main(["label", "import", folder, "--data", str(path), "--gold", "--with-labels"]) == 2
    assert "--gold and --with-labels are both given" in " ".join(capsys.readouterr().err.replace("│", " ").split())
