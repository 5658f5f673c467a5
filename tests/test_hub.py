"""``modelscope:ORG/NAME`` in the place of a folder. A stand-in for the package hands out folders: nothing is fetched."""

import json
import sys
from unittest.mock import ANY

import datasets
import pytest
import torch
import yaml

from heedful import CheckpointError, ConfigError, DataError, hub, make_tiny_model
from heedful.cli.main import main
from heedful.configs.options import LoRAOptions
from heedful.data import read_prompts, read_records
from heedful.models import (
    Policy,
    ValueModel,
    add_adapters,
    load_causal_lm,
    load_policy,
    load_reward_model,
    load_tokenizer,
    load_trunk,
    load_value_model,
    save_policy,
    save_reward_model,
    save_value_model,
)
from heedful.models.adapters import adapter_chain
from heedful.models.source import load_config, resolve

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
PACKAGE = """
calls, models, data_sets = [], {}, {}

def snapshot_download(model_id):
    calls.append(("model", model_id))
    return models[model_id]

def dataset_snapshot_download(dataset_id):
    calls.append(("data set", dataset_id))
    return data_sets[dataset_id]
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy with a value head, a value model and a reward model, whose heads are not what a new one would be."""
    root = tmp_path_factory.mktemp("models")
    make_tiny_model("qwen3", root / "tiny", hidden_size=32, num_layers=1)
    tokenizer = load_tokenizer(str(root / "tiny"))
    policy = Policy(load_causal_lm(str(root / "tiny")), with_value_head=True, compute_dtype=torch.float32)
    torch.nn.init.constant_(policy.value_head.weight, 0.25)
    save_policy(policy, tokenizer, root / "policy", stop_ids=[tokenizer.eos_token_id])
    values = ValueModel(load_trunk(str(root / "tiny")), 32, compute_dtype=torch.float32)
    torch.nn.init.constant_(values.value_head.weight, 0.5)
    save_value_model(values, tokenizer, root / "values")
    save_reward_model(load_reward_model(str(root / "tiny"), tokenizer, seed=1, **CPU), tokenizer, root / "reward")
    return root


