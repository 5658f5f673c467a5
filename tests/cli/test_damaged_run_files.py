"""Files of runs and rounds that were damaged: each command names the right one, what is wrong with it, and a remedy."""

import json
import shutil

import pytest
import yaml

from heedful import faults
from heedful.cli.main import main

DAMAGE = {
    "empty": (b"", "it is empty"),
    "null": (b"null\n", "it holds null, and must hold"),
    "list": ('[1, "二"]\n'.encode(), "it holds a list, and must hold"),
    "truncated": (b'{"a": "b', "line 1 is not valid"),
    "not UTF-8": (b"{\xff\xfe", "it is not UTF-8 text"),
    "nested": (b"[" * 5_000, "it is nested too deeply"),
    "no key": (b'{"x": 1}\n', "it has no "),
    "a folder": (None, "it is a folder, not a file"),
}
WRONG = {
    "config.yaml": ("model", [1], "model must be a text, and is a list"),
    "run.json": ("run", 5, "run must be a text, and is a whole number"),
    "environment.json": ("hidden", "x", "hidden must be an object, and is a text"),
    "summary.json": ("steps", "三", "steps must be a whole number, and is a text"),
    "round.json": ("steps", [], "steps must be an object, and is a list"),
    "adapter_config.json": ("peft_type", 5, "peft_type must be a text, and is a whole number"),
}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """A finished run with adapters, the same before its end, and a project with a round."""
    root = tmp_path_factory.mktemp("运行")
    data = root / "数据.jsonl"
    rows = [{"prompt": f"问{i}", "completion": f"答{i}"} for i in range(6)]
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    words = ["sft", "--model", tiny(), "--data", str(data), "--batch-size", "2", "--lora-rank", "2"]
    words += ["--max-steps", "1", "--save-every", "1", "--num-samples", "1", "--dtype", "float32"]
    assert main([*words, "--output", str(root / "run")]) == 0
    shutil.copytree(root / "run", root / "half")
    (root / "half" / "summary.json").unlink()
    assert main(["label", "new", str(root / "project"), "--name", "项目"]) == 0
    (root / "project" / "rounds" / "1").mkdir(parents=True)
    content = {"round": 1, "settings": {}, "before": "m", "steps": {}}
    (root / "project" / "rounds" / "1" / "round.json").write_text(json.dumps(content), encoding="utf-8")
    return root, words


@pytest.fixture
def refused(folders, heedful, tmp_path):
    """``refused(folder, file, content, reason, *words)``: a command names the damaged file of a copy, and changes nothing."""

    def check(folder, file, content, reason, *words):
        root, sft = folders
        copy = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(root / folder, copy)
        path = copy / file
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        before = sorted((copy / "checkpoints").iterdir()) if folder == "half" else None
        outcome = heedful(
            *(sft if words[0] == "sft" else words[:1]), *[str(w).replace("RUN", str(copy)) for w in words[1:]]
        )
        assert outcome.status == 2, (words, content, outcome.err)
        assert f"{path}: " in outcome.message, outcome.message
        assert reason in outcome.message, outcome.message
        assert "bring it back" in outcome.message or "restore it" in outcome.message
        assert "Traceback" not in outcome.err
        assert before is None or sorted((copy / "checkpoints").iterdir()) == before

    return check


PUSH = ("push", "RUN", "me/x", "--license", "mit", "--dry-run", "--folder", "RUN-push", "--base-model", "a/b")
READERS = [
    ("half", "config.yaml", ("sft", "--output", "RUN")),
    ("half", "run.json", ("sft", "--output", "RUN")),
    ("half", "environment.json", ("sft", "--output", "RUN")),
    ("run", "config.yaml", PUSH),
    ("run", "environment.json", PUSH),
    ("run", "summary.json", PUSH),
    ("run", "final/adapter_config.json", ("merge", "--adapter", "RUN/final", "--output", "RUN-merged")),
    ("project", "rounds/1/round.json", ("round", "--project", "RUN")),
]
OF_A_RUN = ["config.yaml", "run.json", "environment.json"]
OPTIONAL = {("run", "environment.json"), ("run", "summary.json")}
"""Of which no key is needed."""


def test_a_damaged_file_is_named(refused, folders):
    """Each kind of damage in one file; of the others a truncated one and a value of the wrong kind."""
    for folder, file, words in READERS:
        is_first = file == "config.yaml" and words[0] == "sft"
        for kind in DAMAGE if is_first else ("truncated", "no key"):
            if not (kind == "no key" and (folder, file) in OPTIONAL):
                refused(folder, file, *DAMAGE[kind], *words)
        key, value, reason = WRONG[file.rpartition("/")[2]]
        content = yaml.safe_load((folders[0] / folder / file).read_text("utf-8")) | {key: value}
        refused(folder, file, json.dumps(content, ensure_ascii=False).encode(), reason, *words)


def test_the_list_of_runs_says_what_is_damaged(folders, heedful, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    shutil.copytree(folders[0] / "half", tmp_path / "复制")
    cases = [("config.yaml", kind) for kind in DAMAGE if kind != "no key"] + [(file, "truncated") for file in OF_A_RUN]
    for file, kind in cases:
        content, reason = DAMAGE[kind]
        path = tmp_path / "复制" / file
        whole = path.read_bytes()
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        outcome = heedful("runs", tmp_path)
        assert outcome.status == 0
        assert f"cannot resume: {path}: {reason}" in outcome.out
        path.rmdir() if content is None else path.unlink()
        path.write_bytes(whole)


def test_a_project_without_settings(folders, heedful, tmp_path):
    shutil.copytree(folders[0] / "project", tmp_path / "项目")
    for content in (b"", b"# only a comment\n"):
        (tmp_path / "项目" / "project.yaml").write_bytes(content)
        outcome = heedful("label", "stats", tmp_path / "项目")
        assert outcome.status == 2
        assert f"{tmp_path / '项目' / 'project.yaml'}: it has no settings; restore it" in outcome.message


@pytest.mark.parametrize("point", ["run.opened", "save.files", "step.learned"])
def test_a_full_disk_is_named(folders, heedful, tmp_path, point):
    """Whatever was written: status 3, the words, and where."""
    faults.plan(f"{point}:enospc")
    try:
        outcome = heedful(*folders[1], "--output", tmp_path / "满")
    finally:
        faults.plan("")
    assert outcome.status == 3
    assert f"no space left on the disk: {tmp_path / '满'}" in outcome.message
