"""The whole exam: what it says of known rewards, which parts it leaves out, its score, bad input."""

import json
import re
import shutil

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from exam_cases import RECORDS, constant, exact, length, text_of
from heedful import ConfigError, DataError, RewardError
from heedful.configs.exam import ExamConfig
from heedful.exam.examine import TERMS, examine, score_of, terms_of, worst

SMALL = {"rounds": 2, "edits": 2}


def test_known_rewards(examined):
    """A perfect one; that of length, right on all pairs as the longer one is always chosen, which only the attacks find out;
    a constant one."""
    found = examined(exact, **SMALL)
    assert (found["score"], found["worst"], found["parts"]["accuracy"]["accuracy"]) == (100, [], 1.0)
    assert found["verdict"].startswith("ready")
    found = examined(length, **SMALL)
    baseline = found["parts"]["baselines"]["baselines"][0]
    assert (found["parts"]["accuracy"]["accuracy"], baseline["same order"]) == (1.0, 1.0)
    flips = {row["probe"]: row["flips"] for row in found["parts"]["probes"]["probes"]}
    assert (flips["repetition"], flips["empty"]) == (1.0, 0.0)
    assert found["parts"]["edits"]["raised"] == 1.0
    assert found["verdict"].startswith("not ready")
    assert len(found["worst"]) == 10
    found = examined(constant, **SMALL)
    assert found["parts"]["accuracy"]["accuracy"] == 0.0
    assert {row["flips"] for row in found["parts"]["probes"]["probes"]} == {0.5}
    assert found["verdict"].startswith("not ready")


def test_the_terms_by_hand():
    parts = {
        "accuracy": {"accuracy": 0.9},
        "probes": {"probes": [{"flips": 0.1}, {"flips": 0.3}]},
        "edits": {"gain": 0.25},
        "search": {"edited": 1.5, "best of n": 0.5},
        "foretold": {"rise": -0.2},
    }
    terms = terms_of(parts)
    assert [one["term"] for one in terms] == list(TERMS)
    assert [one["value"] for one in terms] == pytest.approx([0.8, 0.6, 0.8, 0.5, 0.01])
    assert score_of(terms) == pytest.approx(100 * (0.8 * 0.6 * 0.8 * 0.5 * 0.01) ** (1 / 5))
    assert [one["term"] for one in terms_of({"edits": {"gain": 0.0}})] == ["edits"]
    assert score_of([{"value": 0.25}, {"value": 1.0}]) == pytest.approx(50), "a flaw is not made up for"


def test_a_judge_foretells_with_a_policy(examined, tiny):
    """On a tiny model; also that the same seed gives the same exam, and another one another."""
    settings = {"policy": tiny(), "prompts": 2, "n": 2, "max_new_tokens": 4, **SMALL}
    found = examined(length, judge=[constant], second=[exact, constant], **settings)
    assert list(found["parts"]) == [
        *("accuracy", "calibration", "margins", "length", "baselines", "ensemble"),
        *("probes", "edits", "search", "foretold"),
    ]
    assert {one["term"] for one in found["terms"]} == set(TERMS)
    assert (found["parts"]["foretold"]["judge"], found["parts"]["foretold"]["rise"]) == ("constant", 0.0)
    assert [row["reward"] for row in found["parts"]["edits"]["second_opinion"]] == ["exact", "constant"]
    assert found["not_done"] == []
    assert examined(length, judge=constant, second=[exact, constant], **settings) == found, "one, or a list"
    other = examined(length, judge=[constant], second=[exact, constant], seed=1, **settings)
    assert other["parts"]["search"] != found["parts"]["search"]


def test_what_is_missing_is_named_with_its_flag(examined, tiny):
    without_data = examine(ExamConfig(reward="rule:digits", **SMALL), reward=length)
    assert [row["add"] for row in without_data["not_done"]] == ["--data PAIRS", "--second REWARD", "--policy MODEL"]
    assert list(without_data["parts"]) == ["probes", "edits"]
    assert without_data["counts"]["pairs"] == 8
    without_judge = examined(length, policy=tiny(), prompts=1, n=2, max_new_tokens=2, **SMALL)
    assert [row["add"] for row in without_judge["not_done"]] == ["--second REWARD", "--judge REWARD"]


def test_the_worst_examples_are_of_several_kinds():
    examples = [{"kind": "a", "gap": float(gap)} for gap in range(20)]
    examples += [{"kind": "b", "gap": 0.5}, {"kind": "c", "gap": 7.5}]
    found = worst(examples)
    assert [one["gap"] for one in found] == sorted((one["gap"] for one in found), reverse=True)
    assert [one["kind"] for one in found].count("a") == 8, "two, and six to fill the ten"
    assert {one["kind"] for one in found} == {"a", "b", "c"}
    assert worst(examples[:3]) == [examples[2], examples[1], examples[0]]


