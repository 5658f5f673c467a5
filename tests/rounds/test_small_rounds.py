"""Rounds of a few prompts or labels: they say what is missing before it is too late, or which setting to change."""

import json

import pytest

from heedful import ConfigError, DataError, Prompt
from heedful.configs.label import ProjectSettings
from heedful.configs.rounds import RoundConfig
from heedful.data import split_by_prompt
from heedful.label import Candidate, Item, Project, item_id
from heedful.rounds.round import TRAIN, RoundNotes, read_round, run_round, write_labels, write_state

TRAINED, HELD_OUT = split_by_prompt([Prompt(f"第{i}题\u2028🦊", f"题:{i}") for i in range(40)], 0.4)


def label(project, person, prompt, preferred=0):
    answers = (Candidate("喵"), Candidate("汪"))
    item = Item(item_id("pair", prompt.prompt, answers), "pair", prompt.prompt, answers)
    project.add_items([item])
    project.add_labels(
        person, [(item.item_id, {"preferred": preferred, "strength": None, "both_bad": preferred is None})]
    )
    return item.item_id


@pytest.fixture
def begun(tmp_path, written):
    """``begun(prompts, preferred, patience)`` is a round's settings; its pairs about these prompts are labelled."""

    def begin(prompts, preferred=0, reward="batch_size: 1\n"):
        (tmp_path / "评分.yaml").write_text(reward, encoding="utf-8")
        config = RoundConfig(
            project=tmp_path / "项目",
            policy="没有这个模型",
            prompts=str(written("题.jsonl", [{"prompt": one.prompt} for one in TRAINED + HELD_OUT])),
            eval_fraction=0.4,
            reward_config=tmp_path / "评分.yaml",
        )
        with Project.create(config.project, ProjectSettings(name="项目")) as project:
            person = project.add_person("甲", "annotator").person_id
            items = [label(project, person, prompt, preferred) for prompt in prompts]
        settings = {
            name: str(value) if name == "reward_config" else value
            for name, value in vars(config).items()
            if name != "project"
        }
        settings["judge"] = []
        write_state(config.project, 1, settings)
        folder = config.project / "rounds" / "1"
        folder.mkdir(parents=True)
        RoundNotes(folder, 1, settings, config.policy, {"sample": {"asked": len(items), "items": items}}).write()
        return config

    return begin


def test_too_few_prompts_are_refused_before_anything_is_asked(heedful, written, tmp_path):
    """Later the round would end at a step that needs held-out prompts, and its eval fraction could not be changed."""
    assert heedful("label", "new", tmp_path / "项目", "--name", "项目", "--seed", "0").status == 0
    file = written("题.jsonl", [{"prompt": one.prompt} for one in TRAINED[:3]])
    outcome = heedful("round", tmp_path / "项目", "--policy", "没有", "--prompts", file, "--eval-fraction", "0.4")
    assert outcome.status == 2
    assert f"{file}: of 3 prompts --eval-fraction 0.4 holds out 0" in outcome.message
    assert "give more prompts, or another --eval-fraction" in outcome.message
    assert not (tmp_path / "项目" / "rounds.json").exists()


@pytest.mark.parametrize(
    ("prompts", "preferred", "said"),
    [(HELD_OUT[:2], 0, "(2 about held-out prompts)"), (TRAINED[:2], None, "(2 ties)")],
)
def test_labels_that_leave_nothing_to_train_on(begun, prompts, preferred, said):
    config = begun(prompts, preferred)
    with pytest.raises(DataError) as caught:
        run_round(config)
    assert f"there are no labels to train on {said}; add pairs of answers to other prompts" in str(caught.value)
    with Project.open(config.project) as project:
        label(project, "p2", TRAINED[-1])
    with pytest.raises(Exception, match="没有这个模型"):  # as it says: with a label more, the reward model is next
        run_round(config)
    assert (config.project / "rounds/1/labels" / TRAIN).read_bytes().count(b"\n") == 1


def test_patience_without_held_out_labels(begun, tmp_path):
    """Which advised to set what the round sets anyway."""
    config = begun(TRAINED[:2], reward="early_stopping_patience: 2\neval_every: 1\n")
    with pytest.raises(ConfigError) as caught:
        run_round(config)
    assert str(tmp_path / "评分.yaml") in str(caught.value)
    assert "none of the 2 labels so far belongs to a held-out prompt; remove it for this round" in str(caught.value)


def test_a_reward_model_that_wants_more_labels_than_there_are(heedful, begun, tiny, tmp_path):
    """The message says where its setting is; another file may be given, and stays for the rounds to come."""
    config = begun(TRAINED[:2], reward="batch_size: 32\n")
    state = config.project / "rounds.json"
    for file in (state, config.project / "rounds/1/round.json"):
        file.write_text(file.read_text("utf-8").replace("没有这个模型", tiny("gpt2")), encoding="utf-8")
    outcome = heedful("round", config.project)
    assert outcome.status == 2
    assert "a step learns 32 pairs (--batch-size); there are 2 pairs to train on" in outcome.message
    assert "in a round, heedful reward reads its settings from --reward-config" in outcome.message
    other = tmp_path / "另一份.yaml"
    other.write_text("early_stopping_patience: 1\neval_every: 1\n", encoding="utf-8")
    outcome = heedful("round", config.project, "--reward-config", other)
    assert f"{other}: early_stopping_patience counts evaluations" in outcome.message
    assert f"{other}: early_stopping_patience counts evaluations" in heedful("round", config.project).message
    assert json.loads(state.read_text("utf-8"))["settings"]["reward_config"] == str(other)
    assert read_round(config.project, 1).settings["reward_config"] == str(other)


