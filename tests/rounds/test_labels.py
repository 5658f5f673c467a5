"""With which labels a round goes on, and what it says of labels, settings and files with which it cannot."""

import json
import shutil

import pytest

from heedful import Prompt, faults
from heedful.apps.label import Candidate, Item, Project, item_id
from heedful.data import split_by_prompt


@pytest.fixture
def asked(waiting, tmp_path):
    """A project whose round waits for labels, and its pairs: those to train on, and those of held-out prompts."""
    project = shutil.copytree(waiting[0], tmp_path / "项目")
    with Project.open(project, read_only=True) as opened:
        items = opened.items()
    parts = split_by_prompt([Prompt(item.prompt, item.item_id) for item in items], 0.4)
    return project, *([prompt.source for prompt in part] for part in parts)


@pytest.fixture
def patient(written):
    """Settings of a reward model that needs held-out labels: the first step after the labels that can end a round."""
    return written("耐心.yaml", "early_stopping_patience: 2\neval_every: 1\nbatch_size: 1\n")


def label(project, items, preferred=0, name="甲"):
    """Somebody's labels of pairs."""
    answer = {"preferred": preferred, "strength": None, "both_bad": preferred is None}
    with Project.open(project) as opened:
        known = {person.name: person.person_id for person in opened.people()}
        person = known.get(name) or opened.add_person(name, "annotator").person_id
        opened.add_labels(person, [(item, answer) for item in items])
    return person


def another_pair(project):
    answers = (Candidate("喵"), Candidate("汪\u2028"))
    item = Item(item_id("pair", "别的🦊", answers), "pair", "别的🦊", answers)
    with Project.open(project) as opened:
        opened.add_items([item])
    return item.item_id


def noted(project):
    return json.loads((project / "rounds" / "1" / "round.json").read_text("utf-8"))


@pytest.mark.parametrize("preferred", [0, None])
def test_labels_that_leave_nothing_to_train_on(heedful, asked, written, preferred):
    project, train, held_out = asked
    label(project, held_out if preferred == 0 else train, preferred)
    outcome = heedful("round", project, "--enough", "0.1")
    why = f"{len(held_out)} about held-out prompts" if preferred == 0 else f"{len(train)} ties"
    assert outcome.status == 2
    assert f"there are no labels to train on ({why}); add pairs of answers to other prompts" in outcome.message
    label(project, [another_pair(project)])
    outcome = heedful("round", project, "--enough", "0.1", "--reward-config", written("多.yaml", "batch_size: 32\n"))
    assert "there is 1 pair to train on" in outcome.message, "as it says: the reward model is next"
    assert (project / "rounds/1/labels/preferences.train.jsonl").read_bytes().count(b"\n") == 1


def test_settings_of_a_reward_model_that_the_labels_do_not_allow(heedful, asked, written, patient):
    """The message says where the setting is; another file may be given, and stays for the rounds to come."""
    project, train, _ = asked
    label(project, train[:2])
    outcome = heedful("round", project, "--enough", "0.3", "--reward-config", written("多.yaml", "batch_size: 32\n"))
    assert outcome.status == 2
    assert "a step learns 32 pairs (--batch-size); there are 2 pairs to train on" in outcome.message
    assert "in a round, heedful reward reads its settings from --reward-config" in outcome.message
    for flags in (["--reward-config", patient], []):
        outcome = heedful("round", project, *flags)
        said = (
            f"{patient}: early_stopping_patience counts evaluations on held-out labels, and none of the 2 labels so far"
        )
        assert said in outcome.message
    assert noted(project)["settings"]["reward_config"] == patient


def test_a_kill_between_the_labels_and_their_note(heedful, asked, patient):
    """What was labelled after it is of the next round: the counts are those of the files, and undo does not reach them."""
    project, train, _ = asked
    label(project, train[:3])
    faults.plan("round.step:raise")
    with pytest.raises(RuntimeError, match="a fault point"):
        heedful("round", project, "--enough", "0.5")
    faults.plan("")
    assert "label" not in noted(project)["steps"]
    label(project, train, preferred=1, name="乙")
    assert "early_stopping_patience" in heedful("round", project, "--reward-config", patient).message
    step, folder = noted(project)["steps"]["label"], project / "rounds" / "1" / "labels"
    assert (step["labels"], step["pairs"]) == (3, 3)
    assert (folder / "preferences.train.jsonl").read_bytes().count(b"\n") == 3
    assert (folder / "events.jsonl").read_bytes().count(b"\n") == step["events"]


