"""What happens to what is already in an output folder: nothing that somebody could miss is lost."""

import errno
import functools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from folders import contents
from heedful import CheckpointError, ConfigError, PPOConfig, Reward, SFTConfig, faults, hub, train_ppo
from heedful.algorithms.online.provenance import given_in_python
from heedful.errors import MachineError
from heedful.lock import FolderLock, is_locked
from heedful.models.save import VALUE_HEAD
from heedful.training import run_folder
from heedful.training.checkpoints import check_space
from heedful.training.provenance import IN_PYTHON, check_same_sources
from jsonl import read_metrics, write_jsonl

FAULTS = ["evaluation:kill", "run.moving:kill@5"]
OTHERS = ["run.aside:kill", "run.opened:kill", "run.started:kill", "evaluated:kill", "save.files:kill"]
OTHERS += [f"run.moving:kill@{number}" for number in (1, 9)]
FAULTS += [pytest.param(fault, marks=pytest.mark.exhaustive) for fault in OTHERS]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("finished")
def test_overwrite_that_is_killed_before_its_first_step_loses_nothing(sft, tmp_path, fault, killed):
    """The good run has its name again, whatever is tried next, and as often as it is killed."""
    before = contents(tmp_path / "run")
    for _ in range(2):
        killed(fault, lambda: sft(overwrite=True, seed=1))
    with pytest.raises(ConfigError, match=r"already has a finished run.*--overwrite"):
        sft()
    assert contents(tmp_path / "run") == before
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []


@pytest.mark.usefixtures("finished")
def test_overwrite_that_cannot_set_the_older_run_aside_loses_nothing(sft, tmp_path):
    """The disk refuses in the middle: what has moved comes back, and what has not is not taken for the new run's."""
    before = contents(tmp_path / "run")
    faults.plan("run.moving:eio@3")
    with pytest.raises(ConfigError, match="cannot be made: Input/output error"):
        sft(overwrite=True, seed=1)
    faults.plan("")
    assert contents(tmp_path / "run") == before
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []


@pytest.mark.usefixtures("finished")
def test_the_replaced_run_is_kept_until_the_new_one_has_its_final(sft, tmp_path, killed):
    """A failure after the first step leaves both. A third run, which fails, gives its place to the second again,
    which keeps the first inside it."""
    first = contents(tmp_path / "run")
    killed("step.learned:kill@3", lambda: sft(overwrite=True, seed=1))
    second = contents(tmp_path / "run")
    faults.plan("evaluation:raise")
    with pytest.raises(RuntimeError, match="a fault point"):
        sft(overwrite=True, seed=2)
    faults.plan("")
    assert contents(tmp_path / "run") == second
    assert contents(tmp_path / "run" / ".replaced") == first
    sft(seed=1)
    assert not list((tmp_path / "run").glob(".*"))


