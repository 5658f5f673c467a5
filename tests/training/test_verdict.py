"""The verdict of a run: better, worse or noise, with an interval over the prompts that both evaluations measured."""

import math
import random
import statistics

import pytest

import heedful
from heedful import ConfigError, PPOConfig, SFTConfig, TrainingResult
from heedful.training.verdict import FEWEST, Verdict, Yardstick, judge
from jsonl import read_metrics


def yardstick(prompts, metric="eval/score_mean", *, higher=True):
    return Yardstick(metric, higher_is_better=higher, prompts=prompts)


def ones(values):
    return [(value, 1.0) for value in values]


def test_the_interval_is_that_of_paired_differences():
    """One value per prompt: mean and standard error of the differences, not of both means."""
    draw = random.Random(0)
    before = [draw.gauss(0, 5) for _ in range(40)]
    after = [x + draw.gauss(0.4, 0.5) for x in before]
    found = judge(yardstick([str(i) for i in range(40)]), ones(before), ones(after))
    changes = [b - a for a, b in zip(before, after, strict=True)]
    half = 1.96 * statistics.stdev(changes) / math.sqrt(40)
    assert found.interval == pytest.approx((statistics.fmean(changes) - half, statistics.fmean(changes) + half))
    assert (found.verdict, found.prompts) == ("better", 40)
    assert (found.first, found.last) == pytest.approx((statistics.fmean(before), statistics.fmean(after)))


@pytest.mark.parametrize(("higher", "verdict"), [(True, "worse"), (False, "better")])
def test_a_loss_per_token_is_weighed_by_tokens(higher, verdict):
    """A ratio of sums. Its interval shrinks with the number of prompts, not with that of copies of a record."""
    records = [((3.0 + i % 3) * (1 + i % 4), 1.0 + i % 4) for i in range(24)]
    later = [(total - 0.5 * count - 0.1 * (i % 2), count) for i, (total, count) in enumerate(records)]
    names = [str(i) for i in range(24)]
    found = judge(yardstick(names, "eval/loss", higher=higher), records, later)
    tokens = sum(count for _, count in records)
    assert found.last == pytest.approx(sum(total for total, _ in later) / tokens)
    assert found.verdict == verdict
    twice = judge(yardstick(names * 2, "eval/loss", higher=higher), records * 2, later * 2)
    assert twice.interval == pytest.approx(found.interval)
    assert twice.prompts == 24


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0] * 12, [2.0, 0.0] * 6, "noise"),
        ([1.0] * 12, [1.0] * 12, "noise"),
        ([0.0] * 12, [1.0] * 12, "better"),
        ([1.0] * 12, [0.0] * 12, "worse"),
        ([0.0] * (FEWEST - 1), [1.0] * (FEWEST - 1), "unknown"),
        ([0.0], [1.0], "unknown"),
    ],
)
def test_better_worse_noise_and_too_few(before, after, verdict):
    found = judge(yardstick([f"题 {i}" for i in range(len(before))]), ones(before), ones(after))
    assert found.verdict == verdict
    assert (found.interval is None) == (verdict == "unknown")
    said = str(found)
    assert f"on {len(before)} held-out prompt{'s' * (len(before) > 1)}" in said
    assert {"unknown": "too few to tell", "noise": "beyond noise"}.get(verdict, f"{verdict}: ") in said


def test_a_response_without_a_score_counts_in_neither_evaluation():
    before, after = ones([0.0] * 12), ones([1.0] * 12)
    before[3] = after[5] = (0.0, 0.0)
    found = judge(yardstick([str(i) for i in range(12)]), before, after)
    assert (found.prompts, found.first, found.last) == (10, 0.0, 1.0)
    assert judge(yardstick(["a"]), [(0.0, 0.0)], [(1.0, 1.0)]) is None
    assert Verdict.read({}) is None, "a summary without one"


