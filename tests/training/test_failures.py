"""However a run ends, its folder holds what was learned: complete models where the display says, and nothing half-written."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cases import often
from heedful import (
    PPOConfig,
    RewardError,
    TrainingError,
    train_ppo,
)
from heedful.algorithms import ppo
from heedful.algorithms.online import learner as online_learner
from heedful.algorithms.online import loop
from heedful.errors import Terminated
from heedful.models import load_policy
from jsonl import read_metrics
from trainers import MODULES, ONLINE, TRAIN

BEFORE_STEPS = 1
"""Calls of a reward before the first step, if nothing is held out: the trial."""


def failing(call, error):
    """A reward that raises at its so-manieth call and each after it, and before is the length."""
    calls = []

    def reward(completions):
        calls.append(len(completions))
        if len(calls) >= call:
            raise error
        return [float(len(completion)) for completion in completions]

    return reward


def in_step(step, error):
    return failing(BEFORE_STEPS + step, error)


def names(folder):
    return {path.name for path in folder.iterdir()}


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def never(config, tmp_path):
    """``never(Config, **changes)``: settings of five steps without an evaluation, whose steps do not know their number."""

    def make(kind=PPOConfig, **changes):
        run = {"eval_fraction": 0.0, "steps": 5, "lr_schedule": "constant", "learning_rate": 1e-2}
        return config(kind, **(run | changes))

    return make


@pytest.fixture
def nothing_half_written(tmp_path):
    yield
    assert list(tmp_path.rglob(".*")) == []


pytestmark = pytest.mark.usefixtures("nothing_half_written")

ENDINGS = {
    "reward": (ValueError("坏了"), RewardError),
    "keyboard": (KeyboardInterrupt(), KeyboardInterrupt),
    "terminated": (Terminated(), Terminated),
}
OFTEN = set(zip(ONLINE, ENDINGS, strict=True))


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        pytest.param(kind, ending, marks=() if (kind, ending) in OFTEN else pytest.mark.exhaustive)
        for kind in ONLINE
        for ending in ENDINGS
    ],
)
def test_what_was_learned_before_a_step_failed_is_saved(never, length, tmp_path, capsys, kind, ending):
    """The interrupted model is bit for bit that of a run with so many steps."""
    raised, seen = ENDINGS[ending]
    settings = never(kind)
    with pytest.raises(seen):
        ONLINE[kind](settings, rewards=[in_step(3, raised)])
    assert names(settings.output) == {
        "run.json", "config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints",
        "alarms.jsonl",  # its responses are cut
    }  # fmt: skip
    assert [line["step"] for line in read_metrics(settings.output)] == [1, 2]
    assert names(settings.output / "checkpoints") == {"step-000002"}
    saved = settings.output / "checkpoints" / "step-000002"
    said = capsys.readouterr().err
    name = {KeyboardInterrupt: "Ctrl-C", Terminated: "SIGTERM"}.get(seen, seen.__name__)
    assert f"stopped by {name} after step 2 of 5; the same command resumes from {saved}" in said
    load_policy(str(saved), device=torch.device("cpu"), compute_dtype=torch.float32, with_value_head=kind is PPOConfig)
    ONLINE[kind](never(kind, steps=2, output=tmp_path / "two"), rewards=[length])
    assert equal(weights(saved), weights(tmp_path / "two" / "final"))


def test_an_interrupted_run_is_a_run(never, length):
    """It is protected, can be replaced, and training can go on from what it left."""
    settings = never()
    with pytest.raises(RewardError):
        train_ppo(settings, rewards=[in_step(3, ValueError("坏了"))])
    saved = settings.output / "checkpoints" / "step-000002"
    onwards = never(model=str(saved), steps=1, output=settings.output.with_name("onwards"))
    assert train_ppo(onwards, rewards=[length])["steps"] == 1
    train_ppo(never(overwrite=True, steps=1), rewards=[length])
    assert not saved.exists()
    assert (settings.output / "final").is_dir()


def spoil(patch, module, spoilt_steps, function="accumulate"):
    """A gradient of each of these steps is not finite."""
    right, steps = getattr(module, function), []

    def spoilt(model, *arguments, **options):
        result = right(model, *arguments, **options)
        steps.append(1)
        if len(steps) in spoilt_steps:
            parameters = getattr(model, "policy", model).parameters()
            next(p for p in parameters if p.grad is not None).grad.view(-1)[0] = torch.nan
        return result

    patch.setattr(module, function, spoilt)


@pytest.mark.parametrize("name", often(MODULES, ["sft", "kto"]))
def test_a_gradient_that_is_no_number_leaves_the_weights_before_it(offline, monkeypatch, capsys, tmp_path, name):
    """The run ends after the last of the steps that it could not make."""
    settings = offline(name, max_steps=8)
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    with monkeypatch.context() as patch:
        spoil(patch, MODULES[name], (3, 4, 5, 6))
        with pytest.raises(
            TrainingError, match=r"4 steps in a row were skipped .*last: step 6, update 1: gradient norm nan"
        ):
            TRAIN[type(settings)](settings)
    saved = settings.output / "checkpoints" / "step-000006"
    said = capsys.readouterr().err
    assert f"stopped by TrainingError after step 6 of 8; the same command resumes from {saved}" in said
    TRAIN[type(settings)](offline(name, output=tmp_path / "two", max_steps=2))
    found, expected = (auto.from_pretrained(f).state_dict() for f in (saved, tmp_path / "two" / "final"))
    assert equal(found, expected)
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_a_gradient_that_is_no_number_ends_ppo_too(never, length, monkeypatch):
    settings = never(ppo_epochs=1, steps=9)
    spoil(monkeypatch, ppo, (3, 4, 5, 6), "backward_minibatch")
    with pytest.raises(TrainingError, match="last: step 6, update 1: gradient norm nan"):
        train_ppo(settings, rewards=[length])
    assert names(settings.output / "checkpoints") == {"step-000006"}
    saved = weights(settings.output / "checkpoints" / "step-000006")
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_an_interrupted_run_saves_what_it_would_have_saved(never, length, tmp_path):
    """Adapters, the average of the weights, and a critic of its own."""
    changes = {"lora_rank": 4, "ema_decay": 0.5, "critic": "separate"}
    with pytest.raises(KeyboardInterrupt):
        train_ppo(never(**changes), rewards=[in_step(3, KeyboardInterrupt())])
    train_ppo(never(**changes, steps=2, output=tmp_path / "two"), rewards=[length])
    saved, two = tmp_path / "run" / "checkpoints" / "step-000002", tmp_path / "two" / "final"
    files = {path.relative_to(two) for path in two.rglob("*") if path.is_file()}
    of_the_run = {saved / "MANIFEST.json", *(saved / "resume").iterdir()}
    assert {path.relative_to(saved) for path in saved.rglob("*") if path.is_file() and path not in of_the_run} == files
    tensors = [path for path in files if path.suffix == ".safetensors"]
    assert len(tensors) >= 3, "policy, critic, value head"
    assert all((saved / path).read_bytes() == (two / path).read_bytes() for path in tensors)


def test_an_evaluation_that_fails_in_the_middle(config, capsys):
    """Trial, evaluation, step, step, evaluation: the model of its step is saved, and the best so far is kept."""
    settings = config(steps=4, eval_every=2)
    with pytest.raises(RewardError):
        train_ppo(settings, rewards=[failing(5, ValueError("坏了"))])
    assert names(settings.output / "checkpoints") == {"step-000002"}
    assert "after step 2 of 4" in capsys.readouterr().err
    weights(settings.output / "best")
    assert not (settings.output / "final").exists()


@pytest.mark.parametrize("raised", [ValueError("坏了"), KeyboardInterrupt()], ids=["error", "keyboard"])
def test_an_evaluation_that_fails_after_the_last_step(config, length, tmp_path, capsys, raised):
    """final/ is there already; the error is still raised, and the run goes on to its evaluation and summary."""
    settings = config(learning_rate=1e-2)
    with pytest.raises((RewardError, KeyboardInterrupt)):
        train_ppo(settings, rewards=[failing(5, raised)])
    said = capsys.readouterr().err
    assert f"the model is {settings.output / 'final'}, and the same command does the rest" in said
    assert not (settings.output / "summary.json").exists()
    train_ppo(config(learning_rate=1e-2, output=tmp_path / "whole"), rewards=[length])
    assert equal(weights(settings.output / "final"), weights(tmp_path / "whole" / "final"))


def test_samples_that_fail_after_the_last_step(never, length, monkeypatch):
    settings = never(sample_every=5, steps=2)

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "sample_rows", fails)
    with pytest.raises(OSError, match="No space left"):
        train_ppo(settings, rewards=[length])
    weights(settings.output / "final")
    assert names(settings.output / "checkpoints") == {"step-000002"}


def full_disk(patch, *, times):
    """The first saves write a part and then find no space."""
    right, calls = online_learner.save_policy, []

    def save(policy, tokenizer, folder, **options):
        calls.append(folder)
        if len(calls) <= times:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        right(policy, tokenizer, folder, **options)

    patch.setattr(online_learner, "save_policy", save)


def test_a_full_disk_does_not_hide_the_first_error(never, monkeypatch, capsys):
    settings = never()
    full_disk(monkeypatch, times=9)
    with pytest.raises(RewardError, match="坏了"):
        train_ppo(settings, rewards=[in_step(3, ValueError("坏了"))])
    said = capsys.readouterr().err
    assert "after step 2 of 5; no checkpoint could be saved: OSError: [Errno 28] No space left on device" in said
    assert "resumes from" not in said
    assert not list(settings.output.rglob("*.safetensors"))


@pytest.mark.parametrize("times", [1, 9], ids=["once", "always"])
def test_a_full_disk_at_the_last_save(never, length, monkeypatch, capsys, times):
    """Is the error of the run; if there is space after all, for instance because a half-written model is gone, it is used."""
    settings = never(steps=2)
    full_disk(monkeypatch, times=times)
    with pytest.raises(OSError, match="No space left"):
        train_ppo(settings, rewards=[length])
    assert not (settings.output / "final").exists()
    saved = settings.output / "checkpoints" / "step-000002"
    assert saved.exists() == (times == 1)
    assert ("the same command resumes from" in capsys.readouterr().err) == (times == 1)
    if times == 1:
        weights(saved)


def test_a_second_interrupt_while_saving_leaves_nothing_half_written(never, monkeypatch):
    def save(policy, tokenizer, folder, **_):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    settings = never()
    monkeypatch.setattr(online_learner, "save_policy", save)
    with pytest.raises(KeyboardInterrupt):
        train_ppo(settings, rewards=[in_step(3, ValueError("坏了"))])
    assert not list(settings.output.rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ before the first step


def test_a_reward_that_fails_at_the_first_step_leaves_the_old_run(config, length, tmp_path):
    """--overwrite deletes the old run only when the new one has done a step. It fails after the trial and an evaluation."""
    train_ppo(config(steps=1), rewards=[length])
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    for raised, seen in ((ValueError("坏了"), RewardError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(seen):
            train_ppo(config(overwrite=True, eval_fraction=0.3), rewards=[failing(3, raised)])
        assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_run_that_fails_before_its_first_step_leaves_nothing(never, tmp_path, capsys):
    with pytest.raises(RewardError, match="too many"):
        train_ppo(never(), rewards=[in_step(1, ValueError("too many"))])
    assert not (tmp_path / "run").exists()
    assert "resumes" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (f"os.kill({os.getpid()}, signal.SIGINT)", 130, "heedful: interrupted\n"),
        pytest.param(
            f"os.kill({os.getpid()}, signal.SIGTERM)", 143, "heedful: terminated\n", marks=pytest.mark.exhaustive
        ),
        ("raise ValueError('坏了')", 4, "坏了"),
    ],
    ids=["Ctrl-C", "SIGTERM", "error"],
)
def test_the_command_line_says_where_an_interrupted_run_is(heedful, tiny, prompts, tmp_path, raised, status, message):
    """And returns 130 or 143, as programs do that these signals ended. They come while a reward is waited for."""
    (tmp_path / "rewards.py").write_text(
        "import os, signal, time\n"
        "calls = []\n"
        "def length(completions):\n"
        "    calls.append(1)\n"
        "    if len(calls) >= 4:\n"
        f"        {raised}\n"
        "        time.sleep(100)\n"
        "    return [float(len(completion)) for completion in completions]\n",
        encoding="utf-8",
    )
    flags = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "eval_fraction": 0, "steps": 5}
    flags |= {"rollout_batch_size": 4, "minibatch_size": 4, "max_new_tokens": 4, "sample_every": 0, "dtype": "float32"}
    done = heedful("ppo", **flags, rewards=f"python:{tmp_path / 'rewards.py'}:length", device="cpu")
    assert done.status == status
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert f"the same command resumes from {saved}" in done.err
    assert done.err.endswith(message) or (status == 4 and message in done.err.splitlines()[-1])
    weights(saved)


# -------------------------------------------------------------------------------------------------------------- patience


def test_a_run_that_stops_early_is_complete(config, tmp_path, capsys):
    """Scores fall with every call, so the second evaluation after the start is one too many."""
    calls = []

    def worse(completions):
        calls.append(1)
        return [float(-len(calls))] * len(completions)

    summary = train_ppo(config(steps=9, eval_every=1, early_stopping_patience=2, kl_coef=0.0), rewards=[worse])
    assert (summary["steps"], summary["stopped_early"]) == (2, True)
    assert {"best", "final", "summary.json"} <= names(tmp_path / "run")
    assert "stopped at step 2 by early stopping: 2 evaluations in a row without improvement" in capsys.readouterr().err
    weights(tmp_path / "run" / "final")
