"""What goes to the Hub, what the card says, and what a Hub that refuses leaves."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from heedful.cli import main as cli


def main(words):
    """The exit status of a command. What is wrong with a setting by itself ends it as wrong flags do."""
    try:
        return cli.main(words)
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture
def dry(runs, tmp_path, capsys):
    """``dry("sft", ...)``: the folder that would go out."""

    def write(name, *words):
        folder = tmp_path / f"{name}-out"
        status = main(["push", str(runs(name)), "org/name", "--dry-run", "--folder", str(folder), *words])
        assert status == 0, capsys.readouterr().err
        return folder

    return write


def card_of(folder):
    text = (folder / "README.md").read_text("utf-8")
    _, metadata, rest = text.split("---\n", 2)
    return yaml.safe_load(metadata), rest


MIT = ("--license", "mit")


def test_the_folder_has_the_model_and_its_card(dry, runs):
    folder = dry("sft", *MIT, "--language", "zh", "en")
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "curves.png"} <= names
    metadata, text = card_of(folder)
    assert metadata["license"] == "mit"
    assert metadata["language"] == ["zh", "en"]
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["tags"] == ["heedful", "sft"]
    assert "base_model" not in metadata
    facts = json.loads((runs("sft") / "environment.json").read_text("utf-8"))
    for digest in (*facts["models"].values(), *facts["data"].values()):
        assert digest in text
    summary = json.loads((runs("sft") / "summary.json").read_text("utf-8"))
    assert (
        f"| `eval/loss` | {summary['first_evaluation']['eval/loss']:.4g} | {summary['last_evaluation']['eval/loss']:.4g} |"
        in text
    )
    assert "learning_rate: 1.0e-05" in text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_away_is_no_data_set_on_the_hub(runs, tmp_path):
    """Told by its hash: world/prompts.jsonl and sft/final look like ORG/NAME from another working folder."""
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    (run / "summary.json").unlink()
    facts = json.loads((run / "environment.json").read_text("utf-8"))
    facts |= {"data": {"world/prompts.jsonl": "a" * 64}, "models": {"sft/base": "b" * 64}}
    (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    config |= {"data": "world/prompts.jsonl", "model": "sft/base"}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["push", str(run), "org/name", "--dry-run", "--folder", str(tmp_path / "out"), "--license", "mit"]) == 0
    metadata, text = card_of(tmp_path / "out")
    assert not {"datasets", "base_model"} & metadata.keys()
    assert "world/prompts.jsonl" in text
    assert "Training has not come to its end" in text
    assert "Nothing was held out" not in text


LONG = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sft", "reward", "dpo", "encoder")]


@pytest.mark.parametrize("name", LONG)
def test_the_code_of_the_card_runs_in_transformers_alone(name, dry):
    folder = dry(name, *MIT)
    (code,) = re.findall(r"```python\n(.*?)```", card_of(folder)[1], flags=re.DOTALL)
    assert code.count('"org/name"') == 2
    code = code.replace('"org/name"', repr(str(folder))).replace("max_new_tokens=256", "max_new_tokens=4")
    blocked = "import sys; sys.modules['heedful'] = None\n"
    done = subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if name in ("reward", "encoder"):
        float(done.stdout)


def test_no_path_of_this_machine_and_no_secret_goes_out(dry, runs, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "aB3" * 11)
    folder = dry("dpo", *MIT)
    root = str(runs("sft").parents[1])
    for path in folder.iterdir():
        assert root.encode() not in path.read_bytes(), path.name
        assert b"hf_aB3" not in path.read_bytes(), path.name
    assert "sft/final" in card_of(folder)[1]


def test_only_the_model_goes_out(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    (run / "final" / ".env").write_text("SECRET=1")
    (run / "final" / "optimizer.pt").write_bytes(b"1")
    (run / "final" / "value_head").mkdir()
    (run / "final" / "link.json").symlink_to("/etc/hostname")
    out = tmp_path / "out"
    assert main(["push", str(run), "org/name", "--dry-run", "--folder", str(out), *MIT]) == 0
    names = {path.name for path in out.iterdir()}
    assert not names & {".env", "optimizer.pt", "value_head", "link.json", "checkpoints"}
    assert "not pushed: .env, link.json, optimizer.pt, value_head/" in " ".join(capsys.readouterr().out.split())


def test_a_file_with_a_secret_is_refused(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    config = json.loads((run / "final" / "config.json").read_text("utf-8"))
    (run / "final" / "config.json").write_text(json.dumps(config | {"note": "hf_" + "aB3" * 11}))
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == 2
    assert "config.json seems to contain a secret" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run-push").exists()


@pytest.mark.parametrize(
    ("name", "text", "is_refused"),
    [
        ("tokenizer_config.json", "see https://huggingface.co/docs/x?a=b#chat", False),
        ("tokenizer_config.json", "https://me:secret@host/x", True),
        ("chat_template.jinja", "{# 秘密-秘密-秘密 #}", True),
    ],
)
def test_what_is_a_secret_in_text_of_others(name, text, is_refused, runs, tmp_path, capsys, monkeypatch):
    """An address with a fragment is none: a tokenizer's documentation may stand there."""
    monkeypatch.setenv("MY_API_KEY", "秘密-秘密-秘密")
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    path = run / "final" / name
    if name.endswith(".json"):
        text = json.dumps({**json.loads(path.read_text("utf-8")), "note": text})
    path.write_text(text, encoding="utf-8")
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == (2 if is_refused else 0)
    said = " ".join(capsys.readouterr().err.split())
    assert (f"{name} seems to contain a secret" in said) is is_refused