def test_two_runs_never_share_a_folder(sft, tmp_path):
    """The second says who writes, and changes nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faults.ACTIONS["hang"] = lambda: (os.write(write, b"x"), os.read(os.pipe()[0], 1))
        faults.plan("step.logged:hang@2")
        sft()
        os._exit(1)
    os.read(read, 1)

    def there():  # but curves, which a thread of a run that hangs still writes
        return {name: what for name, what in contents(tmp_path / "run").items() if not name.startswith("tensorboard/")}

    before = there()
    for changes in ({}, {"overwrite": True}, {"resume": "never"}):
        with pytest.raises(ConfigError, match=f"is being written by another run .process {child} on"):
            sft(**changes)
    assert there() == before
    os.kill(child, 9)
    os.waitpid(child, 0)
    sft()  # a lock of a process that is gone counts no more
    assert (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.usefixtures("finished")
def test_overwrite_leaves_foreign_files_alone(sft, tmp_path):
    """A project, notes and nested runs, although the folder holds a run too."""
    half_written = [f"{name}/论文" for name in (".final.backup", ".config.yaml.swp", ".final.partial")]
    for foreign in ("notes.txt", ".git/HEAD", "nested/run.json", *half_written):
        path = tmp_path / "run" / foreign
        path.parent.mkdir(exist_ok=True)
        path.write_text("重要", encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"has {foreign.split('/')[0]}, which is not from a run"):
            sft(overwrite=True)
        assert path.read_text("utf-8") == "重要"
        path.unlink()
        if path.parent != tmp_path / "run":
            path.parent.rmdir()


@pytest.mark.parametrize(
    ("name", "said", "replacing"),
    [
        ("config.yaml", "has files that are not from a heedful run", "has files that are not from a heedful run"),
        ("environment.json", r"has a run without its run\.json", "has src, which is not from a run"),
    ],
)
def test_a_project_that_holds_such_a_file_is_no_run(sft, tmp_path, name, said, replacing):
    (tmp_path / "run" / "src").mkdir(parents=True)
    (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(ConfigError, match=said):
        sft()
    with pytest.raises(ConfigError, match=replacing):
        sft(overwrite=True)
    assert (tmp_path / "run" / "src").is_dir()


@pytest.mark.usefixtures("finished")
def test_a_neighbour_is_never_deleted(sft, tmp_path):
    """A run is written where a link leads, and can be replaced; what heedful left half written goes."""
    neighbours = [tmp_path / name for name in (".run.old", ".run.partial", ".run.replaced-mine", ".run.replaced")]
    for neighbour in neighbours:
        neighbour.mkdir()
        (neighbour / "thesis.txt").write_text("x")
    (tmp_path / "run").rename(tmp_path / "disk")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "run" / ".final.heedful-partial").mkdir()
    sft(overwrite=True, max_steps=1)
    assert set(tmp_path.glob(".*")) == set(neighbours)
    assert all((neighbour / "thesis.txt").exists() for neighbour in neighbours)
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "disk" / "summary.json").exists()
    assert not list((tmp_path / "disk").glob(".*"))


def test_a_folder_in_which_nothing_can_be_made(sft, tmp_path, capsys, monkeypatch):
    """Refused with what the system says, before the first step."""
    parent = tmp_path / "read-only"
    parent.mkdir(mode=0o500)
    if os.access(parent, os.W_OK):  # root may write anywhere but where the system itself is
        parent, usage = Path("/sys"), shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)  # /sys has no room, and would be refused for that
    with pytest.raises(ConfigError, match=rf"--output {parent}/run cannot be made: no permission"):
        sft(output=parent / "run")
    assert "sft 1/3" not in capsys.readouterr().err


def test_an_empty_folder_that_is_there_is_used_as_it_is(sft, tmp_path):
    """A mount point cannot be renamed or removed."""
    (tmp_path / "run").mkdir()
    inode = (tmp_path / "run").stat().st_ino
    sft(max_steps=1)
    assert (tmp_path / "run").stat().st_ino == inode


@pytest.mark.parametrize("there", ["run", "empty folder", "nothing"])
def test_a_failure_inside_the_opening_leaves_what_was_there(sft, tmp_path, request, there):
    if there == "run":
        request.getfixturevalue("finished")
    elif there == "empty folder":
        (tmp_path / "run").mkdir()
    before = contents(tmp_path)
    faults.plan("run.opened:enospc")
    with pytest.raises(OSError, match="No space"):
        sft(overwrite=there == "run")
    assert contents(tmp_path) == before


def test_a_path_that_is_no_text(sft, tmp_path):
    """Bytes that are no UTF-8 in a path are refused before anything is written."""
    with pytest.raises(ConfigError, match="is not UTF-8"):
        sft(output=tmp_path / os.fsdecode(b"run-\xff"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def free_gigabytes(tmp_path, monkeypatch):
    """``free_gigabytes(n)``: so much is free on the disk."""
    usage = shutil.disk_usage(tmp_path)
    return lambda n: monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(n * 1e9)))


def test_a_full_disk_is_found_before_anything_is_written(sft, tmp_path, free_gigabytes):
    """With the numbers."""
    free_gigabytes(0.001)
    with pytest.raises(MachineError, match=r"the disk has 0.0 GB free, and the run needs 0.1 GB"):
        sft()
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that takes no files")
def test_a_place_that_takes_no_files_is_not_called_a_full_disk(sft):
    """It has no free bytes either."""
    with pytest.raises(ConfigError, match=r"--output /proc/run cannot be made: .*; choose another folder"):
        sft(output=Path("/proc/run"))


class TenGigabytes:
    """A learner with 2.5e9 numbers on no device, and with copies of them, such as a moving average."""

    def __init__(self, copies):
        self.weight = torch.nn.Parameter(torch.zeros(2_500_000_000, device="meta"))
        self.optimizer = torch.optim.AdamW([self.weight])
        self.copies = copies

    def state_dict(self):
        return {"weights": [self.weight] * self.copies}


@pytest.mark.parametrize(
    ("keep", "copies", "checkpoints", "gigabytes"),
    [(9, 1, 10, 10 * 40 + 20), (0, 1, 3, 3 * 40 + 20), (2, 2, 3, 3 * 50 + 20)],
)
def test_the_disk_has_room_for_every_checkpoint_that_is_kept(
    tiny, tmp_path, free_gigabytes, keep, copies, checkpoints, gigabytes
):
    """Each has the model, the state with its copies, and two moments; there is one more while a new one is written."""
    settings = SFTConfig(model=tiny("gpt2"), data="x", output=tmp_path / "run", save_total_limit=keep)
    free_gigabytes(0)
    with pytest.raises(MachineError, match=rf"needs {gigabytes}\.1 GB for {checkpoints} checkpoints, best/ and final/"):
        check_space(settings, TenGigabytes(copies))


@pytest.mark.usefixtures("unfinished")
def test_what_a_run_has_on_the_disk_is_not_asked_for_again(tmp_path, free_gigabytes):
    """A run that found room when it began does not fail for it when it goes on: of 140 GB, 80 are there."""
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000003-partial").mkdir()  # nothing replaces it, so it is no room for a checkpoint
    for folder, size in (("step-000001", 40), ("step-000002", 40), ("step-000003-partial", 80)):
        with (checkpoints / folder / "weights").open("wb") as file:
            file.truncate(size * 10**9)  # sparse
    settings = SFTConfig(model="x", data="x", output=tmp_path / "run")
    free_gigabytes(62)
    check_space(settings, TenGigabytes(1))
    with pytest.raises(MachineError, match=r"needs 140\.1 GB"):
        check_space(replace(settings, overwrite=True), TenGigabytes(1))
    free_gigabytes(50)
    with pytest.raises(MachineError, match=r"needs 140\.1 GB"):
        check_space(settings, TenGigabytes(1))


@pytest.mark.usefixtures("unfinished")
def test_all_checkpoints_damaged_is_said_and_nothing_is_deleted(sft, tmp_path):
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint to resume from.*--overwrite"):
        sft()
    before = contents(tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").glob("bad-step-*"))) == 2
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        sft()
    assert contents(tmp_path / "run") == before, "nor when it is tried again"


@pytest.mark.usefixtures("finished")
def test_a_run_of_another_heedful_is_protected(sft, tmp_path):
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"has a run without its run\.json"):
        sft()
    sft(overwrite=True, max_steps=1)  # as it asks for


def test_a_checkpoint_that_is_none(sft, tmp_path, request):
    with pytest.raises(ConfigError, match="there is no run in"):
        sft(resume=str(tmp_path / "run" / "checkpoints" / "step-000001"))
    request.getfixturevalue("unfinished")
    for resume, said in (("nowhere", "is not a checkpoint of the run"), ("", "--resume must be")):
        with pytest.raises(ConfigError, match=said):
            sft(resume=resume)
    with pytest.raises(ConfigError, match="--allow-change learningrate is not a setting"):
        sft(allow_change=("learningrate",))


def test_a_last_model_without_a_checkpoint_is_never_deleted(sft, tmp_path, killed):
    """A short run, killed between final/ and its summary."""
    killed("run.learned:kill", lambda: sft(save_every=0, max_steps=1))
    before = contents(tmp_path / "run")
    assert "final/model.safetensors" in before
    with pytest.raises(CheckpointError, match="has models of an unfinished run, but no checkpoint"):
        sft(save_every=0, max_steps=1)
    assert contents(tmp_path / "run") == before


def test_a_summary_that_cannot_be_written_costs_only_the_summary(sft, tmp_path, monkeypatch):
    """A folder stands in its place."""
    summary = tmp_path / "run" / "summary.json"
    monkeypatch.setitem(faults.ACTIONS, "stand in the way", summary.mkdir)
    faults.plan("run.learned:stand in the way")
    with pytest.raises(IsADirectoryError):
        sft(save_every=0, max_steps=1)
    summary.rmdir()
    assert sft(save_every=0, max_steps=1)["steps"] == 1


@pytest.mark.parametrize("point", ["run.named", pytest.param("run.opened", marks=pytest.mark.exhaustive)])
def test_a_run_killed_while_its_folder_is_made_starts_again(sft, tmp_path, point, killed):
    killed(f"{point}:kill", lambda: sft(max_steps=1))
    assert sft(max_steps=1)["steps"] == 1


@pytest.mark.usefixtures("unfinished")
def test_a_resume_that_is_refused_changes_nothing(sft, tmp_path):
    """A state that does not fit what is allowed to change."""
    before = contents(tmp_path / "run")
    with pytest.raises(CheckpointError, match="does not fit this run"):
        sft(lora_rank=2, allow_change=("lora_rank", "learning_rate"))
    assert contents(tmp_path / "run") == before


def short_run(tiny, prompts, tmp_path):
    settings = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "steps": 2, "rollout_batch_size": 4}
    return settings | {"minibatch_size": 4, "max_new_tokens": 4, "save_every": 1, "eval_fraction": 0.0}


def test_a_reward_whose_code_was_changed(tiny, prompts, tmp_path, killed):
    """Its file is data of the run, with what that imports: other code would give other scores, unnoticed."""
    code, more = tmp_path / "奖励.py", tmp_path / "rules_of_mine.py"
    more.write_text("FACTOR = 1\n")
    code.write_text(
        f"import sys, json, yaml\nsys.path.insert(0, {str(tmp_path)!r})\nfrom rules_of_mine import FACTOR\n"
        "def score(prompts, completions):\n    return [FACTOR * len(r) for r in completions]\n"
    )
    config = PPOConfig(**short_run(tiny, prompts, tmp_path), rewards=(f"python:{code}:score",))
    killed("step.learned:kill@2", lambda: train_ppo(config))
    data = json.loads((tmp_path / "run" / "environment.json").read_text("utf-8"))["data"]
    assert {str(code), str(more), IN_PYTHON, prompts} == set(data), "nothing of Python's and of packages"
    more.write_text("FACTOR = -1\n")
    with pytest.raises(ConfigError, match=r"rules_of_mine.py has changed since the run began"):
        train_ppo(config)
    code.write_text("def score(prompts, completions):\n    return [-len(r) for r in completions]\n")
    with pytest.raises(ConfigError, match=r"奖励.py has changed since the run began.*--allow-change data"):
        train_ppo(config)


def by_length(completions, **_):
    return [float(len(c)) for c in completions]


def times(factor):
    def scaled(completions, **_):
        return [factor * len(c) for c in completions]

    return scaled


class Judges:
    def __call__(self, completions, **_):
        return [0.0 for _ in completions]


def test_another_function_given_in_python(tiny, prompts, tmp_path, killed):
    """It is named, and refused as other data are."""
    config = PPOConfig(**short_run(tiny, prompts, tmp_path))
    killed("step.learned:kill@2", lambda: train_ppo(config, [by_length]))
    functions = r"\(by_length \w{12}; now scaled \w{12}\).*--allow-change data"
    with pytest.raises(ConfigError, match=f"functions given in Python has changed since the run began {functions}"):
        train_ppo(config, [times(2)])


def test_what_tells_functions_given_in_python_apart():
    """Source, name, weight, what partial binds, what an outer function held; not the object."""
    apart = [by_length, times(2), times(3), Judges(), *(functools.partial(by_length, extra=n) for n in (1, 2))]
    apart += [Reward("by_length", by_length, 2.0), len, sum, eval("lambda completions: [1.0]")]
    found = [given_in_python([reward]).content for reward in apart]
    assert len(set(found)) == len(apart)
    assert [given_in_python([same]).content for same in (times(2), Judges(), len)] == [found[1], found[3], found[7]]
    assert given_in_python(["rule:digits"]).content == "none"


def test_a_function_whose_file_was_edited_since_counts_by_its_name(tmp_path):
    """Where it began, there is text now that ends inside a bracket."""
    file = tmp_path / "edited.py"
    file.write_text("rewards = [(\n", encoding="utf-8")
    names = {}
    exec(compile("def letters(completions): return [1.0 for _ in completions]", str(file), "exec"), names)
    assert given_in_python([names["letters"]]).content.startswith("letters ")


OF_A_MODEL = ["tokenizer_config.json", "chat_template.jinja", "vocab.json", "pytorch_model.bin", VALUE_HEAD]


def test_other_data_another_template_or_model_under_the_same_name_are_refused(tiny, sft, tmp_path, monkeypatch, killed):
    """Any file of the model counts; and rows of a data set on a Hub."""
    model, template, held_out = (tmp_path / name for name in ("model", "模板.jinja", "留.jsonl"))
    hub_rows = tmp_path / "downloaded" / "train.jsonl"
    shutil.copytree(tiny("gpt2"), model)
    (model / VALUE_HEAD).parent.mkdir()
    template.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", encoding="utf-8")
    hub_rows.parent.mkdir()
    for path, word in ((held_out, "留"), (hub_rows, "学")):
        write_jsonl(path, [{"prompt": f"{word}{i}", "completion": f"b{i}"} for i in range(6)])
    monkeypatch.setattr(hub, "_folders", {("dataset_snapshot_download", "modelscope:org/data"): str(hub_rows.parent)})
    settings = {"model": str(model), "data": "modelscope:org/data", "eval_data": str(held_out), "eval_fraction": 0.0}
    settings["chat_template"] = str(template)
    killed("step.learned:kill@2", lambda: sft(**settings))
    sources = [
        (template, "模板.jinja", "data"),
        (held_out, "留.jsonl", "data"),
        (hub_rows, "modelscope:org/data", "data"),
    ]
    for path, name, flag in [*sources, *((model / name, "model", "models") for name in OF_A_MODEL)]:
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(before.replace(b"b3", b"c3") + b"\n\n" if before else b"\n")
        with pytest.raises(ConfigError, match=rf"{name} has changed since the run began.*--allow-change {flag}\b"):
            sft(**settings)
        path.unlink() if before is None else path.write_bytes(before)


def test_another_revision_on_the_hub():
    facts = {"data": {}, "models": {}, "versions": {}, "cpu": {"threads": 1}, "revisions": {"org/模型": "a" * 40}}
    now = facts | {"revisions": {"org/模型": "b" * 40}}
    with pytest.raises(ConfigError, match=r"org/模型 has changed since the run began.*--allow-change models"):
        check_same_sources(facts, now, allowed=["data"])
    assert check_same_sources(facts, now, allowed=["models"]) == []


@pytest.mark.parametrize("what", ["metrics", pytest.param("optimizer", marks=pytest.mark.exhaustive)])
def test_an_error_inside_a_step_leaves_no_torn_line_and_no_whole_checkpoint(
    sft, runs_made_once, tmp_path, monkeypatch, what
):
    """A metric that cannot be written, or half of the weights have moved: the model as it is has the step's number, and the
    run resumes from the one before."""
    whole, calls = runs_made_once / "finished", []

    def write_half(file, record, right=run_folder._write_line):
        if file.name.endswith("metrics.jsonl") and record["step"] == 3 and "loss/sft" in record:
            calls.append(file.write(b'{"step": 3, "lo'))
            file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        right(file, record)

    def step(optimizer, *arguments, right=torch.optim.AdamW.step):
        calls.append(1)
        if len(calls) == 3:
            optimizer.param_groups[0]["params"][0].data.add_(1.0)
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(optimizer, *arguments)

    with monkeypatch.context() as patch:
        if what == "metrics":
            patch.setattr(run_folder, "_write_line", write_half)
        else:
            patch.setattr(torch.optim.AdamW, "step", torch.optim.Optimizer.profile_hook_step(step))
        with pytest.raises(OSError, match="No space left"):
            sft()
    assert calls
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {
        "step-000001", "step-000002", "step-000003-partial"
    }  # fmt: skip
    sft()
    assert contents(whole / "final") == contents(tmp_path / "run" / "final")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert lines.count(b'"step": 3') == (whole / "metrics.jsonl").read_bytes().count(b'"step": 3')
    assert all(json.loads(line) for line in lines.splitlines())


def test_an_allowed_change_has_its_effect(sft, tmp_path, killed):
    """Of the learning rate, which the saved optimizer holds too."""
    killed("step.learned:kill@3", lambda: sft(lr_schedule="constant", learning_rate=0.01))
    other = r"(?s)--learning-rate: 0.01 in the run, 0.5 now.*--allow-change learning-rate"
    with pytest.raises(ConfigError, match=other):
        sft(lr_schedule="constant", learning_rate=0.5)
    sft(lr_schedule="constant", learning_rate=0.5, allow_change=("learning-rate",))
    lines = read_metrics(tmp_path / "run", having="loss/sft")
    assert [line["optimizer/learning_rate"] for line in lines] == [0.01, 0.01, 0.5]


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path):
    """Two processes never hold it, and letting it go twice takes nobody's."""
    first = FolderLock(tmp_path)
    first.release()
    second = FolderLock(tmp_path)
    first.release()
    assert is_locked(tmp_path)
    with pytest.raises(ConfigError, match="is being written by another run"):
        FolderLock(tmp_path)
    second.release()
    assert not is_locked(tmp_path)