def test_a_run_has_it_as_data_and_it_is_that_of_its_evaluations(config, written):
    data = written("题.jsonl", [{"prompt": f"{n} 加 {n % 7} 等于几?"} for n in range(60)])
    settings = config(data=data, eval_fraction=0.5, max_new_tokens=6)
    done = heedful.train_ppo(settings, [lambda completion_ids, **_: [float(sum(ids) % 9) for ids in completion_ids]])
    found = done.verdict
    first, last = (done[f"{which}_evaluation"]["eval/score_mean"] for which in ("first", "last"))
    assert isinstance(found, heedful.Verdict)
    assert found.metric == "eval/score_mean"
    assert (found.first, found.last) == pytest.approx((first, last))
    assert FEWEST < found.prompts < 60


def test_what_the_terminal_says_of_a_run_that_got_worse(heedful, tiny, written, tmp_path):
    """No evaluation was better than the first: nothing is recommended."""
    (tmp_path / "坏.py").write_text(
        "calls = []\n\n\ndef falls(completions):\n    calls.append(1)\n"
        "    return [-float(len(calls)) - len(one) / 1000 for one in completions]\n",
        encoding="utf-8",
    )
    flags = {
        "model": tiny(), "data": written("题.jsonl", [{"prompt": f"{n} 加?"} for n in range(40)]), "steps": 3,
        "rewards": f"python:{tmp_path / '坏.py'}:falls", "rollout_batch_size": 8, "minibatch_size": 8, "eval_fraction": 0.5,
        "max_new_tokens": 6, "output": tmp_path / "run", "device": "cpu", "sample_every": 0,
    }  # fmt: skip
    outcome = heedful("ppo", **flags)
    assert outcome.status == 0, outcome.err
    assert "worse: eval/score_mean -2" in outcome.out
    assert "95 % interval" in outcome.out
    assert "alarms: responses-cut (step 1)" in outcome.out
    assert f"look closer:  heedful report {tmp_path / 'run'}" in outcome.out
    assert "do not use final/" in outcome.out
    assert "heedful chat" not in outcome.out


# Callbacks that stop


def enough(step, metrics):
    return heedful.STOP if step == 1 else None


@pytest.mark.parametrize("name", ["on_step", "on_evaluation"])
def test_stop_ends_a_run_with_a_model_and_a_result(config, length, capsys, name):
    """The step that it ends is evaluated, though no evaluation is due."""
    settings = config(steps=5, eval_every=int(name == "on_evaluation"))
    done = heedful.train_ppo(settings, rewards=[length], **{name: enough})
    assert isinstance(done, TrainingResult)
    assert (done["steps"], done["stopped_early"], done["stopped_by"]) == (1, True, f"{name} (enough)")
    assert (done.folder / "final" / "config.json").is_file()
    assert f"stopped at step 1 by {name} (enough)" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(done.folder, having="eval/score_mean")] == [0, 1]


def test_stop_ends_trainers_on_data_and_ppo_steps_too(tiny, length):
    assert repr(heedful.STOP) == "heedful.STOP"
    rows = [{"prompt": f"{n} 加 1?", "completion": "好的。"} for n in range(20)]
    settings = SFTConfig(max_steps=5, batch_size=4, eval_fraction=0, device="cpu")
    done = heedful.train_sft(settings, model=tiny(), data=rows, on_step=enough)
    assert (done["steps"], done["stopped_by"]) == (1, "on_step (enough)")
    policy = heedful.Policy.from_pretrained(tiny(), device="cpu")
    settings = PPOConfig(steps=5, rollout_batch_size=4, minibatch_size=4, max_new_tokens=4)
    prompts = [row["prompt"] for row in rows]
    steps = [step for step, *_ in heedful.ppo_steps(settings, policy, prompts, [length], on_step=enough)]
    assert steps == [1]
    with pytest.raises(ConfigError, match=r"^on_step \(<lambda>\) returned '够了' at step 1; return heedful\.STOP"):
        next(heedful.ppo_steps(settings, policy, prompts, [length], on_step=lambda *_: "够了"))


def test_what_is_not_stop_is_refused(config, length):
    said = r"^on_evaluation \(<lambda>\) returned True at step 0; return heedful\.STOP to end the run after this step"
    with pytest.raises(ConfigError, match=said):
        heedful.train_ppo(config(steps=2, eval_every=1), rewards=[length], on_evaluation=lambda *_: True)
