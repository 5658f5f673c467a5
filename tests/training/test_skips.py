"""Numbers that are not finite: the step is left out as if it had never been, said with its records, and ends no run alone.

They come from where they come from in real runs: a gradient that overflows, weights of a token that are broken, a reward of
1e39, which float32 does not hold.
"""

import copy
import math

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import often
from heedful import A2CConfig, CheckpointError, GRPOConfig, OnlineDPOConfig, PPOConfig, SFTConfig, TrainingError
from heedful.algorithms import sft
from heedful.algorithms.online.start import start
from heedful.algorithms.online.update import broken_numbers
from heedful.algorithms.ppo import learn
from heedful.training.metric_sums import MetricSums
from jsonl import read_jsonl, read_metrics
from trainers import MODULES, TRAIN, begin, step_online
from trees import differing

NORM = torch.nn.utils.get_total_norm


def overflow(patch, *steps):
    """torch finds a gradient of these optimizer steps (of one module each) infinite."""
    calls = []

    def norm(gradients):
        calls.append(1)
        if len(calls) in steps:
            gradients[0].view(-1)[0] = torch.inf
        return NORM(gradients)

    patch.setattr(torch.nn.utils, "get_total_norm", norm)


def learned(learner):
    """What an optimizer step changes."""
    state = learner.state_dict()
    weights = {name: state.get(name) for name in ("model", "policy", "critic", "average")}
    return copy.deepcopy(weights | {"optimizer": state["optimizer"]["state"]})


# -------------------------------------------------------------------------------------------------- trainers from data


@pytest.mark.parametrize("name", often(MODULES, ["kto"]))
def test_a_step_that_overflows_is_left_out_and_its_records_are_written_down(offline, name, monkeypatch, capsys):
    """The run goes on, and the file names the records of just that step."""
    settings = offline(name)
    overflow(monkeypatch, 3)
    summary = TRAIN[type(settings)](settings)
    assert summary["steps"] == 5
    logged = read_metrics(settings.output)
    assert [line.get("optimizer/skipped_steps") for line in logged] == [None, None, 1.0, None, None]
    assert [("optimizer/grad_norm" in line) for line in logged] == [True, True, False, True, True]
    (left_out,) = read_jsonl(settings.output / "skipped.jsonl")
    assert (left_out["step"], left_out["update"], left_out["not_finite"]) == (3, 1, ["gradient norm inf"])
    learner = MODULES[name].start(offline(name, output=settings.output.with_name("again")))[0]
    third = [next(learner.batches) for _ in range(3)][2]
    of_a_line = 2 if name == "kto" else 1  # it takes pairs apart
    expected = list(dict.fromkeys(f"{settings.data}:{row // of_a_line + 1}" for row in third))
    assert left_out["records"] == expected
    said = capsys.readouterr().err
    assert f"step 3, update 1: gradient norm inf; records {', '.join(expected)})" in said
    assert str(settings.output / "skipped.jsonl") in said


@pytest.mark.parametrize("name", often(MODULES, ["dpo"]))
def test_the_optimizer_does_not_notice_a_step_that_was_left_out(offline, name, monkeypatch):
    """Weights, moments and Adam's count of steps are bit for bit those before it."""
    settings = offline(name)
    learner, step = begin(settings)
    step()
    before = learned(learner)
    with monkeypatch.context() as patch:
        overflow(patch, 1)
        metrics = step()
    assert metrics["optimizer/skipped_steps"] == 1
    assert differing(learned(learner), before) == []
    assert learner.state_dict()["skipped_in_a_row"] == 1
    step()
    assert differing(learned(learner), before)
    assert learner.state_dict()["skipped_in_a_row"] == 0


