"""Settings that depend on the size of the data: one message has all numbers, and each way out that it names works."""

import re

import pytest

from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig
from heedful.algorithms.online.start import start
from jsonl import write_jsonl
from trainers import CONFIGS, MODULES

SETTING = re.compile(r"--(rollout-batch-size|minibatch-size|samples-per-prompt) (\d+)")


def prompts(path, count):
    return write_jsonl(path, ({"prompt": [{"role": "user", "content": f"{n} 加 1 等于几?"}]} for n in range(count)))


@pytest.fixture
def refused(config, length):
    """``refused(kind, **changes)`` is the message of a run that does not start."""

    def begin(kind, **changes):
        with pytest.raises(ConfigError) as caught:
            start(config(kind, **changes), [length])
        return str(caught.value)

    return begin


@pytest.mark.parametrize(
    ("kind", "sizes", "numbers"),
    [
        (PPOConfig, {"rollout_batch_size": 64, "minibatch_size": 64, "samples_per_prompt": 1}, (64, 1, 64)),
        (PPOConfig, {"rollout_batch_size": 64, "minibatch_size": 16, "samples_per_prompt": 2}, (64, 2, 32)),
        (GRPOConfig, {"rollout_batch_size": 96, "minibatch_size": 32, "samples_per_prompt": 2}, (96, 2, 48)),
        (OnlineDPOConfig, {"rollout_batch_size": 64, "minibatch_size": 32, "samples_per_prompt": 2}, (64, 2, 32)),
    ],
)
def test_one_message_has_all_numbers_and_its_settings_work(refused, config, length, tmp_path, kind, sizes, numbers):
    data = {"data": prompts(tmp_path / "问.jsonl", 12), "eval_fraction": 0.2}
    said = refused(kind, **sizes, **data)
    responses, each, needed = numbers
    assert f"a step has {responses} responses (--rollout-batch-size), {each} per prompt (--samples-per-prompt)" in said
    found = re.search(r"needs (\d+) prompts; there are (\d+) prompts to train on, besides (\d+) held out", said)
    assert int(found[1]) == needed
    assert int(found[2]) + int(found[3]) == 12
    ways = [dict(SETTING.findall(way)) for way in said.partition(". Set ")[2].split(", or ")[:-1]]
    assert len(ways) == 2, said
    for way in ways:
        changes = sizes | {name.replace("-", "_"): int(size) for name, size in way.items()} | data
        learner = start(config(kind, **changes), [length]).learner
        assert len(next(learner.prompts)) == learner.config.rollout_batch_size


def test_a_single_prompt_and_too_few_records_of_both_files(refused, tmp_path, demonstrations):
    sizes = {"rollout_batch_size": 8, "minibatch_size": 8, "samples_per_prompt": 1, "eval_fraction": 0.0}
    one = {"data": prompts(tmp_path / "一.jsonl", 1)}
    assert "needs 8 prompts; there is 1 prompt to train on. Set" in refused(PPOConfig, **sizes, **one)
    mix = {"ptx_data": demonstrations, "ptx_coef": 0.5}
    many = sizes | {"rollout_batch_size": 16, "minibatch_size": 16, "data": prompts(tmp_path / "九.jsonl", 9)}
    said = refused(PPOConfig, **many, **mix)
    assert "so it needs 16 prompts; there are 9 prompts to train on; an optimizer step learns 16 records" in said
    assert "Set --rollout-batch-size 5 --minibatch-size 5, or give more data" in said


@pytest.mark.parametrize(
    ("name", "items"), [("sft", "records"), ("reward", "pairs"), ("dpo", "pairs"), ("kto", "responses")]
)
def test_trainers_on_data_name_a_batch_size_that_works(tiny, tmp_path, name, items):
    answers = {"sft": {"completion": "好的。"}, "kto": {"completion": "好的。"}}.get(
        name, {"chosen": "好的。", "rejected": "不。"}
    )
    rows = [{"prompt": f"{n} 加 1?", **answers} | ({"label": n % 2 == 0} if name == "kto" else {}) for n in range(30)]
    data = {"model": tiny(), "data": write_jsonl(tmp_path / "题.jsonl", rows), "output": tmp_path / "run"}
    with pytest.raises(ConfigError) as caught:
        MODULES[name].start(CONFIGS[name](**data, batch_size=64, eval_fraction=0.2))
    found = re.search(
        rf"a step learns 64 {items} \(--batch-size\); there are (\d+) {items} to train on, besides (\d+) held out "
        rf"\(--eval-fraction 0.2\). Set --batch-size (\d+), or give more {items}",
        str(caught.value),
    )
    assert found, caught.value
    assert int(found[1]) + int(found[2]) == 30
    learner, _ = MODULES[name].start(CONFIGS[name](**data, batch_size=int(found[3]), eval_fraction=0.2))
    assert len(next(learner.batches)) == int(found[3])