def test_the_counts_of_a_round_are_those_of_its_labels(begun):
    """Also if the call was killed between the two, and more was labelled before the next."""
    config = begun(TRAINED[:3], reward="early_stopping_patience: 2\n")
    numbers = {"labels": 3, "pairs": 3, "statistics": {"一": 1}}
    with Project.open(config.project) as project:
        write_labels(config, project.snapshot(), config.project / "rounds" / "1" / "labels", numbers)
        person = project.add_person("乙", "annotator").person_id
        label(project, person, TRAINED[0], preferred=1)
    with pytest.raises(ConfigError, match="early_stopping_patience"):
        run_round(config)
    noted = read_round(config.project, 1).steps["label"]
    assert {name: noted[name] for name in numbers} == numbers
    assert (config.project / "rounds/1/labels" / TRAIN).read_bytes().count(b"\n") == 3


def test_what_is_labelled_while_a_round_reads_is_of_the_next(begun):
    """Its labels are those up to the event that it notes, after which everybody may still take back theirs."""
    config = begun(TRAINED[:2])
    with Project.open(config.project) as project:
        now = project.snapshot()
        label(project, "p2", TRAINED[5])
    folder = config.project / "rounds" / "1" / "labels"
    write_labels(config, now, folder, {})
    assert (folder / TRAIN).read_bytes().count(b"\n") == 2
    assert (folder / "events.jsonl").read_bytes().count(b"\n") == len(now.events)


@pytest.mark.parametrize("standing", ["held-out", "refused"])
def test_labels_of_people_who_are_not_trained_on_do_not_count(begun, standing):
    """Also of somebody who was refused after labelling. Their pair is asked again, so that the round gets on."""
    config = begun(TRAINED[:1], reward="early_stopping_patience: 2\n")
    with Project.open(config.project) as project:
        person = next(one.person_id for one in project.people() if one.name == "甲")
        project.set_person(person, standing=standing)
        said = []
        other = project.add_person("乙", "annotator").person_id
        item = project.next_item(other).item
    assert run_round(config, said.append).step == "label"
    assert "0 of 1 pairs are labelled, 1 are needed" in said[-1]
    with Project.open(config.project) as project:
        project.add_labels(other, [(item.item_id, {"preferred": 0, "strength": None, "both_bad": False})])
    with pytest.raises(ConfigError, match="early_stopping_patience"):  # the next step
        run_round(config, said.append)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"sample": {"asked": 1}}, "items of the step sample must be a list of strings"),
        ({"sample": {"items": [["丙"]]}}, "items of the step sample must be a list of strings"),
        (
            {"sample": {"items": []}, "label": {}, "reward": {"models": "丙"}},
            "models of the step reward must be a list",
        ),
        (
            {"sample": {"items": []}, "label": {}, "reward": {"models": []}, "ppo": {}},
            "model of the step ppo must be a string",
        ),
        ({"label": {"pairs": 1}}, "step sample is missing, but a later one is there"),
    ],
)
def test_notes_that_lack_what_later_steps_read_are_named(heedful, begun, steps, said):
    config = begun(TRAINED[:1])
    path = config.project / "rounds" / "1" / "round.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"steps": steps}), encoding="utf-8")
    outcome = heedful("round", config.project)
    assert outcome.status == 2
    assert f"{path}: {said}" in outcome.message
    assert "restore it, or remove it to begin its round again" in outcome.message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("丁", 1, "丁 is not a setting of heedful round"),
        ("judge", 3, "--judge must be a text, got 3"),
        ("judge", ["rule:digits", None], "--judge must be a text, got None"),
        ("policy", ["m"], "--policy must be a text, got ['m']"),
        ("prompts", None, "--prompts must be a text, got None"),
        ("reward_config", True, "--reward-config must be a path or none, got True"),
        ("labels", "三", "--labels must be a whole number, got '三'"),
        ("labels", True, "--labels must be a whole number, got True"),
        ("pool", {}, "--pool must be a number, got {}"),
        ("ask_held_out", "yes", "--ask-held-out must be true or false, got 'yes'"),
        ("margin", "huge", "--margin must be one of none, small, large, got 'huge'"),
        ("response_length", "drawn", "--response-length must be one of stop, fixed, got 'drawn'"),
        ("labels", 0, "--labels must be greater than 0, got 0"),
    ],
)
def test_a_setting_that_no_round_can_have_is_named(heedful, begun, name, value, said):
    config = begun(TRAINED[:1])
    path = config.project / "rounds.json"
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(content | {"settings": {**content["settings"], name: value}}), encoding="utf-8")
    outcome = heedful("round", config.project)
    assert outcome.status == 2
    assert f"{path}: {said}" in outcome.message
    assert "; restore it, or remove it to begin its round again" in outcome.message