def test_too_many_in_a_row_end_the_run(offline, monkeypatch, capsys):
    """More than 3: with status 4, after the step is logged, with the weights before them; those that are apart never do."""
    settings = offline("sft", max_steps=9)
    overflow(monkeypatch, 2, 4, 5, 6, 7)
    with pytest.raises(TrainingError, match=r"^4 steps in a row .*; 3 in a row are allowed") as caught:
        sft.train_sft(settings)
    assert caught.value.status == 4
    assert str(settings.output / "skipped.jsonl") in str(caught.value)
    assert "last: step 7, update 1: gradient norm inf" in str(caught.value)
    saved = settings.output / "checkpoints" / "step-000007"
    assert (
        f"stopped by TrainingError after step 7 of 9; the same command resumes from {saved}" in capsys.readouterr().err
    )
    assert [line["step"] for line in read_metrics(settings.output)] == [*range(1, 8)]
    assert [line["step"] for line in read_jsonl(settings.output / "skipped.jsonl")] == [2, 4, 5, 6, 7]
    monkeypatch.undo()
    overflow(monkeypatch, 2)
    sft.train_sft(offline("sft", max_steps=3, output=settings.output.with_name("three")))
    before = settings.output.with_name("three") / "final" / "model.safetensors"
    assert (saved / "model.safetensors").read_bytes() == before.read_bytes()


def test_the_count_goes_on_after_a_resume(offline, monkeypatch):
    settings = offline("sft")
    (learner, step), (again, its_step) = begin(settings), begin(settings)
    overflow(monkeypatch, 1, 2, 3, 4)
    for _ in range(3):
        step()
    learner.non_finite_guard.check()
    again.load_state_dict(copy.deepcopy(learner.state_dict()))
    its_step()
    with pytest.raises(TrainingError, match="4 steps in a row"):
        again.non_finite_guard.check()


def test_a_record_with_a_broken_token_is_found(tiny, tmp_path, written):
    """The embedding of a byte of one record is NaN, under adapters: no step learns from it, and the file says which it is."""
    folder = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    (token,) = tokenizer("Z", add_special_tokens=False).input_ids
    model.config.tie_word_embeddings = False  # else every token's probability would be NaN
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    data = written("d.jsonl", [{"prompt": f"问{i}", "completion": f"答{i}" + "Z" * (i == 2)} for i in range(6)])
    settings = SFTConfig(
        model=str(folder), data=data, output=tmp_path / "run", batch_size=1, epochs=2, eval_fraction=0.0,
        sample_every=0, lora_rank=2, dtype="float32", learning_rate=1e-2, lora_alpha=4,
    )  # fmt: skip
    assert sft.train_sft(settings)["steps"] == 12
    left_out = read_jsonl(settings.output / "skipped.jsonl")
    assert [line["records"] for line in left_out] == [[f"{data}:3"]] * 2
    assert [line["not_finite"] for line in left_out] == [["loss/sft nan"]] * 2


# ------------------------------------------------------------------------------------------------------------- online

ONLINE = {
    "ppo": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "a2c": (A2CConfig, {}),
    "grpo": (GRPOConfig, {}),
    "online-dpo": (OnlineDPOConfig, {}),
    "everything": (
        PPOConfig,
        {"critic": "separate", "ema_decay": 0.5, "kl_target": 1.0, "kl_horizon": 40, "ptx_coef": 0.5},
    ),
}


@pytest.fixture
def online(config, demonstrations):
    """``online(name, **changes)``: settings of three steps; a minibatch is one prompt's four responses."""

    def make(name, **changes):
        kind, own = ONLINE[name]
        sizes = {"samples_per_prompt": 4, "ppo_epochs": 1, "minibatch_size": 4} if kind is not A2CConfig else {}
        sizes |= {"steps": 3, "learning_rate": 1e-2, "lr_schedule": "constant", "eval_fraction": 0.0}
        ptx = {"ptx_data": demonstrations} if "ptx_coef" in own else {}
        return config(kind, **(sizes | own | ptx | changes))

    return make


def too_large(word):
    """A reward that float32 does not hold for half of the responses to one prompt."""

    def reward(prompts, completions, **_):
        return [
            1e39 if word in prompt and i % 2 else float(len(c))
            for i, (prompt, c) in enumerate(zip(prompts, completions, strict=True))
        ]

    return reward


