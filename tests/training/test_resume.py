"""A run that was killed goes on as if it had not been: weights, optimizer, metrics and the order of samples, bit for bit."""

import functools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import worlds
from cases import often, pairs_often
from heedful import (
    CriticConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    faults,
)  # fmt: skip
from heedful.training.checkpoints import read_state
from heedful.training.early_stopping import EarlyStopping
from jsonl import read_jsonl, write_jsonl
from trainers import TRAIN
from trees import differing

OFFLINE = {"max_steps": 4, "batch_size": 2, "save_every": 1, "eval_every": 2, "sample_every": 2, "learning_rate": 1e-2}
OFFLINE |= {"eval_fraction": 0.4, "dtype": "float32", "save_total_limit": 0}
ONLINE = {"steps": 4, "save_every": 1, "eval_every": 2, "sample_every": 2, "learning_rate": 1e-2, "save_total_limit": 0}
ONLINE |= {"eval_fraction": 0.3, "rollout_batch_size": 8, "samples_per_prompt": 2, "minibatch_size": 8}
ONLINE |= {"max_new_tokens": 12, "dtype": "float32"}
RUNS = {
    "sft": (SFTConfig, OFFLINE),
    "sft lora": (SFTConfig, {**OFFLINE, "lora_rank": 2, "lora_dropout": 0.2}),
    "reward": (RewardConfig, OFFLINE),
    "dpo": (DPOConfig, OFFLINE),
    "dpo nll": (DPOConfig, {**OFFLINE, "length_normalise": True, "nll_coef": 0.5}),
    "simpo": (DPOConfig, {**OFFLINE, "loss": "simpo"}),
    "orpo": (DPOConfig, {**OFFLINE, "loss": "orpo"}),
    "kto": (KTOConfig, OFFLINE),
    "ppo shared": (PPOConfig, {**ONLINE, "kl_target": 1.0, "early_stopping_patience": 9}),
    "ppo separate": (PPOConfig, {**ONLINE, "critic": "separate", "critic_warmup_steps": 1}),
    "critic": (CriticConfig, {**ONLINE, "early_stopping_patience": 9}),
    "sao": (
        PPOConfig,
        {**ONLINE, "policy_loss": "sao", "kl_coef": 0.0, "critic": "separate", "value_epochs": 2, "minibatch_size": 4}
        | {"ppo_epochs": 1, "value_freeze": ("attn",), "gae_lambda_alpha": 1.5, "critic_warmup_steps": 1},
    ),
    "ppo lora": (PPOConfig, {**ONLINE, "lora_rank": 2}),
    "ppo average": (PPOConfig, {**ONLINE, "ema_decay": 0.5}),
    "ppo mixed": (PPOConfig, {**ONLINE, "ptx_coef": 0.5, "score_norm_samples": 8}),
    "grpo": (GRPOConfig, ONLINE),
    "dapo": (
        GRPOConfig,
        {**ONLINE, "dynamic_sampling_rounds": 2, "score_clip": 11.0, "overlong_buffer": 4, "target_entropy": 5.565},
    ),
    "online dpo": (OnlineDPOConfig, ONLINE),
    "ppo turns": (
        PPOConfig,
        {**ONLINE, "environment": (f"python:{worlds.__file__}:Deadly",), "max_turns": 3, "max_new_tokens": 60},
    ),
}
POINTS = list(faults.POINTS)
OFFLINE_KINDS = (SFTConfig, RewardConfig, DPOConfig, KTOConfig)
OF_ONLINE_RUNS = {"generation", "reward.call", "rollout", "reward", "pass"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(demonstrations, tmp_path_factory):
    """Files by the trainers' kinds."""
    folder = tmp_path_factory.mktemp("数据")
    records = {
        "pairs": [{"prompt": f"第{i}问", "chosen": f"好{i}", "rejected": "不"} for i in range(7)],
        "texts": [{"text": f"abc 一二三 {i}" * 3} for i in range(9)],
        "prompts": [{"prompt": f"say {word}"} for word in ("ab", "cd", "ef", "gh", "ij", "苹果", "梨")],
    }
    records["games"] = [{"prompt": [{"role": "user", "content": f"{i} 局"}], "folder": str(folder)} for i in range(12)]
    files = {name: write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in records.items()}
    return files | {"demonstrations": demonstrations}


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def train_into(tiny, data, tmp_path_factory):
    """``train_into(folder, name, **changes)``: run one of `RUNS`."""
    model = tiny("gpt2")  # made here, so that its saving is no visit of a fault point
    talker = str(shutil.copytree(model, tmp_path_factory.mktemp("模型") / "talker"))
    worlds.end_turns_soon(talker)

    def run(folder, name, on_step=None, **changes):
        kind, settings = RUNS[name]
        settings = {"model": model, "output": folder, **settings, **changes}
        if kind in OFFLINE_KINDS:
            return TRAIN[kind](kind(**({"data": data["demonstrations" if kind is SFTConfig else "pairs"]} | settings)))
        if "ptx_coef" in settings:
            settings["ptx_data"] = data["texts"]
        if "environment" in settings:
            settings |= {"model": talker, "data": data["games"]}
        return TRAIN[kind](kind(**({"data": data["prompts"]} | settings)), [length], on_step=on_step)

    return run


@pytest.fixture
def train(train_into, tmp_path):
    """``train(name, folder, **changes)``: the same into a folder of the test's."""
    return lambda name, folder, **changes: train_into(tmp_path / folder, name, **changes)


@pytest.fixture(scope="module")
def whole(train_into, tmp_path_factory):
    """``whole(name)``: the folder of a run that nothing cut short, made once, and how often it came to each fault point."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def make(name):
        faults.plan("run.opened:int@99")
        train_into(root / name, name)
        visits = faults.visits().copy()
        faults.plan("")
        return root / name, visits

    return make


def in_child(action, kill_after=None):
    """Run an action in a process of its own, which may be killed after so many seconds. Returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            action()
            os._exit(0)
        except BaseException as error:
            os._exit(getattr(error, "status", 130 if isinstance(error, KeyboardInterrupt) else 1))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # also if it has ended, as nobody has waited for it
    return os.waitpid(child, 0)[1]


def with_fault(fault, action):
    def run():
        faults.plan(fault)
        action()

    return in_child(run)


def contents(run):
    """Models, metrics and samples, and the summary, without times."""
    models = {
        path.relative_to(run).as_posix(): path.read_bytes()
        for name in ("final", "best")
        for path in (run / name).rglob("*")
        if path.is_file()
    }
    lines = [without_times(line) for name in ("metrics.jsonl", "samples.jsonl") for line in read_jsonl(run / name)]
    return models, lines, without_times(json.loads((run / "summary.json").read_text("utf-8")))


def without_times(record):
    if isinstance(record, dict):
        return {k: without_times(v) for k, v in record.items() if not k.startswith(("time/", "perf/", "seconds"))}
    return record


def assert_equal_runs(one, other):
    for part, a, b in zip(("models", "lines", "summary"), contents(one), contents(other), strict=True):
        assert a == b, part
    states = [read_state(max((run / "checkpoints").glob("step-*")) / "resume")["learner"] for run in (one, other)]
    assert differing(*states) == []


KILLS = int(os.environ.get("HEEDFUL_TEST_KILLS", "100"))


@pytest.mark.parametrize("name", often(RUNS, ["ppo separate"]))
def test_a_run_killed_in_its_third_step_goes_on_bit_for_bit(train, whole, killed, tmp_path, name):
    killed("step.learned:kill@3", lambda: train(name, "cut"))
    assert not (tmp_path / "cut" / "summary.json").exists()
    train(name, "cut")
    assert_equal_runs(tmp_path / "cut", whole(name)[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("acts", [True, False], ids=["an environment acts", "update"])
def test_a_run_killed_among_episodes_leaves_no_process_and_goes_on_bit_for_bit(
    train, whole, killed, data, tmp_path, acts
):
    folder, (expected, visits) = Path(data["games"]).parent, whole("ppo turns")
    for noted in folder.glob("*.pid"):
        noted.unlink()

    def arm(step, metrics):
        if step == 2 and acts:
            (folder / "armed").write_text(str(os.getpid()))

    killed(f"update.stepped:kill@{visits['update.stepped']}", lambda: train("ppo turns", "cut", on_step=arm))
    (folder / "armed").unlink(missing_ok=True)
    processes = [int(noted.stem) for noted in folder.glob("*.pid")]
    assert len(processes) == 8
    assert worlds.are_gone(processes)
    logged = [line["step"] for line in read_jsonl(tmp_path / "cut" / "metrics.jsonl")]
    assert max(logged) == (2 if acts else 3)
    train("ppo turns", "cut")
    assert_equal_runs(tmp_path / "cut", expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_at_any_visit(train, whole, killed, tmp_path, name, point):
    """At its first visit, one in the middle, and the last, each in a run of its own."""
    folder, all_visits = whole(name)
    visits = all_visits.get(point, 0)
    if not visits:
        is_online = RUNS[name][0] not in OFFLINE_KINDS
        never = {"run.aside", "run.moving"}  # nothing is replaced
        never |= {"save.aside"} if is_online else OF_ONLINE_RUNS  # no second best/
        assert point in never, f"a run of {name} should come to {point}"
        return
    for visit in sorted({1, (visits + 1) // 2, visits} - {0}):
        killed(f"{point}:kill@{visit}", lambda: train(name, "cut"))
        if not finished(tmp_path / "cut"):
            train(name, "cut")
        assert_equal_runs(tmp_path / "cut", folder)
        shutil.rmtree(tmp_path / "cut")


def test_every_point_is_on_the_way_of_a_run(train, whole, tmp_path):
    """So that the exhaustive tests kill at each of them: of a run, and of one that takes the place of another."""
    folder, visits = whole("ppo shared")
    shutil.copytree(folder, tmp_path / "run")
    faults.plan("run.opened:int@99")
    train("ppo shared", "run", overwrite=True, steps=1)
    assert visits.keys() | faults.visits().keys() == faults.POINTS.keys()


@pytest.mark.exhaustive
def test_a_hundred_kills_at_random_times(train, tmp_path):
    started = time.monotonic()
    train("ppo shared", "whole", steps=12)
    whole = time.monotonic() - started
    draw, kills, compared = random.Random(0), 0, 0
    while kills < KILLS:
        again = {}
        if finished(tmp_path / "cut"):
            assert_equal_runs(tmp_path / "cut", tmp_path / "whole")
            compared, again = compared + 1, {"overwrite": True}
        seconds = draw.uniform(0, whole)
        status = in_child(lambda again=again: train("ppo shared", "cut", steps=12, **again), kill_after=seconds)
        is_back = finished(tmp_path / "cut")  # the run of before, whose successor was killed before its first step
        went_on = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0 or is_back
        assert went_on, "a run that cannot go on would be tried for ever"
        kills += os.WIFSIGNALED(status)
        assert len(list((tmp_path / "cut").glob("checkpoints/*"))) <= 40, "disk use is bounded"
    if not finished(tmp_path / "cut"):  # this is refused if the finished run of before comes back
        in_child(lambda: train("ppo shared", "cut", steps=12))
    assert_equal_runs(tmp_path / "cut", tmp_path / "whole")
    print(f"{kills} kills, {compared + 1} runs compared")


def finished(run):
    return (run / "summary.json").exists()


SIGNALS = {"int": 130, "term": 143, "hup": 129}
PLACES = ["generation", "reward.call", "rollout", "reward", "pass", "update.backward", "update.stepped", "step.logged"]
PLACES += ["evaluation", "evaluated", "save.files"]


@pytest.mark.parametrize(("kind", "place"), pairs_often(SIGNALS, PLACES, [("term", "update.stepped")]))
def test_a_request_to_end_is_honoured_anywhere(train, whole, tmp_path, kind, place):
    """A checkpoint is left, the status says which signal it was, and the run goes on bit for bit."""
    folder, visits = whole("ppo shared")
    visit = max(2, visits[place] // 2) if place in ("generation", "reward.call") else 2  # after the trial
    status = with_fault(f"{place}:{kind}@{visit}", lambda: train("ppo shared", "cut", save_every=0))
    assert os.waitstatus_to_exitcode(status) == SIGNALS[kind]
    assert [path.name[:5] for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-"]
    train("ppo shared", "cut")
    assert_equal_runs(tmp_path / "cut", folder)


def test_a_second_signal_ends_at_once_and_damages_nothing(train, whole, tmp_path):
    status = with_fault("update.stepped:term@3,save.state:int@3", lambda: train("sft", "cut"))
    assert os.waitstatus_to_exitcode(status) == 130, "of the second"
    train("sft", "cut")
    assert_equal_runs(tmp_path / "cut", whole("sft")[0])


def test_best_survives_what_cuts_its_replacement_short(train, whole, killed, tmp_path):
    """Between the two renames there is no best/; the run that goes on brings the former one back."""
    killed("save.aside:kill@1", lambda: train("sft", "cut"))
    assert not (tmp_path / "cut" / "best").exists()
    train("sft", "cut")
    assert_equal_runs(tmp_path / "cut", whole("sft")[0])
    assert not list((tmp_path / "cut").glob(".*"))


def test_curves_have_no_gap_and_no_double_point(train, whole, killed, tmp_path):
    """Settings that no number depends on may change, such as how many checkpoints are kept: the oldest go first. And the
    handlers of signals are what they were."""
    killed("step.logged:kill@3", lambda: train("sft", "cut"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    train("sft", "cut", save_total_limit=2, save_minutes=0.0)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert contents(tmp_path / "cut") == contents(whole("sft")[0])
    assert sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    events = EventAccumulator(str(tmp_path / "cut" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/sft")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 2, 4]


@pytest.mark.parametrize("damaged", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_models_of_later_steps_are_set_aside_when_a_run_goes_back(train, whole, tmp_path, damaged, monkeypatch):
    """best/ and final/ of step 4 are not those of a run that is at step 1; with them goes what patience compares with."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(whole("sft")[0], run)
    assert json.loads((run / "summary.json").read_text("utf-8"))["best"]["step"] == 4
    former = [(run / name / "model.safetensors").read_bytes() for name in ("best", "final")]
    again = {"resume": str(checkpoints / "step-000001")}
    if damaged:
        again = {}
        (run / "summary.json").unlink()
        for step in (2, 3, 4):
            (checkpoints / f"step-00000{step}" / "model.safetensors").write_bytes(b"")
    faults.plan("step.learned:raise@1")
    with pytest.raises(RuntimeError, match="a fault point"):
        train("sft", "run", **again)
    faults.plan("")
    assert not (run / "best").exists()
    assert not (run / "final").exists()
    if not damaged:
        later = {f"later-{name}" for name in ("step-000002", "step-000003", "step-000004", "best", "final")}
        assert {path.name for path in checkpoints.glob("later-*")} == later
    aside = [checkpoints / f"later-{name}" / "model.safetensors" for name in ("best", "final")]
    assert [path.read_bytes() for path in aside] == former
    compared, update = [], EarlyStopping.update
    monkeypatch.setattr(EarlyStopping, "update", lambda *a, **k: compared.append(a[0].best) or update(*a, **k))
    train("sft", "run")
    assert compared[0] is None, "there is no model of a former one"
    assert_equal_runs(run, whole("sft")[0])


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(train, tmp_path, capsys):
    faults.plan("save.state:enospc@2")
    train("sft", "run")
    said = capsys.readouterr().err
    assert "step 2: the checkpoint could not be written" in said
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [f"step-{n:06d}" for n in (1, 3, 4)]
    assert not list((tmp_path / "run").rglob(".*")), "nothing half-written"


def test_a_partly_learned_step_is_no_checkpoint(train, whole, tmp_path, capsys):
    """An error between two minibatches: the run resumes from the checkpoint before, and the model is there to look at."""
    folder, visits = whole("ppo shared")
    faults.plan(f"update.stepped:raise@{visits['update.stepped'] // 2 + 2}")
    with pytest.raises(RuntimeError, match="a fault point"):
        train("ppo shared", "cut")
    faults.plan("")
    assert "in the middle of an update; the run resumes from step-" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()}
    assert any(name.endswith("-partial") for name in names)
    train("ppo shared", "cut")
    assert_equal_runs(tmp_path / "cut", folder)


@pytest.mark.exhaustive
def test_files_of_events_are_named_in_the_order_of_their_writing(train, tmp_path):
    """TensorBoard reads them in the order of their names: the second in which they began."""
    train("sft", "warm")
    time.sleep(1 - time.time() % 1)  # so that it is cut short and begins again within one second
    faults.plan("step.logged:raise@3")
    with pytest.raises(RuntimeError, match="a fault point"):
        train("sft", "run")
    faults.plan("")
    train("sft", "run")
    names = [path.name for path in (tmp_path / "run" / "tensorboard").iterdir()]
    assert len(names) == 2
    assert len({name.split(".")[3] for name in names}) == 2
