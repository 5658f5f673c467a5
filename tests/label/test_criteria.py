"""Criteria of a project: what people say about each answer besides which is better."""

import json

import pytest

from heedful import ConfigError, DataError
from heedful.apps.label import Project, export_project, project_statistics
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from labelling import send
from refusals import refused

HELPFUL = "{name: helpful, scale: 5, question: 'Does it help?'}"
HONEST = "{name: 诚实, labels: [no, 部分, 是], required: false}"
PAIR = {"preferred": 0, "strength": 3, "both_bad": False}


@pytest.fixture
def project(new_project):
    return new_project(criteria=(HELPFUL, HONEST))


def test_a_project_is_made_with_criteria_and_reads_them_back(tmp_path):
    folder = tmp_path / "项目"
    assert main(["label", "new", str(folder), "--criteria", HELPFUL, HONEST, "--overlap", "0"]) == 0
    text = (folder / "project.yaml").read_text(encoding="utf-8")
    assert "- name: 诚实\n  labels:\n  - 'no'\n  - 部分\n  - 是\n  required: false\n" in text
    with Project.open(folder) as project:
        helpful, honest = project.settings.criteria_asked
        said = (helpful.name, helpful.values, helpful.question, helpful.required)
        assert said == ("helpful", (1, 2, 3, 4, 5), "Does it help?", True)
        assert (honest.name, honest.values, honest.required) == ("诚实", ("no", "部分", "是"), False)
        again = project.settings
    by_hand = f"{text[: text.index('criteria:')]}criteria: [{HELPFUL}, {HONEST}]\n"
    (folder / "project.yaml").write_text(by_hand, encoding="utf-8")
    with Project.open(folder) as project:
        assert project.settings == again


WRONG = [
    ("[{name: a}]", "needs either scale or labels"),
    ("[{name: a, scale: 1}]", "scale must be a whole number from 2 to 10, got '1'"),
    ("[{name: a, scale: 5, labels: [x, y]}]", "needs either scale or labels"),
    ("[{name: a, labels: [x]}]", "labels must be a list of 2 to 10 labels"),
    ("[{name: a, labels: [x, x]}]", "has the same label twice"),
    ("[{name: a, labels: [x, [y]]}]", "labels must be a text of 1 to 60 characters on one line"),
    ("[{name: '', scale: 5}]", "name must be a text of 1 to 60 characters on one line, got ''"),
    ("[{name: a, scale: 5, weight: 2}]", "has the key 'weight'; a criterion has name, scale, labels"),
    ("[{name: a, scale: 5, required: maybe}]", "required must be true or false, got 'maybe'"),
    ("[{name: 好, scale: 5}, {name: 好, scale: 3}]", "--criteria has '好' twice"),
    ("[helpful]", "is no mapping; write {name: helpful, scale: 5"),
    ("[{name: a, scale: !!python/tuple [5]}]", "scale must be a whole number"),
    ("[{[a]: b}]", "nested"),
]


def test_criteria_that_cannot_be(tmp_path):
    for text, fragment in WRONG:
        (tmp_path / "project.yaml").write_text(f"name: 猫\noverlap: 0\ncriteria: {text}\n", encoding="utf-8")
        with refused(ConfigError, "project.yaml:3: ", fragment):
            Project.open(tmp_path)


SAID = [
    (None, "criteria must be a list of 2 objects"),
    ([{"helpful": 4}], "criteria must be a list of 2 objects"),
    ([{"helpful": 4}, {}], "criteria lacks 'helpful' for an answer; each answer needs helpful"),
    ([{"helpful": 4}, {"helpful": 6}], "the criterion helpful must be one of 1, 2, 3, 4, 5, got 6"),
    ([{"helpful": 4}, {"helpful": True}], "the criterion helpful must be one of 1, 2, 3, 4, 5, got True"),
    ([{"helpful": 4}, {"helpful": 1, "诚实": 1}], "the criterion 诚实 must be one of no, 部分, 是, got 1"),
    ([{"helpful": 4}, {"helpful": 1, "honest": "是"}], "there is no criterion 'honest'; the project has helpful, 诚实"),
]


