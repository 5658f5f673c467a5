"""Accuracy of a reward model whose every score is known by hand."""

import pytest
import torch

from heedful import AccuracyConfig, CheckpointError, DataError, SFTConfig, evaluate_accuracy
from heedful.core import share_interval
from heedful.data import read_rankings
from heedful.data.chat import RewardInputs
from heedful.data.loading import load_split
from heedful.evaluate.measuring import held_out
from heedful.models import freeze, load_reward_model, load_tokenizer
from heedful.rewards.models import ModelReward


@pytest.fixture
def measure(planted_model, written, cpu):
    """``measure(records, **settings)``: accuracy of the planted reward model."""

    def run(records, **settings):
        config = AccuracyConfig(reward_model=planted_model, data=written(records), **(cpu | settings))
        return evaluate_accuracy(config)

    return run


def pair(chosen, rejected, prompt="问"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


FOUR = [("好!", "好?"), ("好!", "好好"), ("a", "?"), ("??", "!!")]


def test_planted_pairs(measure):
    """Three of four in the right order, each to a prompt of its own: Wilson's interval. Equal scores are not right."""
    result = measure([pair(*texts, prompt=f"第{i}问") for i, texts in enumerate(FOUR)])
    assert result["accuracy"] == 0.75
    assert result["interval_95"] == pytest.approx((0.300636, 0.954414), abs=1e-6)
    assert (result["pairs"], result["prompts"]) == (4, 4)
    assert measure([pair("ab", "cd")])["accuracy"] == 0.0


def test_pairs_of_one_prompt_are_not_independent(measure):
    """In records of their own, apart from each other, and one of them as a message: two prompts, of one opinion each."""
    right, wrong = FOUR[0], FOUR[3]
    message = {"prompt": [{"role": "user", "content": "甲"}], "chosen": "好!", "rejected": "好?"}
    records = [pair(*right, "甲"), pair(*wrong, "乙")] * 2 + [message, pair(*wrong, "乙")]
    result = measure(records)
    assert (result["accuracy"], result["pairs"], result["prompts"]) == (0.5, 6, 2)
    assert result["interval_95"] == share_interval([[1.0] * 3, [0.0] * 3])
    alone = measure([{**record, "prompt": f"第{i}问"} for i, record in enumerate(records)])
    assert alone["interval_95"][0] > result["interval_95"][0]
    assert alone["interval_95"][1] < result["interval_95"][1]


def test_the_planted_scores_are_those_of_the_margin(measure):
    """Sign and order of the score itself, so that the accuracies here mean what they say."""
    assert measure([pair("!", "a")])["margin_mean"] > 0
    assert measure([pair("a", "?")])["margin_mean"] > 0
    better, worse = measure([pair("!", "?")]), measure([pair("?", "!")])
    assert better["margin_mean"] == pytest.approx(-worse["margin_mean"], abs=1e-6)
    assert (better["accuracy"], worse["accuracy"]) == (1.0, 0.0)
    assert better["score_mean"] == pytest.approx(0.0, abs=1e-6)


def test_rankings_count_all_their_pairs_and_no_ties(measure):
    """Of A < B = C < D there are five pairs; the planted scores get all right but (B, D). Pairs are weighted alike."""
    responses = ["!!", "??", "ab", "cd"]  # scores 1, -1, 0, 0 over the same length
    ranked = {"prompt": "问", "responses": responses, "ranks": [0, 1, 1, 2]}
    result = measure([ranked])
    # (A,B) (A,C) (A,D) are right; (B,D): -1 against 0 is wrong; (C,D): equal scores are not right.
    assert (result["accuracy"], result["pairs"]) == (pytest.approx(3 / 5), 5)
    result = measure([ranked, {"prompt": "二", "responses": ["!", "?"], "ranks": [0, 1]}])
    assert (result["accuracy"], result["pairs"], result["prompts"]) == (pytest.approx(4 / 6), 6, 2)


def test_calibration_and_length(measure):
    """The scores are a, -a and 0 for the same length; one of three pairs, of unequal length, is in the wrong order."""
    a = measure([pair("!", "ab")])["score_mean"] * 2
    shorter, longer = "!", "?" * 8
    result = measure([pair("!!", "ab"), pair("ab", "cd"), pair(longer, shorter)])
    assert result["accuracy"] == pytest.approx(1 / 3)
    assert result["pairs_similar_length"] == 2
    assert result["accuracy_similar_length"] == pytest.approx(1 / 2)
    assert result["length_correlation"] < -0.5
    assert 0 < result["ece"] < 1
    assert a > 0


def test_truncated_rankings_are_scored_without_an_end(measure, planted_model):
    """All of "!!" is "!", and six in seven of "a!!!!!!"; with the end it is two in three, and six in eight."""
    texts = ["!!", "a!!!!!!", "aaaa!"]
    tokenizer = load_tokenizer(planted_model)
    model = load_reward_model(planted_model, tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32)
    freeze(model)
    cut, ended = (ModelReward(model, RewardInputs(tokenizer))([""] * 3, texts, [t] * 3) for t in (True, False))
    assert cut[0] - cut[1] > 0.05
    assert ended[0] - ended[1] < -0.05
    whole = pair(*texts[:2], prompt="")
    assert measure([whole | {"truncated": True}])["margin_mean"] == pytest.approx(cut[0] - cut[1], abs=1e-6)
    assert measure([whole])["margin_mean"] == pytest.approx(ended[0] - ended[1], abs=1e-6)
    both = measure([{"prompt": "", "responses": texts, "ranks": [0, 1, 1], "truncated": True}, whole])
    assert (both["accuracy"], both["pairs"]) == (pytest.approx(2 / 3), 3)
    margins = [cut[0] - cut[1], cut[0] - cut[2], ended[0] - ended[1]]
    assert both["margin_mean"] == pytest.approx(sum(margins) / 3, abs=1e-6)


def test_the_batch_changes_nothing(measure):
    records = [pair("!" * (i % 4) + "长" * (i % 7), "?" * (i % 3) + "短") for i in range(1, 12)]
    one, other = measure(records, micro_batch_size=100, micro_batch_tokens=60), measure(records, micro_batch_size=1)
    assert one.pop("interval_95") == other.pop("interval_95")
    assert one == pytest.approx(other, abs=1e-5)


def test_the_fraction_is_what_trainers_hold_out(measure, written):
    """Otherwise accuracy would be measured on pairs that were trained on."""
    records = [pair("!", "?", prompt=f"第{i}问") for i in range(200)]
    path = written(records)
    config = SFTConfig(model="m", data=path, output="o", eval_fraction=0.1)
    _, expected, counts = load_split(read_rankings, config)
    found, dropped = held_out(read_rankings, AccuracyConfig(reward_model="m", data=path, eval_fraction=0.1))
    assert (found, dropped) == (expected, {"records": 200, "dropped_unusable": 0})
    assert 5 < len(found) < 40
    assert measure(records, eval_fraction=0.1)["prompts"] == counts["held_out"] == len(found)
    with pytest.raises(DataError, match="--eval-fraction"):
        measure([pair("a", "b")], eval_fraction=0.001)


def test_unusable_pairs_are_dropped_and_counted(measure):
    records = [pair("!", "?", prompt=f"第{i}问") for i in range(9)] + [pair(" ", "?")]
    with pytest.raises(DataError, match=r"数据\.jsonl:10"):
        measure(records)
    result = measure(records, unusable="drop")
    assert (result["accuracy"], result["prompts"], result["dropped_unusable"]) == (1.0, 9, 1)
    assert "dropped_unusable" not in measure(records[:9])
    said = r"1 of 10 records \(10.0%\) would be dropped \(1 unusable\).*--max-dropped 0\.09"
    with pytest.raises(DataError, match=said):
        measure(records, unusable="drop", max_dropped=0.09)
    with pytest.raises(DataError, match="none of 2 records is usable"):
        measure([pair(" ", "?")] * 2, unusable="drop", max_dropped=1.0)


def test_too_long_for_the_reward_model(measure):
    """The remedy must be one that this command has."""
    long, short = pair("好" * 200, "坏"), pair("好", "坏")
    with pytest.raises(DataError) as error:
        measure([long])
    assert "128 tokens" in str(error.value)
    assert "--too-long drop" in str(error.value)
    assert "--max-new-tokens" not in str(error.value)
    dropped = measure([long, short], too_long="drop", max_dropped=0.5)
    assert (dropped["pairs"], dropped["dropped_too_long"]) == (1, 1)
    cut = measure([long, short], too_long="truncate", max_dropped=0.5)
    assert (cut["pairs"], cut["truncated"]) == (2, 1)


def test_a_language_model_is_refused(tiny, written, cpu):
    with pytest.raises(CheckpointError, match="no reward head"):
        evaluate_accuracy(AccuracyConfig(reward_model=tiny("llama"), data=written([pair("a", "b")]), **cpu))
