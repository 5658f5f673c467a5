"""Memory that runs out: the same work with half the rows at a time, the same gradients, and no second time after a resume.

The pass that runs out is a real one: a hook in a real model raises what torch raises when more tokens come at a time than
"fit".
"""

import contextlib
import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from cases import often, pairs_often
from gradients import flat_gradient
from heedful import A2CConfig, GRPOConfig, MemoryFullError, OnlineDPOConfig, PPOConfig, train_ppo
from heedful.algorithms import ppo
from heedful.algorithms.online.evaluation import evaluate
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.online.update import Update
from heedful.algorithms.online.values import backward_critic
from heedful.algorithms.ppo import backward_minibatch, make_experience
from heedful.data.batches import AdaptiveMicroBatch
from heedful.errors import is_out_of_memory
from heedful.rewards import score
from heedful.training.metric_sums import MetricSums
from heedful.types import MicroBatch
from jsonl import timeless
from trainers import MODULES, begin, step_online
from trees import differing

SAYS = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = {"gpu": torch.OutOfMemoryError("CUDA out of memory."), "cpu": RuntimeError(SAYS), "python": MemoryError()}


@contextlib.contextmanager
def memory_of(most, *models, where="forward", error=ERRORS["gpu"], only_once=False):
    """Inside, a pass of these models over more than ``most`` tokens (with padding) runs out of memory. Yields when it did."""
    out, handles = [], []

    def run_out(tokens):
        if tokens > most and not (only_once and out):
            out.append(tokens)
            raise error

    def forward(_module, args):
        run_out(args[0].numel())

    def backward(_module, _args, output):
        if output.requires_grad and output.dim() == 3:
            tokens = output.shape[0] * output.shape[1]
            output.register_hook(lambda gradient: run_out(tokens) or gradient)

    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Embedding) and where == "forward":
                handles.append(module.register_forward_pre_hook(forward))
            elif where == "backward" and type(module).__name__.endswith("Norm"):
                handles.append(module.register_forward_hook(backward))
    try:
        yield out
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------ AdaptiveMicroBatch


def test_work_is_done_again_with_half_as_many_rows_until_it_fits(capsys):
    """Its random numbers are the same again, what it left is undone, and each halving is said once."""
    adaptive, left, seen, drawn = AdaptiveMicroBatch(), [], [], []

    def work(limit):
        seen.append(limit)
        drawn.append(float(torch.rand(())))
        left.append(1)
        if limit.rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    assert adaptive.run(work, MicroBatch(8, 100), rows=8, undo=left.clear) == "done"
    assert seen == [MicroBatch(8, 100), MicroBatch(4, 50), MicroBatch(2, 25)]
    assert len(set(drawn)) == 1
    assert left == [1]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(", so")[0] for line in said] == [
        "heedful: out of memory with 8 rows at a time",
        "heedful: out of memory with 4 rows at a time",
    ]
    assert "--micro-batch-size 2 does so from the start" in said[1]
    assert adaptive.run(work, MicroBatch(8, 100), rows=8) == "done"
    assert seen[3:] == [MicroBatch(2, 25)], "it is remembered"
    assert capsys.readouterr().err == ""
    again = AdaptiveMicroBatch()
    again.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
    assert again.within(MicroBatch(8)) == MicroBatch(2, 25)
    assert again.within(MicroBatch(1, 9)) == MicroBatch(1, 9), "smaller settings stay"


def test_half_of_more_rows_than_there_are_would_be_no_fewer():
    adaptive, seen = AdaptiveMicroBatch(), []

    def work(limit):
        seen.append(limit.rows)
        if limit.rows > 2:
            raise MemoryError

    adaptive.run(work, MicroBatch(64), rows=5)
    assert seen == [64, 3, 2]


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_do(error):
    adaptive, seen = AdaptiveMicroBatch(), []

    def work(limit):
        seen.append(limit.rows)
        raise error

    with pytest.raises(MemoryFullError, match=r"one row at a time .*heedful plan .*--gradient-checkpointing") as caught:
        adaptive.run(work, MicroBatch(3), rows=3)
    assert seen == [3, 2, 1]
    assert caught.value.status == 3


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), ValueError("坏了"), MemoryFullError("已满")], ids=str)
def test_other_errors_are_none_of_its_business(error):
    calls = []

    def work(_limit):
        calls.append(1)
        raise error

    with pytest.raises(type(error), match=str(error)):
        AdaptiveMicroBatch().run(work, MicroBatch(4), rows=4)
    assert calls == [1]


