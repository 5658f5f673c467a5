"""A model's own Python code runs only if the user asked for it, and then only from a folder on this machine."""

import io
import json
import sys
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file
from transformers import dynamic_module_utils

from heedful import CheckpointError, DataError, hub, make_tiny_model
from heedful.configs.options import TrustOptions
from heedful.data import read_records
from heedful.models import load_causal_lm, load_tokenizer
from heedful.models.shape import load_shape
from heedful.models.source import load_config, resolve

TRUSTED = TrustOptions(trust_remote_code=True)
CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

with Path({canary!r}).open("a") as file:
    file.write("ran\\n")


class OwnConfig(Qwen3Config):
    model_type = "own"


class OwnModel(Qwen3Model):
    config_class = OwnConfig


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnForSequenceClassification(Qwen3ForSequenceClassification):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "own_code.OwnConfig",
    "AutoModel": "own_code.OwnModel",
    "AutoModelForCausalLM": "own_code.OwnForCausalLM",
    "AutoModelForSequenceClassification": "own_code.OwnForSequenceClassification",
}


@pytest.fixture
def canary(tmp_path):
    """The file that the code of `with_code` writes."""
    return tmp_path / "金丝雀"


@pytest.fixture
def with_code(tmp_path, canary):
    """``with_code(model_type)`` is a folder whose model has code of its own; of "own" transformers has no other."""

    def make(model_type="own", *, auto_map=AUTO_MAP):
        folder = tmp_path / f"模型-{model_type}"
        make_tiny_model("qwen3", folder, hidden_size=16, num_layers=1, max_length=128)
        (folder / "own_code.py").write_text(CODE.format(canary=str(canary)), encoding="utf-8")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"model_type": model_type, "auto_map": auto_map}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(folder)

    return make


