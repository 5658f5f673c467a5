"""No command says or writes down a secret that it was given, whoever formulates the message."""

import json
import subprocess
import sys
import warnings

import pyarrow.parquet as pq
import pytest

from heedful.cli.main import main

TOKEN = "hf_" + "aB3x" * 9
ADDRESS = "https://me:S3cretWord@h.invalid/x?key=S3cretWord"
SECRETS = ("aB3xaB3x", "S3cretWord", "0f1e2d3c4b5a69788796")
REWARD = f"""
import warnings

def raises(completions, **columns):
    raise ValueError("登录失败 {TOKEN} {ADDRESS} 0f1e2d3c4b5a69788796")
"""


@pytest.fixture
def told(heedful, monkeypatch):
    """``told(*words, status=2)`` is what a command says, in which no secret may be."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "0f1e2d3c4b5a69788796")

    def run(*words, status=2):
        outcome = heedful(*words)
        assert outcome.status == status, outcome.err
        for secret in SECRETS:
            assert secret not in outcome.err
            assert secret not in outcome.out
        assert "Traceback" not in outcome.err
        return outcome.message

    return run


@pytest.fixture
def ppo(tiny, written, tmp_path):
    data = written("题目.jsonl", [{"prompt": [{"role": "user", "content": "问"}]}] * 4)
    words = ("ppo", "--model", tiny(), "--data", data)
    words += ("--output", tmp_path / "运行", "--rollout-batch-size", "4", "--minibatch-size", "4", "--steps", "1")
    return (*words, "--max-new-tokens", "4", "--eval-fraction", "0", "--dtype", "float32")


def test_a_reward_that_raises(told, ppo, written):
    said = told(*ppo, "--rewards", f"python:{written('评分.py', REWARD)}:raises")
    assert "登录失败 *** https://***@h.invalid/x?key=*** ***" in said


def test_words_with_a_secret(told, tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    for value in (ADDRESS, f"./{TOKEN}"):
        for command in (
            ("sft", "--data", "没有.jsonl", "--output", "a", "--model"),
            ("chat", "--model"),
            ("merge", "--output", "a", "--adapter"),
            ("serve-reward", "--model"),
        ):
            assert "***" in told(*command, value)
    for words in (
        ("sft", "--steps", TOKEN),
        ("sft", "--micro-batch-size", TOKEN, "--model", "m" * 60),
        ("sft", f"--no-such-flag={TOKEN}"),
        ("sft", "--data", f"{TOKEN}.jsonl", "--model", tiny(), "--output", "o"),
        ("ppo", "--rewards", ADDRESS, "--model", tiny(), "--output", "o", "--data", "d"),
        ("sft", f"{TOKEN}.yaml"),
        (TOKEN,),
        ("evaluate", TOKEN),
        ("label", "export", TOKEN),
        ("runs", TOKEN),
        ("report", TOKEN, "--output", "a.png"),
        ("push", "--run", TOKEN, "--to", "a/b"),
        ("round", TOKEN, "--policy", "a", "--prompts", "b"),
    ):
        told(*words)


def test_a_file_of_settings_with_a_secret(told, written):
    told("sft", written("a.yaml", f"model: m\ndata: d\noutput: o\nmicro_batch_size: {TOKEN}\n"))
    told("sft", written("b.yaml", f"{TOKEN}: 1\n"))


def test_a_setting_with_a_secret_is_in_no_record(told, ppo, tmp_path):
    """A system message is part of every prompt, and prompts are in samples.jsonl and the rollouts."""
    told(*ppo, "--rewards", "rule:digits", "--system-prompt", f"你的令牌是 {TOKEN}。", "--rollouts", "all", status=0)
    run = tmp_path / "运行"
    for path in (path for path in run.rglob("*") if path.is_file() and "tensorboard" not in path.parts):
        assert TOKEN.encode() not in path.read_bytes(), path
    (sample, *_) = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert "你的令牌是 ***。" in json.loads(sample)["prompt"]
    rows = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()
    assert "你的令牌是 ***。" in rows[0]["prompt"]
    evaluated = tmp_path / "结果.json"
    told("evaluate", "scores", "--model", ppo[2], "--data", ppo[4], "--rewards", "rule:digits", "--max-new-tokens", "4",
         "--system-prompt", TOKEN, "--output", evaluated, status=0)  # fmt: skip
    assert TOKEN not in evaluated.read_text(encoding="utf-8")


def test_data_stays_what_it_is(told, tiny, written, tmp_path):
    """What stands in the data is recorded as it is: otherwise a sample would not say what the model has learned."""
    data = written("示范.jsonl", [{"prompt": f"问 {TOKEN}", "completion": "答"}] * 4)
    words = ("--model", tiny(), "--output", tmp_path / "运行", "--eval-fraction", "0", "--dtype", "float32")
    told("sft", *words, "--data", data, "--max-steps", "1", "--batch-size", "2", status=0)
    assert TOKEN in (tmp_path / "运行" / "samples.jsonl").read_text(encoding="utf-8")


def test_warnings_and_what_libraries_print(capsys, monkeypatch, tmp_path):
    """They go through the same stream; afterwards it is the former one again."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "0f1e2d3c4b5a69788796")

    def shows(_):
        warnings.warn(f"旧 {TOKEN}", stacklevel=1)
        print(ADDRESS, file=sys.stderr)
        sys.stderr.writelines(["0f1e2d3c4b5a69788796\n"])
        return {}

    import heedful.cli.commands

    monkeypatch.setattr(heedful.cli.commands, "show_runs", shows)
    before = sys.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
        assert main(["runs", str(tmp_path)]) == 0
    assert sys.stderr is before
    assert capsys.readouterr().err == "旧 ***\nhttps://***@h.invalid/x?key=***\n***\n"


@pytest.mark.exhaustive
def test_a_mistake_of_ours(tmp_path):
    """A traceback too is without secrets."""
    code = f"""
import sys, heedful.cli.commands
def fails(_): raise AssertionError("{TOKEN}")
heedful.cli.commands.show_runs = fails
sys.argv = ["heedful", "runs", "."]
from heedful.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert "AssertionError: ***" in done.stderr
    assert TOKEN not in done.stderr.replace(f'raise AssertionError("{TOKEN}")', "")
