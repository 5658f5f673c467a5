"""Ways to lose a run, or to go on as another. See also test_output_folder.py and test_resume.py."""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest

from folders import contents
from heedful import CheckpointError, ConfigError, DemoConfig, PPOConfig, SFTConfig, faults
from heedful.apps.demo import folder as demo_folder
from heedful.configs.parse import parse
from heedful.configs.tools import TinyConfig
from heedful.errors import Terminated
from heedful.lock import FolderLock, is_locked
from heedful.signals import Stops
from heedful.training.output_folder import check_output
from heedful.training.provenance import differences, saved_settings, settings_of
from heedful.training.run_folder import cut_logs
from heedful.training.runs import state_of
from jsonl import read_metrics


def test_what_is_hidden_is_still_yaml_and_compared_with_the_run(sft, demonstrations, tmp_path, monkeypatch, killed):
    """A path below the working folder is no secret, though the shell's PWD is named like a password; one at the beginning of
    a value is, and a bare *** would be an alias."""
    folder, model_and_prompt = Path(demonstrations).parent, {"system_prompt": "a-secret-of-mine 甲"}
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    killed("step.learned:kill@3", lambda: sft(**model_and_prompt))
    written = (tmp_path / "run" / "config.yaml").read_text("utf-8")
    assert written.count("***") == 1
    assert "a-secret-of-mine" not in written
    assert saved_settings(tmp_path / "run")["system_prompt"].startswith("*** 甲 (#")
    monkeypatch.setenv("MY_TOKEN", "another-secret")
    with pytest.raises(ConfigError, match=r"--system-prompt: '\*\*\* 甲 \(#"):
        sft(system_prompt="another-secret 甲")
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    assert sft(**model_and_prompt)["steps"] == 3
    saved = str(tmp_path / "run" / "config.yaml")
    with pytest.raises(ConfigError, match=r"config.yaml:\d+: system_prompt held a secret.* add --system-prompt"):
        parse(SFTConfig, [saved, "--output", "other"], prog="heedful sft")
    anew = parse(SFTConfig, [saved, "--output", "other", "--system-prompt", "说 ***"], prog="heedful sft")
    assert anew.system_prompt == "说 ***", "given anew it is not refused"


def test_a_reward_at_another_address_is_another(tiny, prompts, tmp_path):
    """Though what differs is not written down."""

    def config(query):
        return PPOConfig(model=tiny(), data=prompts, output=tmp_path / "run", rewards=(f"http://rm/score?{query}",))

    assert differences(settings_of(config("model=7b")), settings_of(config("model=7b"))) == {}
    assert list(differences(settings_of(config("model=7b")), settings_of(config("model=70b")))) == ["rewards"]
    written = str(settings_of(config("model=7b")))
    assert "7b" not in written
    assert "http://rm/score?model=***" in written


def test_a_setting_without_its_secret_is_refused(tiny, prompts, tmp_path):
    """As a run's config.yaml has it: the server would be sent the stars."""
    for rewards in (
        {"rewards": ("http://rm/score?model=***",)},
        {"rewards": ("rule:digits",), "selection_rewards": ("http://rm/score?model=***",)},
    ):
        with pytest.raises(ConfigError, match=r"the reward http://rm/score\?model=\*\*\*: .*write the address again"):
            PPOConfig(model=tiny(), data=prompts, output=tmp_path / "run", **rewards)