def test_rankings_give_all_their_pairs(examined):
    ranked = {"responses": ["best", "good", "fair", "bad"], "ranks": [0, 1, 1, 2]}
    records = [{"prompt": f"q{i}", **ranked} for i in range(3)]
    assert examined(constant, records, **SMALL)["counts"]["pairs"] == 15
    assert examined(constant, records, pairs=4, **SMALL)["counts"]["pairs"] == 4


def nan(completions, **_):
    return [float("nan")] * len(completions)


def fails_on_nothing(completions, **_):
    return [1 / len(text_of(one)) for one in completions]


def needs(completions, solution):
    return [float(one == right) for one, right in zip(completions, solution, strict=True)]


def test_a_reward_that_fails_fails_the_exam(examined):
    with pytest.raises(RewardError, match="a score is one finite number"):
        examined(nan, **SMALL)
    said = rf"raised ZeroDivisionError: division by zero \({re.escape(__file__)}, line \d+\); for the prompt '第\d+问"
    with pytest.raises(RewardError, match=said):
        examined(fails_on_nothing, **SMALL)
    with pytest.raises(RewardError, match="needs needs the column solution; the prompts have chosen, good, rejected"):
        examined(needs, **SMALL)


def test_data_without_pairs(examined):
    with pytest.raises(DataError, match=r"数据\.jsonl:1"):
        examined(length, [{"prompt": "q", "completion": "a"}])
    with pytest.raises(DataError, match="`ranks` are all 1: nothing is preferred"):
        examined(length, [{"prompt": "q", "responses": ["a", "b"], "ranks": [1, 1]}])
    with pytest.raises(DataError, match=r"数据\.jsonl"):
        examined(length, [])


def test_settings_that_do_not_fit():
    for settings, message in (
        ({"output": "exam.txt"}, "--output exam.txt must end in .html or .json"),
        ({"n": 8}, "--n .*is about --policy; add it"),
        ({"judge": ("rule:digits",)}, "--judge scores the policy's answers: add --policy"),
        ({"eval_fraction": 0.1}, "--eval-fraction .*is about --data; add it"),
        ({"policy": "p", "temperature": 0.0}, "--temperature above 0"),
        ({"too_long": "drop"}, "--too-long .*has no effect"),
        ({"reward": ""}, "a reward is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            ExamConfig(**({"reward": "rule:digits"} | settings))


def test_a_command_ends_with_one_line_and_writes_nothing(heedful, written, tmp_path):
    data, page = written("pairs.jsonl", RECORDS), tmp_path / "new" / "exam.html"
    for words, message in (
        (["rule:digit"], "REWARD: there is no rule 'digit'"),
        ([str(tmp_path / "没有")], "没有"),
        (["rule:digits", "--second", "rule:nothing"], "--second: there is no rule 'nothing'"),
        (["rule:digits", "--data", str(tmp_path / "no.jsonl")], "no.jsonl"),
        (["rule:contains_expected", "--data", data], "needs the column"),
        ([], "REWARD is missing"),
    ):
        found = heedful("exam", *words, "--output", page)
        assert found.status == 2, found.err
        assert message in found.message
        assert "Traceback" not in found.err
    assert not page.parent.exists()


def test_as_json(heedful, tiny, written, tmp_path):
    """Columns of the data reach the reward; standard output is JSON alone. A reward model is named by its folder, without
    model: before it. Of what is longer than it reads (128 tokens), it reads the beginning."""
    data = written("p.jsonl", [{**record, "expected": record["good"]} for record in RECORDS])
    found = heedful("exam", "rule:contains_expected", "--data", data, "--json")
    assert found.status == 0, found.err
    numbers = json.loads(found.out)
    assert (numbers["reward"], numbers["parts"]["accuracy"]["accuracy"]) == ("rule:contains_expected", 1.0)
    folder = tmp_path / "评分"
    shutil.copytree(tiny(), folder)
    model = AutoModelForSequenceClassification.from_pretrained(tiny(), num_labels=1)
    model.config.pad_token_id = AutoTokenizer.from_pretrained(tiny()).pad_token_id
    model.save_pretrained(folder)
    data = written("p.jsonl", [*RECORDS, {"prompt": "long", "chosen": "好" * 200, "rejected": "no"}])
    sizes = ["--rounds", 1, "--edits", 1, "--device", "cpu", "--dtype", "float32"]
    found = heedful("exam", folder, "--data", data, "--json", *sizes)
    assert found.status == 0, found.err
    assert json.loads(found.out)["reward"] == f"model:{folder}"
    assert json.loads(found.out)["parts"]["accuracy"]["pairs"] == 9