def test_what_is_said_is_checked(project, item, tmp_path):
    """Imported labels need none; a project without criteria takes none."""
    project.add_items([item("pair", "问", "甲", "乙")])
    for criteria, fragment in SAID:
        answer = PAIR if criteria is None else {**PAIR, "criteria": criteria}
        with refused(DataError, fragment):
            send(project, "p2", answer)
    assert project.labels() == []
    project.add_labels("p3", [(project.items()[0].item_id, PAIR)])
    assert "criteria" not in project.labels()[0].event.content["answer"]
    with Project.create(tmp_path / "without", ProjectSettings(overlap=0)) as other:
        other.add_items([item("pair", "问", "甲", "乙")])
        with pytest.raises(DataError, match="has no field 'criteria'"):
            send(other, "p1", {**PAIR, "criteria": [{}, {}]})


def test_criteria_follow_their_answers_from_the_screen_to_the_export(project, item):
    """Given by place on the screen, kept by candidate, exported beside the answer; the undone label comes back as it was."""
    project.add_items(
        [item("pair", "问 1", "甲", "乙"), item("ranking", "问 2", "a", "b", "c"), item("rating", "问 3", "x")]
    )
    held = project.next_item("p2")
    by_place = [{"helpful": 5, "诚实": "是"}, {"helpful": 2}]
    answer = {"preferred": 0, "strength": 3, "both_bad": False, "criteria": by_place}
    project.label("p2", held.item.item_id, answer, nonce="1", seconds=1, token=held.token)
    assert project.undo("p2", "2")[1].draft["answer"] == answer
    held = project.next_item("p2")
    project.label("p2", held.item.item_id, answer, nonce="3", seconds=1, token=held.token)
    (label,) = project.labels()
    assert [label.event.content["answer"]["criteria"][at] for at in held.order] == by_place
    send(project, "p2", {"ranks": [2, 1, 2], "criteria": [{"helpful": n} for n in (2, 5, 1)]})
    send(project, "p2", {"rating": 6, "flags": [], "criteria": [{"helpful": 4, "诚实": "no"}]})
    files = export_project(project).files
    records = {
        name: [json.loads(line) for line in content.decode().splitlines()]
        for name, content in files.items()
        if name not in ("events.jsonl", "items.jsonl")
    }
    both = [one for name, some in records.items() if name.startswith("preferences.") for one in some]
    pair = next(one for one in both if "chosen" in one)
    assert (pair["chosen_criteria"], pair["rejected_criteria"]) == tuple(by_place)
    assert pair["chosen"] == held.item.candidates[held.order[0]].response
    ranking = next(one for one in both if "ranks" in one)
    assert ranking["criteria"] == [{"helpful": n} for n in (2, 5, 1)]
    of_ranking = [
        (one["chosen"], one["chosen_criteria"], one["rejected"], one["rejected_criteria"])
        for name, some in records.items()
        if name.startswith("pairs.")
        for one in some
        if one["prompt"] == "问 2"
    ]
    assert of_ranking == [("b", {"helpful": 5}, "a", {"helpful": 2}), ("b", {"helpful": 5}, "c", {"helpful": 1})]
    assert records["ratings.jsonl"][0]["completion_criteria"] == {"helpful": 4, "诚实": "no"}


def test_statistics_by_criterion(project, item, capsys):
    """Two people, two pairs: helpful is said 5 5, 4 2, 1 1 and 3 3, so three of four answers are equal."""
    project.add_items([item("pair", f"问 {i}", "甲", "乙", needed=2) for i in range(2)])
    for person, values in (("p2", ((5, 4), (1, 3))), ("p3", ((5, 2), (1, 3)))):
        for first, second in values:
            criteria = [{"helpful": first, "诚实": "是"}, {"helpful": second}]
            send(project, person, {**PAIR, "criteria": criteria})
    found = project_statistics(project)["criteria"]
    assert list(found) == ["helpful", "诚实"]
    helpful, honest = found["helpful"], found["诚实"]
    assert (helpful["answers"], helpful["mean"]) == (8, 3.0)
    assert helpful["counts"] == {"1": 2, "2": 1, "3": 2, "4": 1, "5": 2}
    assert (helpful["agreement"]["value"], helpful["agreement"]["count"]) == (0.75, 4)
    assert helpful["alpha_interval"] == pytest.approx(1 - 8 / (288 / 7)), "observed over expected squared differences"
    assert (honest["answers"], honest["mean"], honest["counts"]) == (4, None, {"no": 0, "部分": 0, "是": 4})
    assert main(["label", "stats", str(project.folder)]) == 0
    said = capsys.readouterr().out
    assert "Criterion helpful: mean 3.00 of 8 answers; agreement 75.0 %" in said
    assert "Criterion 诚实: no 0, 部分 0, 是 4 of 4 answers; agreement 100.0 %" in said
