"""What goes to the Hub, and what a Hub that refuses leaves."""

import importlib
import json
import os
import sys

import pytest
import yaml
from huggingface_hub import constants

from heedful.cli import main as cli

MIT = ("--license", "mit")


def main(words):
    """The exit status of a command. What is wrong with a setting by itself ends it as wrong flags do."""
    try:
        return cli.main(words)
    except SystemExit as stopped:
        return stopped.code


def told(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_only_the_model_and_its_card_go_out(edited, runs, tmp_path, capsys, monkeypatch):
    """No other file of the run or beside the model, no path of this machine, no token."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "aB3" * 11)
    run = edited("dpo", tmp_path / "run")
    config = json.loads((run / "final" / "config.json").read_text("utf-8")) | {"_name_or_path": str(run)}
    (run / "final" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (run / "final" / ".env").write_text("SECRET=1")
    (run / "final" / "optimizer.pt").write_bytes(b"1")
    (run / "final" / "value_head").mkdir()
    (run / "final" / "link.json").symlink_to("/etc/hostname")
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == 0
    assert "not pushed: .env, link.json, optimizer.pt, value_head/" in told(capsys)
    files = {path.name: path.read_bytes() for path in (tmp_path / "run-push").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "curves.png"} <= files.keys()
    assert not files.keys() & {".env", "optimizer.pt", "value_head", "link.json", "checkpoints"}
    assert files["curves.png"].startswith(b"\x89PNG")
    assert b"sft/final" in files["README.md"]
    for name, content in files.items():
        assert not [root for root in (runs("sft").parents[1], tmp_path) if str(root).encode() in content], name
        assert b"hf_aB3" not in content, name


def test_a_file_with_a_secret_is_refused(edited, tmp_path, capsys, monkeypatch):
    """An address with a fragment is none: a tokenizer's documentation may stand there."""
    monkeypatch.setenv("MY_API_KEY", "秘密-秘密-秘密")
    run = edited("sft", tmp_path / "run")
    (run / "metrics.jsonl").unlink()  # no picture is drawn
    for name, text in (
        ("config.json", "see\nhf_" + "aB3" * 11),
        ("tokenizer_config.json", "https://me:secret@host/x"),
        ("chat_template.jinja", "{# 秘密-秘密-秘密 #}"),
        ("tokenizer_config.json", "see https://huggingface.co/docs/x?a=b#chat"),
    ):
        is_refused, path = "docs" not in text, run / "final" / name
        before = path.read_text("utf-8") if path.exists() else None
        new = json.dumps({**json.loads(before), "note": text}) if name.endswith(".json") else text
        path.write_text(new, encoding="utf-8")
        assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == (2 if is_refused else 0)
        assert (f"{name} seems to contain a secret" in told(capsys)) is is_refused
        assert (tmp_path / "run-push").exists() is not is_refused
        path.unlink() if before is None else path.write_text(before, encoding="utf-8")


def adapters_on(base, edited, folder, *, model="away/final", **hashes):
    """A run of adapters that lie on this, and that was trained from this model."""
    run = edited("lora", folder, config={"model": model}, environment={"models": {model: "a" * 64, **hashes}})
    (run / "metrics.jsonl").unlink()  # no picture is drawn
    path = run / "final" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "base_model_name_or_path": base}), "utf-8")
    return run


def base_of(folder):
    metadata = yaml.safe_load((folder / "README.md").read_text("utf-8").split("---\n")[1])
    base = json.loads((folder / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
    return [base, *(metadata[name] for name in ("base_model", "base_model_relation", "library_name"))]


def test_adapters_say_themselves_on_what_they_lie(edited, tmp_path, capsys):
    """A base that is only here cannot be named, also if its name looks like ORG/NAME from another folder, and if training
    began with a model of the Hub, which is not the one that the adapters lie on."""
    known = adapters_on("Qwen/Qwen3-0.6B", edited, tmp_path / "known")
    assert main(["push", str(known), "org/name", "--dry-run", *MIT]) == 0
    assert base_of(tmp_path / "known-push") == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "adapter", "peft"]
    parent = edited("sft", tmp_path / "sft", config={"model": "Qwen/Qwen3-0.6B-Base"})
    run = adapters_on("sft/base", edited, tmp_path / "run", model=str(parent / "final"), **{"sft/base": "a" * 64})
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == 2
    assert "base model is not known on the Hub" in told(capsys)
    assert main(["push", str(run), "org/name", "--dry-run", *MIT, "--base-model", "org/base"]) == 0
    assert base_of(tmp_path / "run-push") == ["org/base", "org/base", "adapter", "peft"]
    text = (tmp_path / "run-push" / "README.md").read_text("utf-8")
    assert "from peft import AutoPeftModelForCausalLM" in text
    assert "They fit only a base" not in text


def test_adapters_on_adapters_fit_only_a_base_that_holds_those(edited, runs, tmp_path, capsys):
    run = adapters_on(str(runs("lora") / "final"), edited, tmp_path / "run")
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == 2
    said = told(capsys)
    assert f"whose base is itself adapters ({runs('lora') / 'final'})" in said
    assert f"heedful merge --adapter {run / 'final'}" in said
    assert main(["push", str(run), "org/name", "--dry-run", *MIT, "--base-model", "org/merged"]) == 0
    assert "They fit only a base that holds those too." in (tmp_path / "run-push" / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["org/name"], "--license is missing"),
        (["name", *MIT], "is not the name of a repository; write ORG/NAME"),
        (["org/name", "--license", "MIT License"], "is not in the Hub's form"),
        (["org/name", *MIT, "--language", "Chinese"], "--language 'Chinese' is no code"),
        (["org/name", *MIT, "--folder", "x"], "belongs to --dry-run"),
        (["org/name", *MIT, "--dry-run", "--folder", "."], "exists or cannot be created"),
        (
            ["org/name", *MIT, "--results", "nothing.json"],
            "nothing.json: there is no such file; --results takes",
        ),
        (["org/name", *MIT, "--base-model", "/here"], "is no model on the Hub"),
    ],
)
def test_what_makes_no_sense_is_refused(words, reason, runs, capsys):
    assert main(["push", str(runs("sft")), *words]) == 2
    assert reason in told(capsys)