def on(base, runs, folder, *, local=()):
    """A run of adapters that lie on this, whose earlier runs are not here."""
    shutil.copytree(runs("lora"), folder)
    path = folder / "final" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "base_model_name_or_path": base}), "utf-8")
    settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8")) | {"model": "away/final"}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    facts = json.loads((folder / "environment.json").read_text("utf-8"))
    facts["models"] = dict.fromkeys(["away/final", *local], "a" * 64)
    (folder / "environment.json").write_text(json.dumps(facts), "utf-8")
    return folder


def test_adapters_say_themselves_on_what_they_lie(runs, tmp_path):
    run = on("Qwen/Qwen3-0.6B", runs, tmp_path / "run")
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == 0
    out = tmp_path / "run-push"
    assert json.loads((out / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
    metadata, text = card_of(out)
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("Qwen/Qwen3-0.6B", "adapter")
    assert "made from [Qwen/Qwen3-0.6B]" in text


def test_adapters_of_a_model_that_only_is_here(runs, tmp_path, capsys):
    """Also if its name looks like ORG/NAME from another folder, and if training began with a model of the Hub, which is not
    the one that the adapters lie on."""
    run = on("sft/base", runs, tmp_path / "run" / "lora", local=["sft/base"])
    parent = tmp_path / "run" / "sft"
    shutil.copytree(runs("sft"), parent)
    for folder, model in ((parent, "Qwen/Qwen3-0.6B-Base"), (run, str(parent / "final"))):
        settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8")) | {"model": model}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    assert main(["push", str(run), "org/name", "--dry-run", *MIT]) == 2
    assert "base model is not known on the Hub" in " ".join(capsys.readouterr().err.split())


def test_adapters_on_adapters_fit_only_a_base_that_holds_those(dry, runs, capsys):
    assert main(["push", str(runs("lora on lora")), "org/name", "--dry-run", *MIT]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"whose base is itself adapters ({runs('lora') / 'final'})" in said
    assert f"heedful merge --adapter {runs('lora on lora') / 'final'}" in said
    _, text = card_of(dry("lora on lora", *MIT, "--base-model", "org/merged"))
    assert "They fit only a base that holds those too." in text
    folder = dry("lora", *MIT, "--base-model", "org/base")
    metadata, text = card_of(folder)
    assert "They fit only a base" not in text
    assert "from peft import AutoPeftModelForCausalLM" in text
    assert json.loads((folder / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"] == "org/base"
    assert [metadata[name] for name in ("library_name", "base_model", "base_model_relation")] == [
        "peft",
        "org/base",
        "adapter",
    ]


def test_the_base_is_that_of_the_first_stage(dry, runs, tmp_path):
    """The run that this one continues says where it began."""
    first, second = tmp_path / "a" / "sft", tmp_path / "a" / "dpo"
    shutil.copytree(runs("sft"), first)
    shutil.copytree(runs("dpo"), second)
    for run, model in ((first, "Qwen/Qwen3-0.6B-Base"), (second, str(first / "final"))):
        settings = yaml.safe_load((run / "config.yaml").read_text("utf-8")) | {
            "model": model,
            "data": "org/prompts:train",
        }
        (run / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    assert main(["push", str(second), "org/name", "--dry-run", *MIT]) == 0
    metadata, text = card_of(tmp_path / "a" / "dpo-push")
    assert (metadata["base_model"], metadata["datasets"]) == ("Qwen/Qwen3-0.6B-Base", ["org/prompts"])
    assert "by supervised fine-tuning and then DPO" in text


def test_evaluations_are_in_the_card(dry, tmp_path, capsys):
    result = tmp_path / "评测.json"
    result.write_text(
        json.dumps(
            {"score_mean": 0.5, "interval_95": [0.4, 0.6], "samples": [], "settings": {"data": "a.jsonl", "output": ""}}
        )
    )
    text = card_of(dry("sft", *MIT, "--results", str(result)))[1]
    assert "| `interval_95` | 0.4 to 0.6 |" in text
    assert "`评测.json`, measured with heedful evaluate on a.jsonl" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["org/name"], "--license is missing"),
        (["name", *MIT], "is not the name of a repository; write ORG/NAME"),
        (["org/name", "--license", "MIT License"], "is not in the Hub's form"),
        (["org/name", *MIT, "--language", "Chinese"], "--language 'Chinese' is no code"),
        (["org/name", *MIT, "--folder", "x"], "belongs to --dry-run"),
        (
            ["org/name", *MIT, "--results", "nothing.json"],
            "nothing.json: there is no such file; --results takes files written by heedful evaluate --output",
        ),
        (["org/name", *MIT, "--base-model", "/here"], "is no model on the Hub"),
    ],
)
def test_what_makes_no_sense_is_refused(words, reason, runs, capsys):
    assert main(["push", str(runs("sft")), *words]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_no_run_or_not_finished_is_refused(runs, tmp_path, capsys):
    assert main(["push", str(tmp_path), "org/name", *MIT]) == 2
    assert "is not a run: it has no config.yaml" in " ".join(capsys.readouterr().err.split())
    run = tmp_path / "run"
    shutil.copytree(runs("sft"), run)
    shutil.rmtree(run / "final")
    assert main(["push", str(run), "org/name", *MIT]) == 2
    assert "has no model: the run is not finished" in " ".join(capsys.readouterr().err.split())


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
        said = process.communicate(timeout=120)
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
        (401, 2, "the Hub does not know your token (401): run `hf auth login`"),
        pytest.param(403, 2, "your token may not write to org/name (403)", marks=pytest.mark.exhaustive),
        pytest.param(404, 2, "the Hub has no org/name that you may write to (404)", marks=pytest.mark.exhaustive),
        pytest.param(400, 2, "the Hub refuses org/name (400)", marks=pytest.mark.exhaustive),
        (500, 3, "failed (500); try again later"),
    ],
)
def test_a_hub_that_refuses(status, exit_status, reason, runs, hub, pushed):
    before = {path: path.read_bytes() for path in sorted(runs("sft").rglob("*")) if path.is_file()}
    found, said = pushed(runs("sft"), hub(status=status))
    assert (found, reason in said) == (exit_status, True), said
    assert f"{runs('sft')} is unchanged" in said
    assert "Traceback" not in said
    assert before == {path: path.read_bytes() for path in sorted(runs("sft").rglob("*")) if path.is_file()}


def test_a_hub_that_is_away(runs, pushed):
    found, said = pushed(runs("sft"), "http://127.0.0.1:9")
    assert found == 3, said
    assert "the Hub at http://127.0.0.1:9 cannot be reached; try again later" in said


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


def test_a_folder_that_is_there_is_left_alone(runs, tmp_path, capsys):
    assert main(["push", str(runs("sft")), "org/name", "--dry-run", "--folder", str(tmp_path), *MIT]) == 2
    assert "exists or cannot be created" in " ".join(capsys.readouterr().err.split())
    assert list(Path(tmp_path).iterdir()) == []
