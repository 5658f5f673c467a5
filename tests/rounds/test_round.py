"""`heedful round`: two rounds with simulated labellers, what is written, waiting, resuming after kills, refusals."""

import hashlib
import json
import os
import shutil

import pytest

from cases import often
from heedful.apps.label import Project
from heedful.apps.label.rounds_page import rounds_of
from heedful.apps.rounds.round import verdict
from small_rounds import made, quietly

SIMULATED = (
    "--rewards",
    "rule:length:1-2",
    "--scale",
    "0.5",
    "--labellers",
    "2",
    "--device",
    "cpu",
    "--dtype",
    "float32",
)


@pytest.fixture
def project(tmp_path):
    return made(tmp_path / "标注 项目")


@pytest.fixture(scope="module")
def finished(waiting, tmp_path_factory):
    """A project whose first round is finished, and what each command said. Read-only."""
    begun, said = waiting
    folder = shutil.copytree(begun, tmp_path_factory.mktemp("直达") / "标注 项目")
    commands = (("round", folder), ("label", "simulate", folder, *SIMULATED), ("round", folder))
    return folder, [said, *(quietly(*command) for command in commands)]


def items_of(project, number):
    with Project.open(project, read_only=True) as opened:
        return [item for item in opened.items() if item.round == number]


def notes_of(project, number):
    return json.loads((project / "rounds" / str(number) / "round.json").read_text("utf-8"))


def test_two_rounds(finished, tmp_path):
    """Each step's numbers, the second round's choice, and what the page reads."""
    folder, (waits, waits_still, _, ends) = finished
    assert "6 pairs are ready to be labelled" in waits
    assert all("0 of 6 pairs are labelled, 6 are needed" in said for said in (waits, waits_still))
    assert "round 1 is finished. Its policy, compared with the one before on held-out prompts:" in ends
    judged = notes_of(folder, 1)["steps"]["evaluate"]["judge_over_previous"]
    assert judged["verdict"] == verdict(judged["interval_95"])
    assert f"under the judge: {judged['verdict']} (it wins {judged['win_rate']:.1%} of" in ends
    assert "95 % interval" in ends
    project = shutil.copytree(folder, tmp_path / folder.name)
    items = items_of(project, 1)
    assert [(item.chosen_by, item.task, len(item.candidates)) for item in items] == [("random", "pair", 2)] * 6
    first_policy = notes_of(project, 1)["before"]
    assert all(item.candidates[0].source["checkpoint"] == first_policy and "难度" in item.columns for item in items)
    notes = notes_of(project, 1)
    assert list(notes["steps"]) == ["sample", "label", "reward", "ppo", "evaluate"]
    steps = notes["steps"]
    assert (steps["sample"]["asked"], steps["sample"]["random"], steps["label"]["pairs"]) == (6, 6, 6)
    assert steps["label"]["events"] > steps["label"]["labels"], "undo takes back no label that was trained on"
    assert len(steps["reward"]["models"]) == 2
    assert steps["reward"]["train_pairs"] + steps["reward"]["eval_pairs"] == steps["label"]["labels"] >= 6
    assert len(steps["evaluate"]["samples"]) == 10
    assert {"prompt", "response", "score", "previous", "previous_score", "judge", "previous_judge"} == set(
        steps["evaluate"]["samples"][0]
    )
    assert steps["ppo"]["model"].endswith("rounds/1/ppo/final")
    assert steps["evaluate"]["judge_over_first"] == steps["evaluate"]["judge_over_previous"]
    scores = [json.loads(line) for line in (project / "scores.jsonl").read_text("utf-8").splitlines()]
    assert {row["item"] for row in scores} == {item.item_id for item in items}

    assert "round 2: the next step is sample" in quietly("round", project)
    second = items_of(project, 2)
    assert sorted(item.chosen_by for item in second) == ["active"] * 3 + ["random"] * 3
    assert all(item.columns["disagreement"] >= 0 for item in second)
    policy = str(project / "rounds" / "1" / "ppo" / "final")  # the project was moved
    assert all(item.candidates[0].source["checkpoint"] == policy for item in second)
    assert not {item.item_id for item in items} & {item.item_id for item in second}

    page = rounds_of(project)
    json.dumps(page, allow_nan=False)
    first, current = page["rounds"]
    assert (first["step"], current["step"]) == (None, "label")
    assert set(first["curves"]) == {"reward-1", "reward-2", "ppo"}
    assert {curve["metric"] for curve in first["curves"]["ppo"]} >= {"reward/score_mean", "reference/kl"}
    assert len(first["answers"]) == 10
    assert page["across"]["labels"] == [6, None]
    assert page["across"]["win_rate"] == [steps["evaluate"]["over_previous"]["win_rate"], None]


