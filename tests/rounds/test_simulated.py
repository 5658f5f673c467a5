"""Simulated labellers: their laws, by counting; determinism; ties; what they cannot do."""

import itertools
import math
import random
from collections import Counter

import pytest

from heedful import DataError
from heedful.apps.label import Candidate, Item, Project
from heedful.apps.rounds.judging import Labeller, label_project, ranks_by, scores_of_items
from heedful.configs.label import ProjectSettings
from heedful.rewards import Ensemble, Reward
from labelling import SEVERAL_TURNS

MANY = 4000


def pair(number):
    return Item(f"{number:020d}", "pair", "猫？", (Candidate("喵\u2028"), Candidate("🦊")))


def share_preferring(labeller, scores, wanted):
    answers = [labeller.answer(pair(i), scores)["preferred"] for i in range(MANY)]
    return sum(answer == wanted for answer in answers) / MANY


def near(share, expected):
    """Within 4 standard errors: a right law fails once in 16,000 draws, and the seed is fixed."""
    return abs(share - expected) <= 4 * math.sqrt(expected * (1 - expected) / MANY)


@pytest.mark.parametrize("agreement", [0.6, 0.9])
def test_agreement_with_the_judge_is_as_set_on_either_side(agreement):
    labeller = Labeller("甲", agreement=agreement)
    assert near(share_preferring(labeller, [0.1, 0.2], 1), agreement)
    assert near(share_preferring(labeller, [1.0, 0.2], 0), agreement), "whatever the difference"


def test_equal_scores_are_a_tie():
    assert share_preferring(Labeller("甲", agreement=1.0), [0, 1], 1) == 1
    assert share_preferring(Labeller("甲", agreement=0.0), [0, 1], 1) == 0
    assert Labeller("甲").answer(pair(1), [0.5, 0.5]) == {"preferred": None, "strength": None, "both_bad": False}


@pytest.mark.parametrize(("difference", "temperature"), [(1.0, 1.0), (-0.5, 0.25), (0.0, 1.0)])
def test_bradley_terry(difference, temperature):
    expected = 1 / (1 + math.exp(-difference / temperature))
    assert near(share_preferring(Labeller("甲", temperature=temperature), [difference, 0.0], 0), expected)
    assert share_preferring(Labeller("甲", temperature=1e-9), [-1e9, 0.0], 1) == 1, "no overflow"


def test_labellers_err_independently():
    """Two that agree with the judge on 0.73 agree with each other on 0.73^2 + 0.27^2 = 0.6058."""
    first, second = (
        [Labeller(name).answer(pair(i), [1, 0])["preferred"] for i in range(MANY)] for name in ("甲", "乙")
    )
    assert near(sum(a == b for a, b in zip(first, second, strict=True)) / MANY, 0.6058)


def test_a_repeat_is_asked_anew_and_anything_else_is_fixed():
    labeller = Labeller("甲")
    once, again = ([labeller.answer(pair(i), [1, 0]) for i in range(200)] for _ in range(2))
    repeated = [labeller.answer(pair(i), [1, 0], repeat=True) for i in range(200)]
    other = [Labeller("甲", seed=1).answer(pair(i), [1, 0]) for i in range(200)]
    assert once == again
    assert once not in (repeated, other)


def test_rankings_follow_bradley_terry_pair_by_pair():
    scores, draw = [0.3, 1.0, -0.4], random.Random(3)
    drawn = [ranks_by(scores, 0.7, draw) for _ in range(MANY)]
    assert Counter(map(tuple, map(sorted, drawn))) == {(1, 2, 3): MANY}
    for i, j in itertools.combinations(range(3), 2):
        expected = 1 / (1 + math.exp(-(scores[i] - scores[j]) / 0.7))
        assert near(sum(ranks[i] < ranks[j] for ranks in drawn) / MANY, expected)


def test_rankings_need_a_temperature_and_other_tasks_are_refused():
    ranking = Item("1" * 20, "ranking", "?", tuple(Candidate(c) for c in "abc"))
    assert sorted(Labeller("甲", temperature=1.0).answer(ranking, [1, 2, 3])["ranks"]) == [1, 2, 3]
    with pytest.raises(DataError, match=r"is a ranking: .* --temperature"):
        Labeller("甲").answer(ranking, [1, 2, 3])
    with pytest.raises(DataError, match=r"is a rating: .* pairs and rankings only"):
        Labeller("甲").answer(Item("1" * 20, "rating", "?", (Candidate("a"),)), [1])


def test_a_label_that_was_taken_back_is_given_anew(tmp_path):
    """The label after an undo is another event, not the retracted one once more."""
    with Project.create(tmp_path / "项目", ProjectSettings(name="🦊", repeats=0.0)) as project:
        project.add_items([pair(1)])
        person = project.add_person("甲", "annotator").person_id
        assert label_project(project, [(person, Labeller("甲"))], lambda _: [1, 0]) == 1
        project.undo(person, "撤")
        assert label_project(project, [(person, Labeller("甲"))], lambda _: [1, 0], labels=2) == 1
        assert len(project.labels()) == 1


def test_answers_of_several_turns_are_scored_as_a_whole():
    """A judge is given all of an answer's turns; a call of a tool is its name with its arguments."""
    texts = []

    def judge(completions, **_):
        texts.extend(completion[-1]["content"] for completion in completions)
        return [1.0, 2.0]

    item = Item("0", "pair", [{"role": "user", "content": "猜"}], (Candidate(SEVERAL_TURNS), Candidate("苹果")))
    assert scores_of_items(Ensemble((Reward("judge", judge),)), [item]) == {"0": [1.0, 2.0]}
    first, *_ = texts[0].splitlines()
    assert first == 'assistant: guess({"词": "<b>香蕉</b>"})'
    assert texts[0].endswith("user: 喜欢 🍎\nassistant: <think>\n也许\n</think>\n\n是苹果。")
    assert texts[1] == "苹果"


def test_nothing_to_label(heedful, tmp_path, written):
    """It said "0 labels" with status 0, whatever the reason."""
    words = ("label", "simulate", tmp_path / "项目", "--rewards", "rule:length:0-3")
    assert heedful("label", "new", tmp_path / "项目").status == 0
    outcome = heedful(*words)
    assert outcome.status == 2
    assert (
        f"has no items to label; add some with heedful label import {tmp_path / '项目'} --data FILE" in outcome.message
    )
    pairs = written("对.jsonl", [{"prompt": "问", "chosen": "好", "rejected": "不好的回答"}])
    assert heedful("label", "import", tmp_path / "项目", "--data", pairs).status == 0
    assert "1 label by" in heedful(*words).out
    outcome = heedful(*words)
    assert outcome.status == 0
    assert "0 labels by" in outcome.out
    assert "nothing is left to label" in outcome.out