@pytest.mark.parametrize("name", often(ONLINE, ["online-dpo", "everything"]))
def test_nothing_online_notices_a_step_that_was_left_out(online, name, length, monkeypatch):
    """Every gradient of a step overflows: policy, critic, average and moments stay, bit for bit."""
    settings = online(name)
    learner = start(settings, [length]).learner
    step_online(learner)
    before = learned(learner)
    with monkeypatch.context() as patch:
        overflow(patch, *range(1, 100))
        metrics, _ = step_online(learner)
    assert differing(learned(learner), before) == []
    assert metrics["optimizer/skipped_steps"] >= 1
    assert all(map(math.isfinite, metrics.values())), "metrics are those of updates that were made"
    assert learner.state_dict()["skipped_in_a_row"] == 1
    step_online(learner)
    assert differing(learned(learner), before)
    assert learner.state_dict()["skipped_in_a_row"] == 0


def test_a_minibatch_that_was_left_out_is_in_no_mean_and_in_no_file(online, length, numbers, tmp_path, monkeypatch):
    """Means are over the minibatches that were learned from; the others' responses have no log-ratio."""
    losses, moved = [], []
    for skipped in ((), (1,), (2,), (3,), (4,)):  # two minibatches of the critic, then two of the policy
        settings = online(
            "separate", steps=1, rollouts="all", learning_rate=1e-9, output=tmp_path / f"without {skipped}"
        )
        with monkeypatch.context() as patch:
            overflow(patch, *skipped)
            TRAIN[PPOConfig](settings, rewards=[length])
        losses.append(numbers(settings.output)[0]["loss/value"])
        (file,) = (settings.output / "rollouts").iterdir()
        moved.append([ratio is not None for ratio in pq.read_table(file)["log_ratio"].to_pylist()])
    both, *ones = losses[:3]
    assert both == pytest.approx(sum(ones) / 2, rel=1e-4)
    assert min(ones) > 1
    assert losses[3:] == [both, both], "what the policy leaves out the critic learns from"
    assert moved[:3] == [[True] * 8] * 3
    assert sum(moved[3]) == 4
    assert moved[4] == [not row for row in moved[3]]


def test_the_records_mixed_in_are_named_too(online, length, demonstrations, monkeypatch):
    """Their tokens may be what is broken."""
    settings = online("everything", steps=1)
    overflow(monkeypatch, *range(1, 100))
    TRAIN[PPOConfig](settings, rewards=[length])
    left_out = read_jsonl(settings.output / "skipped.jsonl")[-1]  # the critic's are before the policy's
    assert {source.rpartition(":")[0] for source in left_out["records"]} == {settings.data, demonstrations}


@pytest.mark.parametrize("name", often(["grpo", "ppo"], ["ppo"]))
def test_a_reward_that_float32_does_not_hold_costs_its_minibatch_and_is_named(online, name, prompts, capsys):
    """Without whitening the other minibatches are learned from; with it no number of the rollout batch is left."""
    settings = online(name, steps=2, samples_per_prompt=2, minibatch_size=2)
    summary = TRAIN[type(settings)](settings, rewards=[too_large("苹果")])
    assert summary["steps"] == 2
    left_out = read_jsonl(settings.output / "skipped.jsonl")
    assert left_out
    for line in left_out:
        assert line["records"] == [f"{prompts}:9"], "the record with 苹果 and no other"
        assert {"loss/policy nan", "loss/value inf"} & set(line["not_finite"])
    logged = {line["step"]: line for line in read_metrics(settings.output)}
    of_step = logged[left_out[0]["step"]]
    assert of_step["optimizer/skipped_steps"] in ((1, 2) if name == "grpo" else (6,)), "two are of the value head"
    assert ("optimizer/grad_norm" in of_step) == (name == "grpo")
    assert ("loss/policy" in of_step) == (name == "grpo")
    assert of_step.get("loss/policy", 0.0) is not None, "the mean over the updates that were made: null would be NaN"
    assert capsys.readouterr().err.count("skipped a non-finite update") == len({line["step"] for line in left_out})
    weights = AutoModelForCausalLM.from_pretrained(settings.output / "final").state_dict()
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("name", often(["ppo", "grpo", "a2c"], ["ppo"]))
def test_an_online_run_of_nothing_but_broken_numbers_ends(online, name):
    """Online DPO would go on: it only ranks, and 1e39 is more than 12."""
    settings = online(name, steps=9)
    with pytest.raises(TrainingError, match=r"4 steps in a row were skipped .*last: step 4, update") as caught:
        TRAIN[ONLINE[name][0]](settings, rewards=[too_large("")])
    assert caught.value.status == 4
    assert (settings.output / "checkpoints" / "step-000004").is_dir()