@pytest.mark.parametrize("standing", ["held-out", "refused"])
def test_labels_of_people_who_are_not_trained_on_do_not_count(heedful, asked, patient, standing):
    """Also of somebody who was refused after labelling. Their pairs are asked again, so that the round gets on."""
    project, train, _ = asked
    person = label(project, train[:3])
    with Project.open(project) as opened:
        opened.set_person(person, standing=standing)
        other = opened.add_person("乙", "annotator").person_id
        assert opened.next_item(other).item
    assert "0 of 6 pairs are labelled, 3 are needed" in heedful("round", project, "--enough", "0.5").out
    label(project, train[:3], name="乙")
    outcome = heedful("round", project, "--enough", "0.5", "--reward-config", patient)
    assert "early_stopping_patience" in outcome.message, "the next step"


def test_skipped_pairs_need_not_hold_a_round_up(heedful, asked, patient):
    project, train, held_out = asked
    with Project.open(project) as opened:
        person = opened.add_person("甲", "annotator").person_id
        for number in range(2):
            opened.skip(person, opened.next_item(person).item.item_id, "看不懂", (), f"n{number}")
        # what a server's policy writes meanwhile is not of the round
        opened.add_items([Item("0" * 20, "pair", "别的", (Candidate("甲"), Candidate("乙")), chosen_by="random")])
        skipped = {event.content["item"] for event in opened.events() if event.kind == "skip"}
    label(project, [item for item in [*train, *held_out] if item not in skipped], name="乙")
    said = "4 of 6 pairs are labelled, 6 are needed (2 were skipped; --enough continues without them)"
    assert said in heedful("round", project).out
    assert said.replace("6 are", "5 are") in heedful("round", project, "--enough", "0.9").out


def change(project, **content):
    path = project / "rounds" / "1" / "round.json"
    path.write_text(json.dumps(noted(project) | content, ensure_ascii=False), encoding="utf-8")
    return path


def test_notes_that_no_round_can_have_are_named(heedful, asked):
    """A setting, and what later steps read."""
    project, settings = asked[0], noted(asked[0])["settings"]
    for content, said in (
        ({"settings": settings | {"丁": 1}}, "丁"),
        ({"settings": settings | {"judge": ["rule:digits", None]}}, "--judge must be a text, got None"),
        ({"settings": settings | {"policy": ["m"]}}, "--policy must be a text, got ['m']"),
        ({"settings": settings | {"reward_config": True}}, "--reward-config must be a path or none, got True"),
        ({"settings": settings | {"labels": 0}}, "--labels must be greater than 0, got 0"),
        *(({"settings": settings, "steps": {"sample": one}}, "") for one in ({"asked": 1}, {"items": [["丙"]]}, "丙")),
    ):
        path = change(project, **content)
        outcome = heedful("round", project)
        assert outcome.status == 2
        assert f"{path}: " in outcome.message
        assert said in outcome.message
        assert "; restore it, or remove it to begin its round again" in outcome.message


def test_answers_that_are_damaged_are_named(heedful, asked):
    change(asked[0], steps={})
    path = asked[0] / "rounds" / "1" / "answers.jsonl"
    for content in (b"{", b'{"prompt": "x"}\n', b"\xff\n", b"[]\n", None):
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        outcome = heedful("round", asked[0])
        assert outcome.status == 2
        assert f"{path} is damaged" in outcome.message
        assert "restore it, or remove it to sample the round's answers again" in outcome.message


def test_a_round_whose_notes_are_gone_begins_again_with_what_is_there(heedful, asked, words):
    """As its remedy says: the answers and the pairs are those that people have been labelling."""
    project, train, _ = asked
    label(project, train[:1])
    before, answers = noted(project), project / "rounds" / "1" / "answers.jsonl"
    content = answers.read_bytes()
    (project / "rounds" / "1" / "round.json").unlink()
    assert "1 of 6 pairs are labelled" in heedful("round", project, *words).out
    assert answers.read_bytes() == content
    assert sorted(noted(project)["steps"]["sample"]["items"]) == sorted(before["steps"]["sample"]["items"])


def test_a_settings_file_that_was_read_may_be_replaced_for_later_rounds(heedful, asked, patient):
    change(asked[0], steps={**noted(asked[0])["steps"], "label": {}, "reward": {"models": []}})
    outcome = heedful("round", asked[0], "--reward-config", patient)
    assert "rounds/1/reward-1/final" in outcome.message, "the next step, which lacks its reward models here"
    assert noted(asked[0])["settings"]["reward_config"] == patient