@pytest.fixture(autouse=True)
def _modules_of_the_test(monkeypatch, tmp_path):
    """transformers copies code that it runs; here into the test's folder. Whoever is asked says yes."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("builtins.input", lambda *_: "y")


def rewrite(path, **changes):
    path = Path(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize("load", [load_config, load_causal_lm, load_shape])
def test_code_is_refused_without_a_question(with_code, canary, load):
    folder = with_code()
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for part in (folder, "needs its own Python code", "read its .py files", "--trust-remote-code"):
        assert part in str(caught.value)
    assert not canary.exists()


def test_a_tokenizer_with_code_is_refused(with_code, canary):
    folder = with_code("qwen3", auto_map={})
    rewrite(f"{folder}/tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own_code.OwnTokenizer"]})
    rewrite(f"{folder}/config.json", model_type="unknown")
    rewrite(f"{folder}/tokenizer_config.json", tokenizer_class="OwnTokenizer")
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_tokenizer(folder)
    assert not canary.exists()


def test_the_base_of_adapters_is_refused_too(with_code, canary, tmp_path):
    adapters = tmp_path / "适配器"
    adapters.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": with_code(), "r": 2, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (adapters / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_causal_lm(str(adapters))
    assert not canary.exists()


def test_a_model_that_transformers_knows_is_loaded_without_its_code(with_code, canary):
    """The warning says so, and what is saved names no code that is not there."""
    with pytest.warns(UserWarning, match="has Python code .* not run: transformers' own qwen3 is loaded"):
        lm = load_causal_lm(with_code("qwen3"))
    assert type(lm) is transformers.Qwen3ForCausalLM
    assert not canary.exists()


@pytest.mark.parametrize("load", [load_config, load_causal_lm, load_shape])
def test_code_runs_if_it_is_asked_for(with_code, canary, load):
    loaded = load(resolve(with_code(), TRUSTED))
    assert canary.exists()
    if load is load_causal_lm:
        assert type(loaded).__name__ == "OwnForCausalLM"


def test_a_name_on_the_hub_never_runs_code(with_code, canary, tmp_path, monkeypatch):
    """Not even if it was asked for: what is downloaded by name may be other code tomorrow."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "缓存" / "models--org--own"
    (repository / "snapshots").mkdir(parents=True)
    Path(with_code()).rename(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "缓存"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = resolve("org/own", TRUSTED)
    assert not source.runs_code
    with pytest.raises(CheckpointError) as caught:
        load_config(source)
    for part in ("org/own needs its own Python code", "hf download org/own --local-dir FOLDER", "--trust-remote-code"):
        assert part in str(caught.value)
    assert not canary.exists()
    assert hub.hub_revision("org/own") == commit


def test_the_revision_of_what_is_no_model_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not any(map(hub.hub_revision, ("org/here", "/a/b/c", "modelscope:org/x", "org/never-read")))


def test_a_folder_from_modelscope_runs_no_code(with_code, canary, monkeypatch):
    """Named by itself it is a folder like any other."""
    folder = with_code()
    monkeypatch.setattr(hub, "_folders", {("snapshot_download", "modelscope:org/own"): folder})
    with pytest.raises(CheckpointError, match=r"use the folder itself: .*模型-own"):
        load_config(resolve("modelscope:org/own", TRUSTED))
    assert not canary.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_trusted_code_must_be_in_the_folder(with_code, canary, file):
    folder = with_code()
    rewrite(f"{folder}/{file}", auto_map={"AutoConfig": "org/other--code.Config", "AutoTokenizer": ["a.B", None]})
    with pytest.raises(CheckpointError, match=r"'org/other--code.Config', code in a Hub repository"):
        resolve(folder, TRUSTED)
    assert not canary.exists()


@pytest.mark.parametrize("content", ["{", "[" * 5000])
def test_a_trusted_folder_that_cannot_be_read(with_code, content):
    folder = with_code()
    Path(folder, "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config.json: (line 1 is not valid JSON|it is nested too deeply)"
    ):
        resolve(folder, TRUSTED)


def test_a_data_set_with_a_script_runs_none_of_it(tmp_path, canary, monkeypatch):
    folder = tmp_path / "数据"
    folder.mkdir()
    (folder / "数据.py").write_text(f"open({str(canary)!r}, 'w')", encoding="utf-8")
    monkeypatch.setattr(hub, "_folders", {("dataset_snapshot_download", "modelscope:org/data"): str(folder)})
    with pytest.raises(DataError, match="could not be loaded"):
        read_records("modelscope:org/data", columns={})
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------------- every command


COMMANDS = {
    "sft": ["sft", "--data", "{sft}", "--output", "{out}"],
    "reward": ["reward", "--data", "{pairs}", "--output", "{out}"],
    "dpo": ["dpo", "--data", "{pairs}", "--output", "{out}"],
    "ppo": ["ppo", "--data", "{prompts}", "--rewards", "rule:digits", "--output", "{out}"],
    "plan": ["plan", "sft"],
    "perplexity": ["evaluate", "perplexity", "--data", "{sft}"],
    "scores": ["evaluate", "scores", "--data", "{prompts}", "--rewards", "rule:digits"],
    "serve-reward": ["serve-reward", "--port", "0"],
    "chat": ["chat"],
}
OTHERS = {
    "reference": ["dpo", "--data", "{pairs}", "--output", "{out}", "--model", "{good}", "--reference", "{own}"],
    "value-model": ["ppo", "--data", "{prompts}", "--rewards", "rule:digits", "--output", "{out}", "--model", "{good}",
                    "--critic", "separate", "--value-model", "{own}"],
    "rewards": ["ppo", "--data", "{prompts}", "--output", "{out}", "--model", "{good}", "--rewards", "model:{own}"],
    "best-by": ["grpo", "--data", "{prompts}", "--output", "{out}", "--model", "{good}", "--rewards", "rule:digits",
                "--selection-rewards", "model:{own}"],
    "baseline": ["evaluate", "win-rate", "--data", "{prompts}", "--model", "{good}", "--baseline", "{own}", "--rewards",
                 "rule:digits"],
    "reward-model": ["evaluate", "accuracy", "--data", "{pairs}", "--reward-model", "{own}"],
}  # fmt: skip


@pytest.fixture
def words(tmp_path, with_code, tiny):
    """``words(template)`` is a command line."""
    records = {
        "sft": [{"prompt": f"问{i}", "completion": "答"} for i in range(8)],
        "pairs": [{"prompt": f"问{i}", "chosen": "好", "rejected": "坏"} for i in range(8)],
        "prompts": [{"prompt": f"问{i}"} for i in range(8)],
    }
    places = {"own": with_code(), "good": tiny("qwen3"), "out": str(tmp_path / "运行")}
    for name, rows in records.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        places[name] = str(path)
    return lambda template: [word.format(**places) for word in template]


@pytest.mark.parametrize("name", [*COMMANDS, *OTHERS])
def test_no_command_runs_code_that_nobody_asked_for(words, canary, tmp_path, capsys, name):
    from heedful.cli.main import main

    template = OTHERS.get(name) or [*COMMANDS[name], "--model", "{own}"]
    small = ["--rollout-batch-size", "2", "--minibatch-size", "2"] if template[0] in ("ppo", "grpo") else []
    small += ["--samples-per-prompt", "2"] if template[0] == "grpo" else []
    assert main(words([*template, *small])) == 2
    error = capsys.readouterr().err
    assert "--trust-remote-code" in error
    assert "Traceback" not in error
    assert not canary.exists()
    assert not (tmp_path / "运行").exists()


def test_yes_to_every_question_is_no_way_in(words, canary, tmp_path, heedful, monkeypatch):
    """``yes | heedful sft``"""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 1000))
    done = heedful(*words([*COMMANDS["sft"], "--model", "{own}"]))
    assert done.status == 2, done.err
    assert "--trust-remote-code" in done.err
    assert "[y/N]" not in done.out + done.err
    assert not canary.exists()
    assert not (tmp_path / "运行").exists()


def test_a_run_with_code_says_so_and_its_model_can_be_used(words, canary, tmp_path, capsys):
    from heedful.cli.main import main

    small = ["--batch-size", "2", "--max-steps", "1", "--eval-fraction", "0", "--sample-every", "0"]
    status = main(words([*COMMANDS["sft"], "--model", "{own}", "--trust-remote-code", *small]))
    assert status == 0, capsys.readouterr().err
    assert canary.exists()
    run = tmp_path / "运行"
    assert "trust_remote_code: true" in (run / "config.yaml").read_text(encoding="utf-8")
    lm = load_causal_lm(resolve(str(run / "final"), TRUSTED))
    saved = load_file(run / "final" / "model.safetensors")
    assert saved["model.norm.weight"].equal(lm.model.norm.weight.detach())
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_causal_lm(str(run / "final"))
