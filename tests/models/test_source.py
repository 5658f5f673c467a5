"""A model's name is resolved once: what it stands for, and that nothing is looked up again for each part of the model."""

from pathlib import Path

import pytest
import torch

from heedful import CheckpointError
from heedful.configs.options import LoRAOptions
from heedful.models import (
    Policy,
    add_adapters,
    load_causal_lm,
    load_policy,
    load_tokenizer,
    load_trunk,
    load_value_model,
    save_policy,
)
from heedful.models import adapters as adapters_module
from heedful.models import source as source_module
from heedful.models.source import Source, load_config, resolve
from heedful.models.tokenizer import check_companion

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def chain(checkpoints, tmp_path_factory):
    """A plain model, adapters on it, and adapters on those."""
    root, base = tmp_path_factory.mktemp("链"), str(checkpoints["qwen3"])
    tokenizer, folders = load_tokenizer(base), []
    for name in ("first", "second"):
        policy = Policy(load_causal_lm(base))
        add_adapters(policy.lm, LoRAOptions(lora_rank=2), base=base, seed=0)
        folders.append(root / name)
        save_policy(policy, tokenizer, folders[-1], stop_ids=[tokenizer.eos_token_id])
        base = str(folders[-1])
    return str(checkpoints["qwen3"]), *folders


@pytest.fixture
def looked_up(monkeypatch):
    """Every name that is looked up on ModelScope, and every adapter folder whose settings are read."""
    names, read = [], []
    local_model, read_adapter_config = source_module.local_model, adapters_module.read_adapter_config
    for module in (source_module, adapters_module):
        monkeypatch.setattr(module, "local_model", lambda name: (names.append(name), local_model(name))[1])
    monkeypatch.setattr(
        adapters_module, "read_adapter_config", lambda folder: (read.append(folder), read_adapter_config(folder))[1]
    )
    return names, read


def test_a_plain_folder(checkpoints, tmp_path, monkeypatch):
    folder = str(checkpoints["gpt2"])
    assert resolve(folder) == Source(name=folder, folder=folder, base=folder, adapters=()) == resolve(Path(folder))
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2") == Source(name="gpt2", folder="gpt2", base="gpt2", adapters=())


def test_adapters_come_down_to_their_base(chain):
    """In the order in which they are merged: those on the plain model first."""
    plain, first, second = chain
    assert resolve(str(first)) == Source(name=str(first), folder=str(first), base=plain, adapters=(first,))
    assert resolve(str(second)) == Source(name=str(second), folder=str(second), base=plain, adapters=(first, second))


def test_a_source_passes_through(chain, looked_up):
    source = resolve(str(chain[2]))
    for found in looked_up:
        found.clear()
    assert resolve(source) is source
    assert looked_up == ([], [])


def test_one_look_at_each_adapter_folder_is_enough(chain, looked_up):
    """The name, and the base that each folder names; the settings of each once."""
    plain, first, second = chain
    names, read = looked_up
    source = resolve(str(second))
    assert (names, read) == ([str(second), str(first), plain], [second, first])
    load_everything(source)
    assert (names, read) == ([str(second), str(first), plain], [second, first])


def load_everything(model):
    """All that one policy and its critic need of a model, six loaders."""
    tokenizer = load_tokenizer(model)
    load_config(model)
    load_policy(model, with_value_head=True, **CPU)
    load_trunk(model)
    trunk = load_causal_lm(model).base_model
    assert load_value_model(model, trunk=trunk, **CPU).trunk is trunk
    check_companion("--reference", model, model, tokenizer, longest=8)


def test_what_was_there_may_be_gone(chain, tmp_path):
    """A Source says where the parts are, not that they stay: loading still says which folder is wrong."""
    gone = Source(name="前", folder=str(tmp_path / "gone"), base=str(tmp_path / "gone"), adapters=())
    with pytest.raises(CheckpointError, match="gone: cannot load a tokenizer from it"):
        load_tokenizer(gone)
