"""The command line itself: what there is, help, versions, and how little it loads."""

import ast
import dataclasses
import errno
import inspect
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from heedful import __version__, configs
from heedful.apps.plot.run_metrics import read_algorithm
from heedful.cli.doctor_device import about_device
from heedful.cli.main import COMMANDS, main, spins
from heedful.configs.settings import required
from heedful.training.provenance import versions


def config_of(command):
    return COMMANDS[command].settings()


@cache
def documented(base):
    """The docstrings of a class's own fields."""
    body = ast.parse(inspect.getsource(base)).body[0].body
    pairs = itertools.pairwise(body)
    return {one.target.id: ast.literal_eval(text.value) for one, text in pairs if isinstance(one, ast.AnnAssign)}


def docstrings(config_class):
    """Every field's docstring, the most derived class winning."""
    bases = [base for base in reversed(config_class.__mro__) if "__annotations__" in vars(base)]
    return {name: text for base in bases for name, text in documented(base).items()}


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help_lists_every_command_on_one_screen(heedful, words):
    outcome = heedful(*words)
    assert (outcome.status, outcome.err) == (0, "")
    assert len(outcome.out.splitlines()) <= 50
    said = " ".join(outcome.out.split())
    for name, command in COMMANDS.items():
        assert name.split()[-1] in said.replace(",", " ").split()
        assert " " in name or f"{name} {command.summary}" in said
    first = outcome.out.split("\n\n")[2].splitlines()[1:]
    assert [line.split()[0] for line in first if line[2] != " "] == [
        "demo", "sft", "reward", "ppo", "grpo", "dpo", "evaluate", "chat", "course"
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(heedful, word):
    outcome = heedful(word)
    assert (outcome.status, outcome.out) == (0, version("heedful") + "\n")


def test_a_checkout_on_the_path_is_used_without_being_installed(monkeypatch, capsys):
    """It has no metadata: its version is in its source."""
    found = Distribution.from_name

    def none_of_heedful(name):
        if name == "heedful":
            raise PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(Distribution, "from_name", none_of_heedful)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert about_device(torch.device("cpu"))["heedful"] == __version__
    assert versions.__wrapped__()["heedful"] == __version__


def test_all_of_a_commands_help_explains_every_setting(heedful, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    for command in COMMANDS:
        outcome = heedful(*command.split(), "--help-all")
        assert outcome.status == 0
        assert max(map(len, outcome.out.splitlines())) <= 70 + 60  # a list of choices or an address is not broken
        said = " ".join(outcome.out.split())
        explained = docstrings(config_of(command))
        for field in dataclasses.fields(config_of(command)):
            assert "--" + field.name.replace("_", "-") in said
            assert " ".join(explained[field.name].split()) in said, f"--{field.name} is not explained by its docstring"


@pytest.mark.parametrize("width", [80, 100])
def test_a_commands_help_is_one_screen(heedful, width, monkeypatch):
    """What it does, an example, what is required, what people change with its default, and where the rest is."""
    monkeypatch.setenv("COLUMNS", str(width))
    for command in COMMANDS:
        outcome = heedful(*command.split(), "--help")
        assert outcome.status == 0
        lines = outcome.out.splitlines()
        assert len(lines) <= 50
        assert max(map(len, lines)) <= width
        assert f"usage: heedful {command}" in lines[0]
        assert f"heedful {command} --help-all" in outcome.out
        assert f"\nexample\n  heedful {command} " in outcome.out
        positions = getattr(config_of(command), "POSITIONAL", ())
        for name in required(config_of(command)):
            shown = name.upper() if name in positions else f"--{name.replace('_', '-')}"
            assert shown in outcome.out.split("required", maxsplit=1)[1], command


def test_a_misspelt_command_or_measure_is_answered_with_the_nearest(heedful):
    for words, said in (
        (["sfx"], "there is no command 'sfx'; did you mean 'sft'?\nheedful --help lists the commands"),
        (["pop", "--model", "m"], "there is no command 'pop'; did you mean 'ppo'?\nheedful --help lists the commands"),
        (["evaluate", "acuracy"], "'acuracy'; did you mean 'accuracy'?\nheedful evaluate --help lists them"),
        (["label", "serv", "甲"], "'serv'; did you mean 'serve'?\nheedful label --help lists them"),
    ):
        outcome = heedful(*words)
        assert (outcome.status, outcome.out) == (2, "")
        assert said in outcome.err
        assert len(outcome.err.splitlines()) == 2
    assert "did you mean 'evaluate" in heedful("evalute", "accuracy").err
    outcome = heedful("训练")
    assert outcome.status == 2
    assert "there is no command '训练'\n" in outcome.err
    assert "did you mean" not in outcome.err


@pytest.mark.parametrize(("words", "status"), [([], 2), (["-h"], 0), (["量"], 2)])
def test_evaluate_alone_lists_its_measures(heedful, words, status):
    outcome = heedful("evaluate", *words)
    assert outcome.status == status
    said = outcome.err if status else outcome.out
    for name in ("accuracy", "win-rate", "scores", "kl", "perplexity"):
        assert f"heedful evaluate {name}" in said
    assert (outcome.out if status else outcome.err) == ""
    assert ("evaluate has no measure '量'" in said) == (words == ["量"])


def test_help_and_mistyped_flags_load_next_to_nothing(tmp_path):
    """And configurations and their errors no torch, which takes seconds."""
    modules = sorted(path.stem for path in Path(configs.__file__).parent.glob("[!_]*.py"))
    assert len(modules) > 10
    (tmp_path / "c.yaml").write_text("model: m\ndata: d.jsonl\noutput: o\n", encoding="utf-8")
    code = (
        "import sys\nfrom heedful.cli.main import main\n"
        "def run(*words):\n    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "def loaded(*names):\n    print('LOADED', [name for name in names if name in sys.modules])\n"
        "run('--help'), run('--version'), run('nothing'), run('evaluate')\n"
        "loaded('torch', 'transformers', 'datasets', 'numpy', 'rich', 'yaml')\n"
        "run('demo', '--help'), run('ppo', '--kl-coeff', '1'), run('reward', '没有.yaml'), run('evaluate', 'kl')\n"
        f"import heedful, heedful.types, heedful.errors\nfrom heedful.configs import {', '.join(modules)}\n"
        f"assert parse.parse(online.PPOConfig, [{str(tmp_path / 'c.yaml')!r}], prog='p').model == 'm'\n"
        "heedful.PPOConfig, heedful.SFTConfig, heedful.RewardConfig, heedful.DemoConfig, heedful.DataError, heedful.Message\n"
        "loaded('torch', 'transformers', 'datasets', 'numpy')\n"
        "import heedful.data.readers\n"
        "loaded('torch', 'transformers', 'datasets', 'pyarrow')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("LOADED")] == ["LOADED []"] * 3


@pytest.mark.parametrize(("call", "freezes"), [("main()", True), ("main(sys.argv[1:])", False)])
def test_only_a_process_of_the_commands_own_sets_objects_apart_from_garbage(call, freezes):
    """A program that calls main may have garbage, which would be kept for good."""
    code = (
        "import gc, sys\nfrom heedful.cli.main import main\n"
        f"try:\n    {call}\nexcept SystemExit:\n    pass\n"
        "print('FROZEN', gc.get_freeze_count(), gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code, "course"], capture_output=True, text=True, check=True)
    _, count, enabled = done.stdout.splitlines()[-1].split()
    assert (int(count) > 0, enabled) == (freezes, "True")


def test_the_installed_command_exits_with_its_status(tmp_path):
    """What a shell sees: the status and the two streams, in a locale that is not UTF-8 too."""
    command = [sys.executable, "-m", "heedful"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "--help"], capture_output=True, env=environment, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    done = subprocess.run(
        [*command, "sft", "没有.yaml"], capture_output=True, env=environment, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert "没有.yaml" in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(("words", "unbuffered"), [(["--help"], ""), (["--version"], "1"), (["demo", "--help"], "1")])
def test_a_reader_who_has_seen_enough_is_no_traceback(words, unbuffered):
    """As in ``heedful --help | head -1``: the pipe closes while there is more to say, or before anything was."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "heedful", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_pipe_of_the_work_that_breaks_is_an_error(heedful, monkeypatch, tmp_path):
    """Only the reader of the output may leave: a run whose reward hung up is not finished."""

    def hang_up(_config):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("heedful.cli.commands.show_runs", hang_up)
    outcome = heedful("runs", tmp_path)
    assert (outcome.status, outcome.message) == (3, "heedful: Broken pipe")


def test_tiny_makes_a_model_and_does_not_overwrite_unasked(heedful, tmp_path):
    """Nor anything but a model."""
    folder = tmp_path / "小模型"
    assert heedful("tiny", "--output", folder, "--hidden-size", "16", "--num-layers", "1").status == 0
    before = (folder / "model.safetensors").read_bytes()
    outcome = heedful("tiny", "--output", folder, "--hidden-size", "16", "--seed", "1")
    assert (outcome.status, outcome.out) == (2, "")
    assert "--overwrite" in outcome.message
    assert (folder / "model.safetensors").read_bytes() == before
    assert heedful("tiny", "--output", folder, "--hidden-size", "16", "--seed", "1", "--overwrite").status == 0
    assert (folder / "model.safetensors").read_bytes() != before
    (tmp_path / "论文").mkdir()
    (tmp_path / "论文" / "第一章.md").write_text("重要", encoding="utf-8")
    for output in (tmp_path / "论文", tmp_path / "还没有" / ".." / "论文"):  # the same folder
        outcome = heedful("tiny", "--output", output, "--overwrite")
        assert (outcome.status, f"--output {output} " in outcome.message) == (2, True)
    assert (tmp_path / "论文" / "第一章.md").read_text(encoding="utf-8") == "重要"


def test_tiny_learns_tokens_from_demonstrations(heedful, data, tmp_path):
    assert heedful("tiny", "--output", tmp_path / "m", "--texts", data("sft"), "--vocab-size", "272").status == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "m")) == 272
    outcome = heedful("tiny", "--output", tmp_path / "n", "--texts", tmp_path / "没有.jsonl")
    assert (outcome.status, (tmp_path / "n").exists()) == (2, False)
    assert "没有.jsonl" in outcome.message


def test_an_interrupt_is_no_traceback(heedful, monkeypatch, tiny):
    """Ctrl-C in a conversation; 130 is what shells expect."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("heedful.cli.chat.chat.__defaults__", (interrupted,))
    outcome = heedful("chat", "--model", tiny(), "--max-new-tokens", "8")
    assert outcome.status == 130
    assert "interrupted" in outcome.err


@pytest.fixture
def talking(forked, tiny):
    """A ``heedful chat`` in a process of its own that has answered once and waits for the next line."""
    reading, writing = os.pipe()

    def chat():
        sys.stdin = os.fdopen(reading, encoding="utf-8")
        sys.argv = ["heedful", "chat", "--model", tiny(), "--max-new-tokens", "4"]
        runpy.run_module("heedful", run_name="__main__")

    process = forked(chat)
    try:
        os.write(writing, b"/reset\n")
        while "starts over" not in process.said()[0]:
            assert process.poll() is None, process.said()
            time.sleep(0.005)
        yield process
    finally:
        process.kill()
        process.communicate()
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(("number", "status", "message"), [
    (signal.SIGINT, 130, "heedful: interrupted\n"),
    (signal.SIGTERM, 143, "heedful: terminated\n"),
])  # fmt: skip
def test_a_signal_ends_a_command_with_a_message(talking, number, status, message):
    """What a shell sees after Ctrl-C and after ``kill``: 128 and the signal's number."""
    talking.send_signal(number)
    _, err = talking.communicate()
    assert (talking.returncode, err) == (status, message)


@pytest.mark.exhaustive
def test_a_terminated_run_leaves_no_half_written_folder(tiny, data, tmp_path):
    """SIGTERM unwinds as Ctrl-C does: a run that has not done a step is removed again."""
    output = tmp_path / "运行"
    flags = ["--model", tiny(), "--data", data("sft"), "--output", str(output), "--dtype", "float32"]
    code = (
        "import os, signal, sys\nfrom heedful.cli.main import main\nfrom heedful.training.run_folder import RunFolder\n"
        "def log(folder, *_):\n    print(folder.path.is_dir())\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "RunFolder.log = log\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "sft", *flags, "--batch-size", "2", "--max-steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "True\n"), done.stderr
    assert done.stderr.endswith("heedful: terminated\n")
    assert "Traceback" not in done.stderr
    assert not output.exists()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: None])
def test_the_handler_of_sigterm_is_put_back(heedful, monkeypatch, handler):
    seen = []
    monkeypatch.setattr("heedful.cli.main._run", lambda _, **__: seen.append(signal.getsignal(signal.SIGTERM)) or 0)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        assert heedful("--help").status == 0
        assert seen[0] is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_sigterm_stays_ignored(heedful, monkeypatch):
    """Whoever started the process with SIGTERM ignored (``trap '' TERM`` in a shell) meant it."""
    monkeypatch.setattr("heedful.cli.main._run", lambda _, **__: os.kill(os.getpid(), signal.SIGTERM) or 0)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert heedful("--help").status == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_main_runs_outside_the_main_thread(capsys):
    """Only the main thread may set signal handlers; elsewhere a command runs without."""
    found = []
    thread = threading.Thread(target=lambda: found.append(main(["--version"])))
    thread.start()
    thread.join()
    assert found == [0]


def test_a_run_says_what_came_of_it_and_its_saved_configuration_repeats_it(train, heedful, tmp_path):
    """Number by number."""
    run, again = tmp_path / "运行", tmp_path / "再来"
    outcome = train("sft")
    assert outcome.status == 0
    assert outcome.out.startswith("1 step in ")  # results on standard output, progress on standard error
    assert f"heedful report {run}" in outcome.out
    assert "sft 1/1" in outcome.err
    assert read_algorithm(run) == "sft"
    outcome = heedful("sft", tmp_path / "运行" / "config.yaml", "--output", again)
    assert outcome.status == 0, outcome.err
    one, other = (
        [json.loads(line)["loss/sft"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "运行", again)
    )
    assert one == other
    saved = [yaml.safe_load((f / "config.yaml").read_text(encoding="utf-8")) for f in (tmp_path / "运行", again)]
    assert saved[0] == saved[1]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU OpenMP, which torch brings on Linux, what it was told")
@pytest.mark.parametrize(("chosen", "looks"), [({}, None), ({"OMP_WAIT_POLICY": "active"}, 30_000_000_000)], ids=str)
def test_threads_sleep_while_they_wait_unless_the_user_chose(tmp_path, chosen, looks):
    """Spinning threads take the processor from the programs beside them, and from each other."""
    own = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | chosen
    command = [sys.executable, "-m", "heedful", "tiny", "--output", str(tmp_path / "小模型")]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stderr
    if looks is None:
        looks = spins(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    assert {int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", told)} == {looks}


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None")]
)
def test_memory_of_a_gpu_grows_in_place_unless_the_user_chose(chosen, expected):
    """torch reads it when it is loaded; a command's help does not load it."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | chosen
    told = "import atexit, os; atexit.register(lambda: print(os.environ.get('PYTORCH_ALLOC_CONF')))"
    code = f"{told}; from heedful.cli.main import main; main(['sft', '--help'])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert output.stdout.splitlines()[-1] == expected


def test_a_thread_looks_more_often_where_a_look_takes_less_time():
    """With 1,000 looks of 13 ns a PPO step of the demo took a third longer than with 2,000 (docs/results/speed.md)."""
    assert spins("vendor_id\t: GenuineIntel\nflags\t: fpu avx512_bf16 avx512_fp16\n") == 2000
    assert spins("vendor_id\t: GenuineIntel\nflags\t: fpu avx512_bf16\n") == 1000
    assert spins("vendor_id\t: AuthenticAMD\nflags\t: fpu avx512_fp16\n") == 1000
    assert spins("") == 1000


@pytest.mark.exhaustive
def test_importing_heedful_leaves_threads_as_they_are():
    code = (
        "import os; before = dict(os.environ); import heedful; heedful.PPOConfig; heedful.train_ppo\n"
        "changed = {name for name, value in os.environ.items() if before.get(name) != value}\n"
        "assert not {name for name in changed if 'OMP' in name or 'KMP' in name}, changed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_was_killed_at_its_end_is_complete_when_its_command_comes_again(
    forked_heedful, heedful, tiny, data, tmp_path
):
    """Nothing is done then, and the exit status is 0; other settings or data are refused, and nothing is replaced."""
    path = Path(data("sft"))
    flags = {"model": tiny(), "data": str(path), "output": str(tmp_path / "运行"), "dtype": "float32", "device": "cpu"}
    flags |= {"batch_size": 2, "max_steps": 1, "learning_rate": 1e-3}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    killed = forked_heedful("sft", *words, env={**os.environ, "HEEDFUL_FAULTS": "run.finished:kill"})
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    before = {file: file.read_bytes() for file in (tmp_path / "运行").rglob("*") if file.is_file()}

    again = heedful("sft", **flags)
    assert (again.status, again.err) == (0, "")
    assert "is complete already" in again.out
    assert f"heedful chat --model {tmp_path / '运行'}/final" in " ".join(again.out.split())
    other = heedful("sft", **flags | {"learning_rate": 1e-4})
    assert other.status == 2
    assert "--learning-rate 0.001, not 0.0001" in other.message
    path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")
    changed = heedful("sft", **flags)
    assert changed.status == 2
    assert f"{path} has changed since then" in changed.message
    after = {file: file.read_bytes() for file in (tmp_path / "运行").rglob("*") if file.is_file()}
    assert {file: after[file] for file in before if file.name != ".lock"} == {
        file: content for file, content in before.items() if file.name != ".lock"
    }