@pytest.fixture
def modelscope(tmp_path, monkeypatch, folders):
    """The stand-in, importable, with the models of ``folders`` under ``org/NAME`` and a data set of two splits."""
    (tmp_path / "packages" / "modelscope").mkdir(parents=True)
    (tmp_path / "packages" / "modelscope" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "modelscope", raising=False)
    monkeypatch.setattr(hub, "_folders", {})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    for split, count in (("train", 6), ("test", 2)):
        rows = [json.dumps({"prompt": f"{split} 问题{i}"}, ensure_ascii=False) + "\n" for i in range(count)]
        (data / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    import modelscope

    modelscope.models |= {f"org/{path.name}": str(path) for path in folders.iterdir()}
    modelscope.data_sets["org/data"] = str(data)
    yield modelscope
    del sys.modules["modelscope"]


def same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_loader_takes_a_name_on_modelscope(modelscope, folders):
    """What comes is what the folder holds, heads beside the weights too; ModelScope is asked once a name."""
    names = {name: (f"modelscope:org/{name}", str(folders / name)) for name in ("tiny", "policy", "values", "reward")}
    there, here = names["tiny"]
    resolve(there)
    assert load_tokenizer(there).get_vocab() == load_tokenizer(here).get_vocab()
    assert load_config(there).to_dict() == load_config(here).to_dict()
    for load in (load_causal_lm, load_trunk):
        same_weights(load(there), load(here))
    policies = [load_policy(name, with_value_head=True, **CPU) for name in names["policy"]]
    same_weights(*policies)
    assert (policies[0].value_head.weight == 0.25).all()
    values = [load_value_model(name, **CPU) for name in names["values"]]
    same_weights(*values)
    assert (values[0].value_head.weight == 0.5).all()
    same_weights(*(load_reward_model(name, load_tokenizer(name), **CPU) for name in names["reward"]))
    assert sorted(modelscope.calls) == [("model", f"org/{name}") for name in ("policy", "reward", "tiny", "values")]
    for load in (resolve, load_tokenizer, load_config, load_causal_lm, load_trunk):  # by itself
        hub._folders.clear()
        modelscope.calls.clear()
        load("modelscope:org/tiny")
        assert modelscope.calls == [("model", "org/tiny")]
    hub._folders.clear()
    modelscope.calls.clear()
    load_reward_model("modelscope:org/reward", load_tokenizer(str(folders / "reward")), **CPU)
    assert modelscope.calls == [("model", "org/reward")]


def test_adapters_find_their_base_on_modelscope(modelscope, folders, tmp_path):
    """Trained on a name, the adapters keep the name; whoever loads them gets its folder. Fresh ones change nothing."""
    name, adapters = "modelscope:org/tiny", tmp_path / "adapters"
    policy = load_policy(name, **CPU)
    add_adapters(policy.lm, LoRAOptions(lora_rank=2), base=name, seed=0)
    tokenizer = load_tokenizer(name)
    save_policy(policy, tokenizer, adapters, stop_ids=[tokenizer.eos_token_id])
    assert json.loads((adapters / "adapter_config.json").read_text())["base_model_name_or_path"] == name
    assert adapter_chain(str(adapters)) == (str(folders / "tiny"), [adapters])
    resolve(str(adapters))
    assert load_config(str(adapters)).to_dict() == load_config(str(folders / "tiny")).to_dict()
    for load in (load_causal_lm, load_trunk):
        same_weights(load(str(adapters)), load(str(folders / "tiny")))


def test_merging_does_not_replace_the_base_of_adapters_on_modelscope(modelscope, folders, tmp_path, capsys):
    """--overwrite would delete what the model is made from."""
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    make_tiny_model("qwen3", base, hidden_size=32, num_layers=1)
    policy, tokenizer = load_policy(str(base), **CPU), load_tokenizer(str(base))
    add_adapters(policy.lm, LoRAOptions(lora_rank=2), base=str(base), seed=0)
    save_policy(policy, tokenizer, adapters, stop_ids=[tokenizer.eos_token_id])
    modelscope.models["org/adapters"] = str(adapters)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    name = "modelscope:org/adapters"
    for output, named in ((base, base), (adapters, adapters)):
        (adapters / "config.json").write_text("{}", encoding="utf-8")
        assert main(["merge", "--adapter", name, "--output", str(output), "--overwrite"]) == 2
        assert f"contains {named}, from which the model is merged" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert main(["merge", "--adapter", name, "--output", str(tmp_path / "merged")]) == 0
    same_weights(load_causal_lm(str(tmp_path / "merged")), load_causal_lm(name))


@pytest.mark.parametrize("limit", [None, 1])
def test_data_sets(modelscope, limit):
    """The split after the second colon; a limit reads the first records."""
    for split, expected in (("", "train"), (":test", "test")):
        path = f"modelscope:org/data{split}"
        found = [(prompt.prompt, prompt.source) for prompt in read_prompts(path, max_samples=limit)]
        count = limit or {"train": 6, "test": 2}[expected]
        assert found == [(f"{expected} 问题{i}", f"{path}: row {i + 1}") for i in range(count)]
    assert modelscope.calls == [("data set", "org/data")]


def test_a_run_keeps_the_names_and_hashes_what_was_downloaded(modelscope, folders, tmp_path):
    """The same run as from the folders; its config.yaml runs anywhere."""
    small = ["--steps", "1", "--rollout-batch-size", "2", "--minibatch-size", "2", "--max-new-tokens", "4"]
    small += ["--eval-fraction", "0", "--device", "cpu", "--dtype", "float32"]
    runs = {}
    for name, prefix, data in (
        ("there", "modelscope:org/", "modelscope:org/data"),
        ("here", f"{folders}/", str(tmp_path / "data" / "train.jsonl")),
    ):
        rewards = ["--rewards", f"model:{prefix}reward"]
        models = ["--model", f"{prefix}policy", "--critic", "separate", "--value-model", f"{prefix}values"]
        runs[name] = tmp_path / name
        assert main(["ppo", *models, *rewards, "--data", data, *small, "--output", str(runs[name])]) == 0
    config = yaml.safe_load((runs["there"] / "config.yaml").read_text(encoding="utf-8"))
    assert (config["model"], config["data"]) == ("modelscope:org/policy", "modelscope:org/data")
    assert (config["value_model"], config["rewards"]) == ("modelscope:org/values", ["model:modelscope:org/reward"])
    there, here = (json.loads((runs[name] / "summary.json").read_text(encoding="utf-8"))["last_step"] for name in runs)
    assert {k: v for k, v in there.items() if not k.startswith(("time/", "perf/"))} == {
        k: v for k, v in here.items() if not k.startswith(("time/", "perf/"))
    }
    there, here = (json.loads((runs[name] / "environment.json").read_text(encoding="utf-8"))["models"] for name in runs)
    assert there == here == dict.fromkeys([str(folders / name) for name in ("policy", "values", "reward")], ANY)


def test_without_the_package_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "modelscope", None)  # what importing it finds where it is not installed
    for read in (load_tokenizer, lambda name: read_records(name, columns={})):
        with pytest.raises(ConfigError, match=r'^modelscope:org/new needs .*pip install "heedful\[modelscope\]"'):
            read("modelscope:org/new")
    assert main(["chat", "--model", "modelscope:org/new"]) == 2
    assert 'pip install "heedful[modelscope]"' in capsys.readouterr().err


def test_a_package_that_is_too_old(modelscope, monkeypatch):
    monkeypatch.delattr(modelscope, "dataset_snapshot_download")
    with pytest.raises(ConfigError, match=r"^modelscope:org/data needs modelscope 1\.20 or later"):
        read_records("modelscope:org/data", columns={})


def test_names_of_another_form(modelscope):
    for name in ("modelscope:", "modelscope:name", "modelscope:a/b/c", "modelscope:org/na me"):
        for read in (load_config, lambda name: read_records(name, columns={})):
            with pytest.raises(ConfigError, match="write modelscope:ORG/NAME"):
                read(name)
    assert modelscope.calls == []


def test_what_cannot_be_downloaded(modelscope):
    """The stand-in knows no such name. A second try asks again: the network may be back."""
    with pytest.raises(CheckpointError, match=r"^modelscope:org/none: cannot be downloaded .*KeyError: 'org/none'"):
        load_config("modelscope:org/none")
    with pytest.raises(DataError, match=r"^modelscope:org/none: cannot be downloaded .*`modelscope login`"):
        read_records("modelscope:org/none", columns={})
    with pytest.raises(CheckpointError):
        load_config("modelscope:org/none")
    assert modelscope.calls == [("model", "org/none"), ("data set", "org/none"), ("model", "org/none")]