KILLS = [f"round.{when}@{step}" for step in range(1, 4) for when in ("step", "noted")]
IN_TRAINING = ("step.learned@1", "step.learned@2", "save.files@1", "run.finished@1", "evaluation@1")


def finish(start, project, words, faults=""):
    """Do round 1 in processes of its own until it is finished, the first of each half with a fault. Returns round.json."""
    environment = os.environ | {"HEEDFUL_FAULTS": faults, "OMP_NUM_THREADS": "1"}
    killed = 0
    for command in (["round", project, *words], ["label", "simulate", project, *SIMULATED], ["round", project]):
        for _ in range(4):
            process = start(*command, env=environment)
            said = process.communicate(timeout=600)
            if process.returncode == 0:
                break
            assert process.returncode == -9, said
            killed += 1
            environment |= {"HEEDFUL_FAULTS": ""}
        assert process.returncode == 0
    return without_times(notes_of(project, 1)), killed


def without_times(notes):
    for step in notes["steps"].values():
        step.pop("seconds")
        step.pop("statistics", None)
    return notes


def compared(project, notes):
    """What must be equal whether or not a kill came between: notes, labels (not their random ids), and models' weights."""
    folder = project / "rounds" / "1"
    weights = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
        if "checkpoints" not in path.parts
    }
    lines = (folder / "labels" / "preferences.train.jsonl").read_text("utf-8").split("\n")
    labels = [[json.loads(line)[name] for name in ("prompt", "chosen", "rejected")] for line in lines if line]
    return json.dumps(notes, ensure_ascii=False).replace(str(project), "P"), weights, labels


@pytest.mark.parametrize("point", often(["round.sampled:kill", "round.step:kill@1"], ["round.step:kill@1"]))
def test_a_kill_while_it_is_asking_changes_nothing(forked_heedful, heedful, waiting, project, words, point):
    """The answers are there, and the pairs are in the project, but the step is not noted."""
    killed = forked_heedful(
        "round", project, *words, env=os.environ | {"HEEDFUL_FAULTS": point, "OMP_NUM_THREADS": "1"}
    )
    said = killed.communicate()
    assert killed.returncode == -9, said
    assert notes_of(project, 1)["steps"] == {}
    assert heedful("round", project, *words).status == 0
    straight, got = (without_times(notes_of(one, 1)) for one in (waiting[0], project))
    assert json.dumps(got).replace(str(project), "P") == json.dumps(straight).replace(str(waiting[0]), "P")
    for of in (waiting[0], project):
        assert {item.item_id for item in items_of(of, 1)} == set(straight["steps"]["sample"]["items"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", [*KILLS, *IN_TRAINING])
def test_kills_change_nothing(forked_heedful, finished, project, words, point):
    straight = finished[0]
    got, killed = finish(forked_heedful, project, words, point.replace("@", ":kill@"))
    assert killed == 1, "the fault point was not reached"
    assert compared(project, got) == compared(straight, without_times(notes_of(straight, 1)))


def test_refusals(heedful, project, words, tmp_path):
    for flags, said in (
        (("--prompts", ""), "--policy is given, but not --prompts"),
        (("--random-share", "0.5", "--reward-models", "1"), "--reward-models is 1; train at least 2"),
        (("--random-share", "0.1"), "--random-share must be at least 0.2"),
        (("--temperature", "0"), "--temperature must be greater than 0 here"),
    ):
        outcome = heedful("round", project, *words, *flags)
        assert outcome.status == 2
        assert said in outcome.message
    outcome = heedful("round", tmp_path / "没有", *words)
    assert (outcome.status, "is not a labelling project" in outcome.message) == (2, True)
    outcome = heedful("round", project)
    assert (outcome.status, "--policy and --prompts are missing" in outcome.message) == (2, True)
    assert not [*project.glob("rounds/*/*")]


def test_settings_of_a_round_that_is_under_way(heedful, waiting, tmp_path):
    """How much is enough may change, and others may not; a flag counts also with the value that is the default."""
    project = shutil.copytree(waiting[0], tmp_path / "项目")
    assert "3 are needed" in heedful("round", project, "--enough", "0.5").out
    assert "6 are needed" in heedful("round", project).out, "it is of one call"
    assert "6 are needed" in heedful("round", project, "--enough", "1").out
    file = tmp_path / "这次.yaml"
    file.write_text(f"project: {project}\nenough: 1\n", encoding="utf-8")
    assert "6 are needed" in heedful("round", file).out
    for flags, said in ((["--labels", "300"], "--labels is 300, but the project's rounds use 6"),
                        (["--reward-models", "1"], "--reward-models is 1; train at least 2"),
                        (["--random-share", "1"], "--random-share is 1.0, but the project's rounds use 0.5")):  # fmt: skip
        outcome = heedful("round", project, *flags)
        assert (outcome.status, said in outcome.message) == (2, True)
