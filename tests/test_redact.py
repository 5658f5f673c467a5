"""Secrets stay out of what is written down, and everything else stays as it is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.redact import holds_secret, redact, redact_printed, redacted_argv

HF = "hf_" + "aB3" * 11
OPENAI = "sk-proj-" + "aB3_x" * 6


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://h:80/score?token=SECRET", "http://h:80/score?token=***"),
        ("http://h/score?a=1&k=SECRET&b", "http://h/score?a=***&k=***&***"),
        ("https://user:SECRET@h/x", "https://***@h/x"),
        ("https://SECRET@h/x#access_token=SECRET", "https://***@h/x#access_token=***"),
        ("reward http://h/?t=SECRET refused", "reward http://h/?t=*** refused"),
        ("http://[::1]:80/?t=SECRET", "http://[::1]:80/?t=***"),
        ("sqlite:///a.db?key=SECRET", "sqlite:///a.db?key=***"),
        ("http:?t=SECRET", "http://?t=***"),
        ("http://[?t=SECRET", "http://[?***"),
        (f"the token {HF} was refused", "the token *** was refused"),
        (f"key={OPENAI}", "key=***"),
        ("ghp_" + "a1" * 18, "***"),
        ("AKIA" + "A1" * 8, "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-def_123", "***"),
    ],
)
def test_what_is_a_secret_by_its_form(text, kept):
    assert redact(text) == kept
    assert redact([{"a": (text,)}]) == [{"a": (kept,)}]


@pytest.mark.parametrize(
    "text",
    [
        "runs/sft", "org/name", "modelscope:org/name", "model:runs/sk-learn-experiments-2026/final", "python:a.py:f",
        "rule:regex:^hf_$", "http://127.0.0.1:8001/score", "你好：http", "C://", "http://[", "sqlite:///运行.db",
        "sqlite:////data/a.db", "file:///data", "a?b=c", "1e-5", "", "***",
        "task-1234567890123456789012345", "qwen2", "key", "token",
    ],
)  # fmt: skip
def test_what_is_none_stays(text):
    assert redact(text) == text
    assert redacted_argv([text]) == [text]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("https://huggingface.co/docs/x?a=b#chat", False), ("see http://h/?email=a@b for 更多", False), ("a@b.org", False),
        ("{{ raise_exception('eos_token') }}", False), ("", False), ("https://me:秘密@h/x", True), ("git+ssh://me@h/x", True),
        (f"令牌{HF}".replace("牌", "牌 "), True), ("of the environment: plain-looking-value!", True),
    ],
)  # fmt: skip
def test_what_may_not_be_published(text, holds, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "plain-looking-value")
    assert holds_secret(text) is holds


def test_secrets_of_the_environment_go_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "plain-looking-value")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("MY_KEY", "no")  # too short to be one
    monkeypatch.setenv("EDITOR", "an-editor-of-yours")
    text = "plain-looking-value/a?0123456789, no, an-editor-of-yours"
    assert redact(text) == "***/a?***, no, an-editor-of-yours"
    assert redacted_argv(["--output", "a/plain-looking-value"]) == ["--output", "a/***"]


def test_the_working_folder_is_no_password(monkeypatch):
    """PWD holds it, and paths below it are in many settings."""
    monkeypatch.setenv("PWD", "/somewhere/project")
    assert redact("/somewhere/project/data.jsonl") == "/somewhere/project/data.jsonl"


def test_names_of_settings_that_hold_secrets():
    settings = {
        "api_key": "x1",
        "wandb-key": "x2",
        "HF_TOKEN": "x3",
        "password": "x4",
        "client.secret": "x5",
        "empty_token": "",
    }
    assert redact(settings) == {name: "***" if value else "" for name, value in settings.items()}
    ours = {
        "max_new_tokens": "64",
        "micro_batch_tokens": 5,
        "max_prompt_tokens": None,
        "tokenizer": "a",
        "keys": "b",
        "key": 5,
    }
    assert redact(ours) == ours


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--wandb-key", "S", "--steps", "5"], ["--wandb-key", "***", "--steps", "5"]),
        (["--wandb-key=S", "x"], ["--wandb-key=***", "x"]),
        (["--hf_token", "S"], ["--hf_token", "***"]),
        (["HF_TOKEN=S", "ppo"], ["HF_TOKEN=***", "ppo"]),
        (["--max-new-tokens", "64"], ["--max-new-tokens", "64"]),
        (["--rewards", "http://h/?t=S", "http://u:S@h/"], ["--rewards", "http://h/?t=***", "http://***@h/"]),
        (["--rewards=http://h/?t=S"], ["--rewards=http://h/?t=***"]),
        (["--api-key", "--steps", "5"], ["--api-key", "--steps", "5"]),
        (["ppo", "c.yaml", "--token"], ["ppo", "c.yaml", "--token"]),
        ([], []),
    ],
)
def test_arguments(arguments, kept):
    assert redacted_argv(arguments) == kept


def test_other_values_are_returned_as_they_are():
    value = {"a": 1, "b": None, "c": 1.5, "d": [True, Path("x")], "e": object()}
    assert redact(value) == value


@given(st.recursive(st.text() | st.none(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8))
def test_it_takes_anything_and_done_twice_is_done_once(value):
    assert redact(redact(value)) == redact(value)


@given(st.lists(st.text()))
def test_arguments_keep_their_number(arguments):
    assert len(redacted_argv(arguments)) == len(arguments)


def test_what_is_printed_keeps_the_urls_of_texts():
    """Queries are hidden in records of settings; in texts of models and data only where a name says that it is a secret."""
    seen = "see https://en.wikipedia.org/wiki?title=北京&oldid=1#top, the Bearer authentication scheme"
    assert redact_printed(seen) == seen
    assert redact(seen) != seen
    assert redact_printed("https://h/?a=1&api_key=k1&sig=x") == "https://h/?a=1&api_key=***&sig=***"
    assert redact_printed("Authorization: Bearer abcdefgh1") == "Authorization: Bearer ***"