def test_a_folder_that_is_no_run_or_not_finished_is_refused(edited, tmp_path, capsys):
    assert main(["push", str(tmp_path), "org/name", *MIT]) == 2
    assert "is not a run: it has no config.yaml" in told(capsys)
    run = edited("sft", tmp_path / "run")
    (run / "final").rename(run / "other")
    assert main(["push", str(run), "org/name", *MIT]) == 2
    assert "has no model: the run is not finished" in told(capsys)


@pytest.fixture
def pushed(forked):
    """``pushed(run, hub, ...)``: exit status of the command, and what it said."""

    def push(run, hub, *words, token="hf_test"):
        def work():
            importlib.reload(constants)  # the Hub's address is read once
            sys.exit(main(["push", str(run), "org/name", *MIT, *words]))

        environment = {**os.environ, "HF_ENDPOINT": hub if isinstance(hub, str) else hub.address}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(run.parent / "nobody")}
        process = forked(work, env=environment | ({"HF_TOKEN": token} if token else {}))
        said = process.communicate(timeout=300)
        return process.returncode, " ".join("".join(said).split())

    return push


def test_a_push_is_one_commit_of_all_files(runs, hub, pushed):
    here = hub()
    status, said = pushed(runs("sft"), here)
    assert status == 0, said
    assert f"files in {here.address}/org/name" in said
    (creation,) = [json.loads(body) for path, body in here.requests if path == "/api/repos/create"]
    assert creation.get("private") is True or creation.get("visibility") == "private"
    (commit,) = [body for path, body in here.requests if "/commit/" in path]
    files = {json.loads(line)["value"]["path"] for line in commit.splitlines() if b'"file"' in line}
    assert {"README.md", "model.safetensors", "config.json", "curves.png"} <= files
    assert not any("value_head" in name or "checkpoint" in name for name in files)


@pytest.mark.parametrize(
    ("status", "exit_status", "reason"),
    [
        (401, 2, "the Hub refuses org/name (401): run `hf auth login`"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                (403, 2, "the Hub refuses org/name (403): your token may not write there"),
                (404, 2, "the Hub refuses org/name (404): there is no such repository"),
                (400, 2, "the Hub refuses org/name (400): see its message"),
                (500, 3, "failed (500); try again later"),
            )
        ),
        (None, 3, "cannot be reached; try again later"),
    ],
)
def test_a_hub_that_refuses_or_is_away(status, exit_status, reason, runs, hub, pushed):
    before = {path: path.read_bytes() for path in sorted(runs("sft").rglob("*")) if path.is_file()}
    found, said = pushed(runs("sft"), hub(status=status) if status else "http://127.0.0.1:9")
    assert (found, reason in said) == (exit_status, True), said
    assert f"{runs('sft')} is unchanged" in said
    assert "Traceback" not in said
    assert before == {path: path.read_bytes() for path in sorted(runs("sft").rglob("*")) if path.is_file()}


def test_nobody_is_logged_in(runs, hub, monkeypatch, pushed):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    here = hub()
    found, said = pushed(runs("sft"), here, token=None)
    assert (found, here.requests) == (2, [])
    assert "you are not logged in to the Hub: run `hf auth login`" in said


@pytest.mark.exhaustive
def test_a_public_repository_is_not_pushed_to_unasked(runs, hub, pushed):
    here = hub(is_private=False)
    found, said = pushed(runs("sft"), here)
    assert found == 2
    assert "org/name exists and is public; add --no-private" in said
    assert not [path for path, _ in here.requests if "/commit/" in path]
    assert pushed(runs("sft"), here, "--no-private")[0] == 0