def test_a_cache_and_the_patience_of_judges(tiny, prompts, tmp_path):
    """The trial of the judge would make a cache in the run's folder before it is the run's, which then refused it as foreign.
    After a judge was away too long the same run goes on with more patience."""
    judge = {
        "model": tiny(),
        "data": prompts,
        "output": tmp_path / "run",
        "rewards": ("judge:http://127.0.0.1:1/v1#m",),
    }
    with pytest.raises(ConfigError, match=r"--judge-cache .* is in the run's folder"):
        check_output(PPOConfig(**judge, judge_cache=tmp_path / "run" / "cache.sqlite"))
    more = PPOConfig(**judge, reward_retry_minutes=60.0, reward_concurrency=3)
    assert differences(settings_of(PPOConfig(**judge)), settings_of(more)) == {}


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("limits")
def test_files_that_the_system_refuses_are_no_traceback(heedful, tiny, demonstrations, tmp_path, monkeypatch):
    """With the error of the library that writes: a checkpoint that is due ends no run, the last model does."""
    limit = resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)  # what safetensors then raises is real
    monkeypatch.setitem(faults.ACTIONS, "limit", lambda: resource.setrlimit(*limit))
    faults.plan("step.learned:limit")
    done = heedful(
        "sft", model=tiny("gpt2"), data=demonstrations, output=tmp_path / "run", max_steps=2, batch_size=2, save_every=1,
        eval_fraction=0, device="cpu",
    )  # fmt: skip
    assert done.status == 3
    said = f"[Errno 27] File too large: '{tmp_path / 'run' / 'checkpoints' / 'step-000001'}'; the run continues"
    assert f"step 1: the checkpoint could not be written: {said}" in done.err
    assert "heedful: File too large" in done.err
    assert not list((tmp_path / "run").rglob(".*partial"))