def test_a_critic_that_never_learns_ends_the_run_too(online, length, numbers, monkeypatch):
    """Its updates, two of four in a step, are counted with the policy's, whose numbers are finite."""
    settings = online("separate", steps=9)
    overflow(monkeypatch, *(step for step in range(1, 40) if step % 4 in (1, 2)))
    with pytest.raises(
        TrainingError, match=r"4 steps in a row were skipped .*last: step 4, update 2: gradient norm inf"
    ):
        TRAIN[PPOConfig](settings, rewards=[length])
    assert [line["optimizer/skipped_steps"] for line in numbers(settings.output)] == [2.0] * 4


def test_exploded_ratios_cost_their_minibatch(online, make_learner, experience_of):
    """The policy is far from the one that sampled: approx_kl above 10 is no number to learn from, below it is.

    A ratio of whole responses is the product of its tokens', and has no such limit.
    """
    whole = {"importance_level": "sequence", "advantage": "rloo", "kl_in": "reward"}
    for distance, is_skipped, changes in ((0.5, False, {}), (4.0, True, {}), (0.9, False, whole)):
        learner = make_learner(online("grpo", ppo_epochs=2, **changes), torch.float32)
        experience = experience_of(learner)
        experience.old_logprobs.sub_(distance)
        before = [p.detach().clone() for p in learner.policy.parameters()]
        metrics = learn(learner, experience).metrics
        stood_still = all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
        assert stood_still == is_skipped
        assert ("optimizer/skipped_steps" in metrics) == is_skipped
    sums = MetricSums()
    sums.add({"policy/approx_kl": torch.tensor(10.0), "loss/policy": torch.tensor(1.0)})
    assert broken_numbers(sums, {}, 10.0) == {}
    before = dict(sums.totals)
    sums.add({"policy/approx_kl": torch.tensor(10.0)})
    assert broken_numbers(sums, before, 10.0) == {}, "each minibatch by itself"
    sums.add({"policy/approx_kl": torch.tensor(0.5)})
    assert broken_numbers(sums, before, 10.0) == {"policy/approx_kl": 10.5}


# ------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", often(MODULES, ["reward"]))
def test_weights_that_are_not_finite_are_never_saved(offline, tmp_path, name):
    learner, _ = begin(offline(name))
    learner.save(tmp_path / "whole")
    for bad in (math.nan, math.inf, -math.inf):
        next(learner.model.parameters()).data.view(-1)[-1] = bad
        with pytest.raises(CheckpointError, match=r"1 of .* trainable weights are not finite"):
            learner.save(tmp_path / "broken")
        assert not (tmp_path / "broken").exists()


def test_a_critic_that_is_not_finite_is_not_saved_either(online, length, tmp_path):
    learner = start(online("separate"), [length]).learner
    learner.critic.value_head.weight.data[0, 0] = math.nan
    with pytest.raises(CheckpointError, match=r"first: value_head\.weight"):
        learner.save(tmp_path / "model")
    learner.critic.value_head.weight.requires_grad_(False)
    learner.save(tmp_path / "model")  # what is frozen is not looked at


@pytest.mark.parametrize("broken", often(["critic", "reference"], ["critic"]))
def test_values_and_log_probs_that_are_not_finite_cost_the_step(online, length, broken):
    """Every one of them is NaN: nothing is learned, and the price of KL does not become NaN for good."""
    learner = start(online("everything"), [length]).learner
    module = getattr(learner, broken)
    saved = [p.detach().clone() for p in module.parameters()]
    before = learned(learner)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    metrics, _ = step_online(learner)
    assert metrics["optimizer/skipped_steps"] == 4, "two updates of each network"
    assert learner.non_finite_guard.in_a_row == 1
    assert math.isfinite(learner.kl.coef)
    with torch.no_grad():
        for parameter, right in zip(module.parameters(), saved, strict=True):
            parameter.copy_(right)
    assert differing(learned(learner), before) == []
    metrics, _ = step_online(learner)
    assert all(map(math.isfinite, metrics.values()))
    assert differing(learned(learner), before)