def test_what_torch_really_raises_is_known():
    """More memory than any machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("expected scalar type Float"))


# -------------------------------------------------------------------------------------------------- trainers from data


@pytest.mark.parametrize(
    ("name", "where"), pairs_often(MODULES, ["forward", "backward"], [("sft", "forward"), ("kto", "backward")])
)
def test_a_step_is_then_that_of_the_smaller_micro_batch(offline, name, where):
    """Bit for bit, with its metrics: nothing of the attempt is left. Dropout draws the same numbers."""
    changes = {"lora_rank": 4, "lora_dropout": 0.3} if name == "sft" else {}
    learner, step = begin(offline(name, batch_size=4, micro_batch_size=4, **changes))
    with memory_of({"sft": 60, "kto": 30}.get(name, 50), learner.model, where=where) as out:
        found = timeless(step())
        fit = learner.adaptive.found.rows
        again = timeless(step())
        assert out, "the memory ran out"
        assert learner.adaptive.found.rows == fit < 4
    other, its_step = begin(offline(name, batch_size=4, micro_batch_size=fit, **changes))
    assert found == timeless(its_step())
    assert again == timeless(its_step())
    assert differing(learner.state_dict()["model"], other.state_dict()["model"]) == []


@pytest.mark.parametrize("name", often(MODULES, ["reward"]))
def test_a_resumed_run_does_not_run_out_again(offline, name):
    learner, step = begin(offline(name, batch_size=4, micro_batch_size=4))
    most = 30 if name == "kto" else 50
    with memory_of(most, learner.model) as out:
        step()
        assert out
        again, its_step = begin(offline(name, batch_size=4, micro_batch_size=4))
        again.load_state_dict(copy.deepcopy(learner.state_dict()))
    with memory_of(most, again.model) as out:
        its_step()
    assert out == []


# ------------------------------------------------------------------------------------------------------------- online


@pytest.mark.exhaustive
def test_the_gradient_is_that_of_the_smaller_micro_batch(variant, make_learner, experience_of, moved):
    """Bit for bit in float32: in every algorithm, wherever in the pass the memory ran out."""
    learner = make_learner(variant(micro_batch_size=16), torch.float32, noise=0.05)
    experience = moved(experience_of(learner))
    for where in ("forward", "backward"):
        learner.adaptive.found = None
        for module in learner.trained:
            module.zero_grad()
        recorder = Recorder(learner, experience.kl)
        update = Update(learner, recorder)
        recorder.add({"loss/policy": torch.tensor(3.0)})
        with memory_of(130, *learner.trained, where=where) as out:
            for attempt in update.retry_on_oom(16):
                with attempt as limit:
                    backward_minibatch(learner, experience, recorder, limit)
        assert out
        assert learner.adaptive.found.rows < 16
        found = flat_gradient(*learner.trained)
        smaller = replace(learner.config, micro_batch_size=learner.adaptive.found.rows)
        fresh = replace(learner, config=smaller, adaptive=AdaptiveMicroBatch())
        for module in learner.trained:
            module.zero_grad()
        expected = Recorder(fresh, experience.kl)
        expected.add({"loss/policy": torch.tensor(3.0)})
        backward_minibatch(fresh, experience, expected, fresh.micro_batch)
        assert torch.equal(found, flat_gradient(*learner.trained))
        assert recorder.sums.means(1) == expected.sums.means(1)


def test_a_critics_numbers_are_those_of_the_attempt_that_fits(config, make_learner, experience_of, moved):
    """A micro-batch that had passed before memory ran out does not count twice."""
    learner = make_learner(config(critic="separate", micro_batch_size=4), torch.float32, noise=0.05)
    experience = moved(experience_of(learner))
    rows, sizes = torch.arange(len(experience.rows)), []
    read = learner.critic.trunk.get_input_embeddings()
    hook = read.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    backward_critic(learner, experience, rows, MetricSums())
    hook.remove()
    assert sizes[0] < max(sizes), "the first passes"
    learner.critic.zero_grad()
    sums = MetricSums()
    sums.add({"loss/value": torch.tensor(3.0)})
    with memory_of(max(sizes) - 1, learner.critic) as out:
        backward_critic(learner, experience, rows, sums)
    assert out
    found = flat_gradient(learner.critic)
    learner.critic.zero_grad()
    smaller = replace(learner.config, micro_batch_size=learner.adaptive.found.rows)
    expected = MetricSums()
    expected.add({"loss/value": torch.tensor(3.0)})
    fresh = replace(learner, config=smaller, adaptive=AdaptiveMicroBatch())
    backward_critic(fresh, experience, rows, expected)
    assert sums.means(1) == expected.means(1)
    assert torch.equal(found, flat_gradient(learner.critic))


ONLINE = {
    "ppo": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "warm-up": (PPOConfig, {"critic": "separate", "critic_warmup_steps": 1}),
    "ptx": (PPOConfig, {"ptx_coef": 0.5}),
    "a2c": (A2CConfig, {}),
    "grpo": (GRPOConfig, {}),
    "online-dpo": (OnlineDPOConfig, {}),
    "online-dpo of four": (OnlineDPOConfig, {"samples_per_prompt": 4}),
}


@pytest.fixture
def online(config, demonstrations, length):
    """``online(name, **changes)``: a learner before its first step."""

    def make(name, **changes):
        kind, own = ONLINE[name]
        ptx = {"ptx_data": demonstrations, "minibatch_size": 4} if "ptx_coef" in own else {}
        settings = {"learning_rate": 1e-2, "lr_schedule": "constant"} | own | ptx | changes
        if "minibatch_size" in settings and kind is A2CConfig:
            del settings["minibatch_size"]
        return start(config(kind, **settings), [length])

    return make


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.exhaustive
def test_every_pass_of_a_step_goes_on_with_fewer_rows(online, name, capsys):
    """Sampling, old log-probs, reference, values, forward and backward, records mixed in: the same up to rounding."""
    _, learner, held_out, _ = online(name)
    _, undisturbed, _, _ = online(name)
    models = [model for model in (learner.policy, learner.reference, learner.critic) if model is not None]
    with memory_of(50, *models) as out, memory_of(40, *models, where="backward"):
        found = [timeless(step_online(learner)[0]) for _ in range(2)]
        found.append(evaluate(learner, held_out))
    expected = [timeless(step_online(undisturbed)[0]) for _ in range(2)]
    expected.append(evaluate(undisturbed, held_out))
    assert out
    assert learner.adaptive.found.rows < 8
    for one, same in zip(found, expected, strict=True):
        assert one == pytest.approx(same, rel=2e-3, abs=2e-4), "two steps of Adam make rounding larger"
    for parameter, same in zip(learner.policy.parameters(), undisturbed.policy.parameters(), strict=True):
        torch.testing.assert_close(parameter, same, rtol=1e-2, atol=2e-3)
    assert torch.equal(learner.generator.get_state(), undisturbed.generator.get_state())
    said = capsys.readouterr().err
    assert 1 <= said.count("out of memory with 8 rows at a time") <= 2, "once for sampling and once for the rest"


def test_passes_without_gradients_halve_what_is_sampled_and_read_at_a_time(online):
    """What is learned from at a time keeps more in memory, and less of it at a time: it may fit all the same."""
    _, learner, _, _ = online("ppo", rollout_micro_batch_size=8)
    with memory_of(50, learner.policy, learner.reference) as out:
        make_experience(learner, rollout(learner, next(learner.prompts)))
    assert out
    assert learner.sampler.adaptive.found.rows < 8
    assert learner.adaptive.found is None


@pytest.mark.parametrize("error", often(list(ERRORS.values()), [ERRORS["gpu"]]), ids=ERRORS)
def test_generation_with_fewer_rows_gives_the_same_responses(online, error):
    _, learner, _, _ = online("ppo", rollout_micro_batch_size=8)
    _, undisturbed, _, _ = online("ppo", rollout_micro_batch_size=8)
    prompts = next(learner.prompts)
    expected = undisturbed.sampler.generate(undisturbed.policy, prompts, undisturbed.generator)
    # the sampler's copy shares the embedding module's weights, not its hooks: it is torch that runs out here
    right, calls = torch.nn.functional.embedding, []

    def embedding(ids, *args, **options):
        if ids.shape[0] > 3:
            calls.append(len(ids))
            raise error
        return right(ids, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "embedding", embedding)
        found = learner.sampler.generate(learner.policy, prompts, learner.generator)
    assert calls
    assert torch.equal(found.ids, expected.ids)
    assert found.texts == expected.texts
    assert learner.sampler.adaptive.found.rows <= 3
    assert learner.sampler.adaptive.flag == "--rollout-micro-batch-size"
    assert torch.equal(learner.generator.get_state(), undisturbed.generator.get_state())


def test_a_reward_model_goes_on_with_fewer_rows_and_the_state_has_all_adaptive_micro_batches(online, reward_model):
    _, learner, _, _ = online("ppo", rewards=(reward_model,), micro_batch_size=8)
    reward = learner.rewards[0].function
    completions = learner.sampler.generate(learner.policy, next(learner.prompts), learner.generator).completions
    expected = score(learner.rewards, completions)[0]
    with memory_of(60, reward.model) as out:
        found = score(learner.rewards, completions)[0]
    assert out
    assert found == pytest.approx(expected, abs=1e-5)
    assert reward.adaptive.found.rows < 8
    with memory_of(1, reward.model), pytest.raises(MemoryFullError):
        score(learner.rewards, completions)
    names = list(learner.adaptives)
    assert names[:2] == ["learning", "sampling"]
    assert len(names) == 3
    for i, adaptive in enumerate(learner.adaptives.values()):
        adaptive.found = MicroBatch(i + 1, None)
    state = copy.deepcopy(learner.state_dict())
    for adaptive in learner.adaptives.values():
        adaptive.found = None
    learner.load_state_dict(state)
    assert [adaptive.found for adaptive in learner.adaptives.values()] == [MicroBatch(i + 1) for i in range(3)]


def test_an_attempt_that_fails_among_the_records_mixed_in_leaves_nothing(online):
    """The minibatch is done again with the same records, and its responses are in the metrics once."""
    _, learner, _, _ = online("ptx", micro_batch_size=4, rollout_micro_batch_size=8)
    _, smaller, _, _ = online("ptx", micro_batch_size=2, rollout_micro_batch_size=8)
    experience = make_experience(learner, rollout(learner, next(learner.prompts)))
    passes = []

    def run_out(_module, args):
        passes.append(args[0])
        if len(passes) == 2:  # the first is that of the minibatch's four responses
            raise ERRORS["gpu"]

    learner.policy.lm.get_input_embeddings().register_forward_pre_hook(run_out)
    found = timeless(ppo.learn(learner, experience).metrics)
    assert learner.adaptive.found.rows == 2
    assert learner.ptx.order.state_dict() != {"epoch": 0, "cursor": 0}
    expected = timeless(ppo.learn(smaller, make_experience(smaller, rollout(smaller, next(smaller.prompts)))).metrics)
    assert "loss/ptx" in found
    assert found == expected
    assert learner.ptx.order.state_dict() == smaller.ptx.order.state_dict()


def test_a_run_that_has_no_room_for_one_row_ends_with_status_3(config, length, monkeypatch):
    """In the middle of a run; what was learned is kept."""
    settings = config(eval_fraction=0.0, steps=2, rollout_batch_size=4, minibatch_size=4)
    right, steps = ppo.learn, []

    def learn_then_no_more(learner, experience):
        steps.append(1)
        if len(steps) < 2:
            return right(learner, experience)
        with memory_of(3, learner.policy):
            return right(learner, experience)

    monkeypatch.setattr(ppo, "learn", learn_then_no_more)
    with pytest.raises(MemoryFullError) as caught:
        train_ppo(settings, rewards=[length])
    assert caught.value.status == 3
    assert (settings.output / "checkpoints" / "step-000002-partial").is_dir()
