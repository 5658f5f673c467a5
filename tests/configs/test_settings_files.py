"""Files that hold no settings, whatever they hold: refused soon, with what they are."""

import json
import os
import sys
import threading
import time

import pytest

from heedful import ConfigError, SFTConfig
from heedful.configs.parse import parse
from heedful.files import read_object

LAUGH = (
    "a: &a ["
    + "x," * 9
    + "]\n"
    + "".join(f"{new}: &{new} [{f'*{old},' * 9}]\n" for old, new in zip("abcdefg", "bcdefgi", strict=True))
)
FILES = {
    "a long comment": ("model: m\n# " + "长" * 400_000, "has more than 262,144 bytes, so it cannot be a settings file"),
    "60,000 keys": ("".join(f"k{i}: 1\n" for i in range(60_000)), "has more than 262,144 bytes"),
    "2,000 keys": ("".join(f"k{i}: 1\n" for i in range(2_000)), "1,995 more names that are not settings"),
    "a key twice": ("model: a\nmodel: b\n", ":2: the key 'model' is set twice"),
    "a long key": ("x" * 1000 + ": 1", f":1: {'x' * 60} (--"),
    "aliases of aliases": (LAUGH, "a nested item"),
    "an alias of itself": ("model: &a [*a]", "a nested item"),
    "deep lists": ("a: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
    "deep mappings": ("{a: " * 1500 + "}" * 1500, "nested too deeply"),
    "JSON": ('{"model": {"a": 1}}', "model holds a mapping"),
    "a list": ("[1]", "found a list"),
    "a word": ("model", "found a single value"),
    "UTF-16": ("model: 模型\n".encode("utf-16"), "not UTF-8 (it is UTF-16); save it as UTF-8"),
    "GB18030": ("model: 模型\n".encode("gb18030"), "not UTF-8"),
    "any bytes": (bytes(range(256)), "not UTF-8"),
    "NUL": (b"\0model: m", "not valid YAML"),
    "half a character": (b'{"model": "\\ud83d"}', ":1: model has half a character"),
    "an open list": ("model: [m\n", "not valid YAML"),
    "an open quote": ("model: 'm\n", "not valid YAML"),
    "two documents": ("model: m\n---\nmodel: n\n", "not valid YAML"),
    "two colons": ("a: b: c\n", 'not valid YAML: mapping values are not allowed here in "<unicode string>", line 1'),
    "a bell": ("model: \x07\n", "not valid YAML"),
    "a tag": ("model: !!python/object:os.system x", "has the tag"),
}  # fmt: skip


def test_what_holds_no_settings(heedful, tmp_path):
    path = tmp_path / "设置.yaml"
    for name, (content, said) in FILES.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        started = time.thread_time()
        outcome = heedful("sft", path)
        assert time.thread_time() - started < 10, name
        assert outcome.status == 2, name
        assert outcome.err.startswith(f"heedful: ConfigError: {path}")
        assert said.replace(" ", "") in outcome.message.replace(" ", ""), name
        assert len(outcome.err) < 2000
        assert "Traceback" not in outcome.err


def test_what_is_no_file(heedful, tmp_path):
    for path, said in (
        ("/dev/zero", "is no file"),
        (tmp_path, "is a folder"),
        (tmp_path / "a.yaml", "no such YAML file"),
    ):
        outcome = heedful("sft", path)
        assert outcome.status == 2
        assert said in outcome.message


def test_a_pipe_is_not_waited_for(heedful, tmp_path):
    """Reading it would wait until somebody writes."""
    os.mkfifo(tmp_path / "a.yaml")
    found = []
    thread = threading.Thread(target=lambda: found.append(heedful("sft", tmp_path / "a.yaml")), daemon=True)
    thread.start()
    thread.join(120)
    assert found
    assert "is no file" in found[0].message


def test_keys_that_are_no_settings_are_named_with_the_nearest(heedful, written):
    path = written("a.yaml", "model: m\nlearning_rat: 1\n学习率: 2\n")
    outcome = heedful("sft", path)
    assert outcome.status == 2
    assert (
        f"{path}:2: learning_rat (--learning-rat) is not a setting of heedful sft. Perhaps you meant --learning-rate"
        in outcome.message
    )
    assert f"{path}:3: 学习率 (--学习率) is not a setting of heedful sft heedful sft --help-all" in outcome.message


def test_criteria_that_are_aliases_of_aliases(heedful, written, tmp_path):
    """The only settings that are mappings in a list; unfolded, these would be 9 ** 8 words."""
    laugh = "criteria:\n  - &a {name: x}\n" + "".join(
        f"  - &{new} {{{', '.join(f'k{i}: *{old}' for i in range(9))}}}\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    started = time.thread_time()
    outcome = heedful("label", "new", written("项目.yaml", f"project: {tmp_path / '乙'}\nname: a\n{laugh}"))
    assert outcome.status == 2
    assert "criteria holds a nested" in outcome.message
    assert time.thread_time() - started < 10


def test_json_escapes_are_whole_characters(tmp_path):
    path = tmp_path / "设置.json"
    path.write_text(json.dumps({"model": "模", "data": "d", "output": "o", "system_prompt": "好😀"}))
    assert parse(SFTConfig, [str(path)], prog="sft").system_prompt == "好😀"


def test_missing_settings_are_named_all_at_once(heedful):
    outcome = heedful("ppo", "--model", "模型")
    assert outcome.status == 2
    for name in ("--data", "--output"):
        assert f"{name} is missing: " in outcome.message
    assert "--model is missing" not in outcome.message
    assert "heedful ppo --help shows an example" in outcome.message


@pytest.fixture
def boundless():
    """As in a program that raised Python's limit of recursion."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    yield
    sys.setrecursionlimit(before)


def test_depth_is_bounded_before_it_costs_time(heedful, written, boundless):
    for text in ("{" * 1600, "a: " + "[" * 1600, "[a, {b: " * 800, "- " * 1600, "? " * 1600, "模: {" * 1600):
        path = written("深.yaml", text)
        started = time.thread_time()
        outcome = heedful("sft", path)
        assert time.thread_time() - started < 0.2
        assert outcome.status == 2
        assert "nested too deeply" in outcome.message, text[:9]


def test_the_settings_of_a_run_are_bounded_alike(tmp_path, boundless):
    path = tmp_path / "config.yaml"
    path.write_text("{" * 1600, encoding="utf-8")
    started = time.thread_time()
    with pytest.raises(ConfigError, match=r"config\.yaml: it is nested too deeply; bring it back"):
        read_object(path, "bring it back", error=ConfigError)
    assert time.thread_time() - started < 0.2