def test_a_run_that_is_only_just_named_keeps_its_name(sft, tmp_path):
    """A second start of the same command, while the first has written run.json and nothing else."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"schema": 1, "run": "x"}')
    held = FolderLock(run)
    with pytest.raises(ConfigError, match="is being written by another run"):
        sft()
    assert (run / "run.json").exists()
    held.release()
    before = os.umask(0o027)
    try:
        sft(max_steps=1)
    finally:
        os.umask(before)
    models = [*(run / "final").iterdir(), *run.rglob("*.safetensors")]  # safetensors' own are for their owner only
    assert {stat.S_IMODE(path.stat().st_mode) for path in models} == {0o640}, "as readable as other files"


def test_a_demo_that_runs_is_not_replaced(tmp_path):
    (tmp_path / "demo" / "world").mkdir(parents=True)
    (tmp_path / "demo" / "sft").mkdir()
    held = FolderLock(tmp_path / "demo" / "sft")
    with pytest.raises(ConfigError, match=r"is being written by another demo \(process \d+ on"):
        demo_folder.check_output(DemoConfig(output=tmp_path / "demo", overwrite=True))
    held.release()
    assert demo_folder.check_output(DemoConfig(output=tmp_path / "demo", overwrite=True)) is False


@pytest.mark.exhaustive
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_demo_is_one_writer_between_its_stages_too(tmp_path, overwrite):
    """It measures and draws when no stage is being written."""
    config = DemoConfig(output=tmp_path / "demo", overwrite=overwrite)
    tiny = TinyConfig(architecture="gpt2", output=tmp_path / "demo" / "base", hidden_size=16, num_layers=1)
    with demo_folder.make_beginning(config, tiny):
        for refused in (demo_folder.check_output, lambda config: demo_folder.make_beginning(config, tiny)):
            with pytest.raises(ConfigError, match=r"is being written by another demo \(process \d+ on"):
                refused(config)
        assert {path.name for path in tmp_path.iterdir()} == {"demo"}
    assert demo_folder.check_output(config) is not overwrite  # an unfinished demo goes on
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"world", "base", "demo.json"}


@pytest.mark.usefixtures("finished")
def test_a_resume_that_is_refused_for_its_logs_changes_nothing(sft, tmp_path):
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.truncate(5)
    for change in (lambda: None, (tmp_path / "run" / "metrics.jsonl").unlink):
        change()
        before = contents(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"metrics.jsonl is missing or shorter than at the checkpoint"):
            sft(resume=str(tmp_path / "run" / "checkpoints" / "step-000002"))
        assert contents(tmp_path / "run") == before


@pytest.mark.usefixtures("unfinished")
def test_another_precision_is_refused(sft, tmp_path):
    """``auto`` means something else on another processor; the run does not change it unnoticed."""
    path = tmp_path / "run" / "environment.json"
    facts = json.loads(path.read_text("utf-8"))
    assert facts["device"] == "cpu"
    path.write_text(json.dumps(facts | {"dtype": "float16"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--dtype was float16 when the run began and is .* --allow-change dtype"):
        sft()
    assert sft(allow_change=("dtype",))["steps"] == 3


@pytest.mark.exhaustive
def test_best_is_chosen_anew_though_the_run_is_killed_again(sft, tmp_path, killed):
    """A change is known from the checkpoint, not from the folder, which has the new settings by then."""
    changed = {"learning_rate": 0.5, "allow_change": ("learning_rate",), "eval_every": 1, "max_steps": 6}
    killed("step.learned:kill@3", lambda: sft(eval_every=1, max_steps=6))
    shutil.copytree(tmp_path / "run", tmp_path / "twice")
    once = sft(**changed)
    for _ in range(2):
        killed("step.learned:kill@1", lambda: sft(output=tmp_path / "twice", **changed))
    assert sft(output=tmp_path / "twice", **changed)["best"] == once["best"]


@pytest.mark.usefixtures("unfinished")
def test_damaged_facts_of_a_run_are_no_traceback(sft, tmp_path):
    for name, content, said in (
        ("environment.json", "{}", "has no versions"),
        ("environment.json", "[1]", "holds a list"),
        ("run.json", "{}", "has no run"),
        ("run.json", "[]", "holds a list"),
    ):
        path = tmp_path / "run" / name
        whole = path.read_text("utf-8")
        path.write_text(content)
        with pytest.raises((CheckpointError, ConfigError), match=rf"{name}: it {said}"):
            sft()
        path.write_text(whole, encoding="utf-8")


@pytest.mark.parametrize("what", ["partial", "no manifest", "of another run"])
@pytest.mark.usefixtures("unfinished")
def test_runs_says_what_the_command_will_do(sft, tmp_path, what):
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000002")
    if what == "partial":
        (checkpoints / "step-000001").rename(checkpoints / "step-000002-partial")
    elif what == "no manifest":
        (checkpoints / "step-000001" / "MANIFEST.json").unlink()
    else:
        marker = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
        (tmp_path / "run" / "run.json").write_text(json.dumps(marker | {"run": "another"}))
    assert "cannot resume" in state_of(tmp_path / "run").note
    with pytest.raises(CheckpointError):
        sft()


@pytest.mark.usefixtures("finished")
def test_nobody_starts_in_a_folder_whose_run_moves_aside(sft, tmp_path, monkeypatch):
    """Neither in the middle, which looks like a kill, nor while there is nothing in its place."""
    refused = []

    def other():
        for overwrite in (True, False):
            with pytest.raises(ConfigError, match="is being written by another run"):
                check_output(SFTConfig(model="x", data="x", output=tmp_path / "run", overwrite=overwrite))
            refused.append(overwrite)

    monkeypatch.setitem(faults.ACTIONS, "other", other)
    faults.plan("run.moving:other,run.aside:other")
    sft(overwrite=True, max_steps=1)
    assert refused == [True, False] * 2
    assert (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "run").glob(".*"))


def test_a_file_system_without_locks_can_be_used(sft, monkeypatch, tmp_path, capsys):
    """And the run says that nothing keeps a second one out."""

    def refused(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert sft(max_steps=1)["steps"] == 1
    assert not is_locked(tmp_path / "run")
    said = " ".join(capsys.readouterr().err.split())
    assert "has no locks, so a second process in the same folder is not detected" in said


def test_a_log_that_is_gone_is_named_for_what_it_is(tmp_path):
    said = cut_logs(tmp_path, {"skipped.jsonl": 5, "tensorboard/events.1": 5})
    assert "skipped.jsonl is missing or was changed: its earlier lines are lost" in said[0]
    assert "TensorBoard will not show the earlier steps" in said[1]


def test_a_signal_during_a_save_that_fails_still_ends_the_run(sft, tmp_path):
    faults.plan("save.state:term,save.state:enospc")
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(Terminated):
            sft()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert max(line["step"] for line in read_metrics(tmp_path / "run")) == 1


def test_a_second_signal_counts_however_often_it_comes(monkeypatch):
    """Signals 0.8 s apart: the first waits, the next is an echo, the one after it ends at once."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stops = Stops()
    seen = []

    def press():
        with stops.shield():
            for second in (0.0, 0.8, 1.6):  # the second may be the same press
                now[0] = 100 + second
                seen.append(second)
                stops._handle(signal.SIGINT, None)
            seen.append("it did not end")

    with pytest.raises(KeyboardInterrupt):
        press()
    assert seen == [0.0, 0.8, 1.6]
