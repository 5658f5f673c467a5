"""A short fine-tuning run, and trackers that are planted: packages with the names of the real ones that do as a test says."""

import json
import sys
import threading

import pytest
import torch

from heedful import SFTConfig, train_sft

CLIENT = """
import json, os, sys, time

def hang():
    while os.path.exists({hanging!r}):
        time.sleep(0.05)

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
        note("finish", [k, self.summary])

def note(kind, content):
    with open({notes!r}, "a", encoding="utf-8") as file:
        file.write(json.dumps([kind, content]) + "\\n")

def init(**k):
    {init}
    note("init", [k["id"], k["name"], k["project"], k["config"], k["resume"]])
    note("settings", k["settings"])
    return Run()
"""
"""What heedful uses of wandb. It writes down what it is called with."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """``plant(init="...")``: put a wandb first on the path that does this when called. Returns what reads its notes.

    What a test tells to ``hang()`` hangs until the test has ended.
    """
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

        def read(kind):
            lines = notes.read_text("utf-8").splitlines() if notes.exists() else []
            return [content for line in lines for found, content in [json.loads(line)] if found == kind]

        return read

    yield put
    hanging.unlink()  # a client that hung would still be there in the tests that come next
    for thread in threading.enumerate():
        if thread.name.startswith("heedful tracker "):
            thread.join(10)


@pytest.fixture
def settings(tiny, tmp_path):
    """``settings("folder", track=("wandb",))``: of a short run on demonstrations."""
    data = tmp_path / "demonstrations.jsonl"
    turns = [(f"第{i}问", f"好的 {i}") for i in range(8)]
    records = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def make(folder, **changes):
        common = {"max_steps": 4, "batch_size": 2, "learning_rate": 1e-2, "eval_fraction": 0.3, "eval_every": 2}
        common |= {"sample_every": 0, "dtype": "float32", "save_every": 2, "save_total_limit": 0}
        return SFTConfig(model=tiny("gpt2"), data=str(data), output=tmp_path / folder, **{**common, **changes})

    return make


@pytest.fixture
def train(settings):
    """``train("folder", ...)``: the run itself. Returns its folder."""

    def run(folder, **changes):
        config = settings(folder, **changes)
        train_sft(config)
        return config.output

    return run
