"""However a run ends, its folder holds what was learned: complete models where the display says, and nothing half-written."""

import os
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases import tuples_often
from heedful import PPOConfig, RewardError, faults, train_ppo
from heedful.errors import Terminated
from heedful.models import load_policy
from jsonl import read_metrics
from trainers import ONLINE


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
    """If nothing is held out: the trial is the first call."""
    return failing(1 + step, error)


def names(folder):
    return {path.name for path in folder.iterdir()}


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.fixture
def never(config):
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
EVERYTHING = {"lora_rank": 4, "ema_decay": 0.5, "critic": "separate"}
"""Adapters, the average of the weights, and a critic of its own."""
RUNS = [(PPOConfig, "reward", EVERYTHING)]
OTHERS = [(kind, ending, {}) for kind in ONLINE for ending in ENDINGS]


@pytest.mark.parametrize(("kind", "ending", "changes"), tuples_often([*RUNS, *OTHERS], RUNS))
def test_what_was_learned_before_a_step_failed_is_saved(never, length, tmp_path, capsys, kind, ending, changes):
    """All files of the interrupted model are bit for bit those of a run with so many steps, and it can be loaded."""
    raised, seen = ENDINGS[ending]
    settings = never(kind, **changes)
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
    with_head = kind is PPOConfig and not changes
    load_policy(str(saved), device=torch.device("cpu"), compute_dtype=torch.float32, with_value_head=with_head)
    ONLINE[kind](never(kind, **changes, steps=2, output=tmp_path / "two"), rewards=[length])
    of_the_run = {saved / "MANIFEST.json", *(saved / "resume").iterdir()}
    found, expected = (
        {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file() and path not in of_the_run}
        for folder in (saved, tmp_path / "two" / "final")
    )
    assert found.keys() == expected.keys()
    assert sum(path.suffix == ".safetensors" for path in found) >= (3 if changes else 1), "policy, critic, value head"
    assert [path for path in found if found[path].read_bytes() != expected[path].read_bytes()] == []


def test_an_evaluation_that_fails_in_the_middle(config, capsys):
    """Trial, evaluation, step, step, evaluation: the model of its step is saved, and the best so far is kept."""
    settings = config(steps=4, eval_every=2)
    with pytest.raises(RewardError):
        train_ppo(settings, rewards=[failing(5, ValueError("坏了"))])
    assert names(settings.output / "checkpoints") == {"step-000002"}
    assert "after step 2 of 4" in capsys.readouterr().err
    weights(settings.output / "best")
    assert not (settings.output / "final").exists()


def test_an_evaluation_that_fails_after_the_last_step(config, length, capsys):
    """final/ is there already; the error is still raised, and the same command does the rest."""
    settings = config()
    with pytest.raises(RewardError):
        train_ppo(settings, rewards=[failing(5, ValueError("坏了"))])
    said = capsys.readouterr().err
    assert f"the model is {settings.output / 'final'}, and the same command does the rest" in said
    assert not (settings.output / "summary.json").exists()
    before = (settings.output / "final" / "model.safetensors").read_bytes()
    assert train_ppo(replace(settings, allow_change=("data",)), rewards=[length])["last_evaluation"]
    assert (settings.output / "final" / "model.safetensors").read_bytes() == before


def full_disk(*, times):
    """The first saves find no space."""
    faults.plan(",".join(f"save.files:enospc@{visit}" for visit in range(1, times + 1)))


def test_a_full_disk_does_not_hide_the_first_error(never, capsys):
    settings = never()
    full_disk(times=9)
    with pytest.raises(RewardError, match="坏了"):
        train_ppo(settings, rewards=[in_step(3, ValueError("坏了"))])
    said = capsys.readouterr().err
    assert "after step 2 of 5; no checkpoint could be saved: OSError: [Errno 28] No space left on device" in said
    assert "resumes from" not in said
    assert not list(settings.output.rglob("*.safetensors"))


@pytest.mark.parametrize("times", [1, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_a_full_disk_at_the_last_save(never, length, capsys, times):
    """Is the error of the run; if there is space after all, for instance because a half-written model is gone, it is used."""
    settings = never(steps=2)
    full_disk(times=times)
    with pytest.raises(OSError, match="No space left"):
        train_ppo(settings, rewards=[length])
    assert not (settings.output / "final").exists()
    saved = settings.output / "checkpoints" / "step-000002"
    assert saved.exists() == (times == 1)
    assert ("the same command resumes from" in capsys.readouterr().err) == (times == 1)
    if times == 1:
        weights(saved)


INTERRUPTED = """
import os, signal, time
calls = []

def length(completions):
    calls.append(1)
    if len(calls) >= 4:
        RAISED
        time.sleep(100)
    return [float(len(completion)) for completion in completions]
"""
KILL = f"os.kill({os.getpid()}, signal.SIG"  # a function that may hang runs in a process of its own
ENDS = [
    (f"{KILL}INT)", 130, "interrupted"),
    (f"{KILL}TERM)", 143, "terminated"),
    ("raise ValueError('坏了')", 4, "坏了"),
]


@pytest.mark.parametrize(
    ("raised", "status", "message"), tuples_often(ENDS, ENDS[:1]), ids=["Ctrl-C", "SIGTERM", "error"]
)
def test_the_command_line_says_where_an_interrupted_run_is(heedful, tiny, prompts, tmp_path, raised, status, message):
    """And returns 130 or 143, as programs do that these signals ended. They come while a reward is waited for."""
    (tmp_path / "rewards.py").write_text(INTERRUPTED.replace("RAISED", raised), encoding="utf-8")
    flags = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "eval_fraction": 0, "steps": 5}
    flags |= {"rollout_batch_size": 4, "minibatch_size": 4, "max_new_tokens": 4, "sample_every": 0, "dtype": "float32"}
    done = heedful("ppo", **flags, rewards=f"python:{tmp_path / 'rewards.py'}:length", device="cpu")
    assert done.status == status
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert f"the same command resumes from {saved}" in done.err
    last = done.err.splitlines()[-1]
    assert message in last if status == 4 else last == f"heedful: {message}"
    weights(saved)
