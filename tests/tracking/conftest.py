"""Folders of runs, and a planted wandb that does what a test says."""

import json
import sys
import threading

import pytest

CLIENT = """
import json, os, sys, time

def hang():
    while os.path.exists({hanging!r}):
        time.sleep(0.02)

def Settings(**k):
    return k

def login(**k):
    {login}
    return True

class Run:
    dir, url = "somewhere/files", "http://tracker/run"
    summary = {{}}
    def define_metric(self, *a, **k): pass
    def log(self, metrics):
        {log}
        note("log", metrics)
    def finish(self, **k):
        {finish}
        note("finish", [k["exit_code"], self.summary])

def note(kind, content):
    with open({notes!r}, "a", encoding="utf-8") as file:
        file.write(json.dumps([kind, content]) + "\\n")

def init(**k):
    {init}
    note("init", {{name: str(k[name]) if name == "dir" else k[name] for name in k}})
    return Run()
"""
"""What heedful uses of wandb. It writes down what it is called with."""


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """``plant(log="...")``: put a wandb first on the path that does this when called. Returns what reads its notes, and what
    ends every ``hang()``."""
    root = tmp_path / "planted"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a second client of the same second would be the first
    notes, hanging = root / "notes.jsonl", root / "hanging"
    hanging.touch()

    def put(**does):
        code = {name: does.get(name, "pass") for name in ("login", "init", "log", "finish")}
        sys.modules.pop("wandb", None)
        (root / "wandb.py").write_text(CLIENT.format(notes=str(notes), hanging=str(hanging), **code), encoding="utf-8")
        return read

    def read(kind):
        lines = notes.read_text("utf-8").splitlines() if notes.exists() else []
        return [content for line in lines for found, content in [json.loads(line)] if found == kind]

    def let_go():
        hanging.unlink(missing_ok=True)
        for thread in threading.enumerate():
            if thread.name.startswith("heedful tracker "):
                thread.join(30)

    read.let_go = put.let_go = let_go
    yield put
    let_go()  # a client that hung would still be there in the tests that come next


@pytest.fixture
def run_folder(tmp_path):
    """``run_folder("运行")``: a finished run as heedful leaves it, as far as trackers look at it."""

    def make(name, identity="a" * 32, steps=4, **settings):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(json.dumps({"model": "模型", **settings}), encoding="utf-8")
        (folder / "run.json").write_text(json.dumps({"run": identity}), encoding="utf-8")
        lines = [json.dumps({"step": step, "损失": step / 2}) + "\n" for step in range(steps)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "summary.json").write_text('{"steps": 3}', encoding="utf-8")
        return folder

    return make
