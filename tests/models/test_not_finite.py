"""A model whose weights hold NaN or infinity is refused by the names of its folder and of a weight, before anything runs."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from heedful import CheckpointError, SFTConfig, train_sft
from heedful.models import load_reward_model, load_tokenizer
from heedful.models.load import load_head, load_trunk

DATA = [{"prompt": f"问{i}", "completion": "答"} for i in range(4)]


@pytest.fixture
def broken(tiny, tmp_path):
    """``broken(weight, value)`` is the folder of a model with this value as a weight's last number."""

    def make(weight, value):
        folder = tmp_path / "坏模型"
        shutil.copytree(tiny(), folder)
        weights = load_file(folder / "model.safetensors")
        weights[weight].view(-1)[-1] = value
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        ("transformer.wte.weight", torch.nan),  # also the output head
        ("transformer.h.1.mlp.c_fc.bias", torch.inf),
    ],
)
def test_a_command_names_it(broken, heedful, written, tmp_path, weight, value):
    folder = broken(weight, value)
    data = written("数据.jsonl", DATA)
    said = heedful("sft", model=folder, data=data, output=tmp_path / "运行", max_steps=1, batch_size=2)
    assert said.status == 2
    assert f"{folder}: 1 of its weights are not finite (NaN or infinity), first {weight}; " in said.message
    assert not (tmp_path / "运行").exists()


def test_reward_models_and_trunks(broken):
    folder, cpu = broken("transformer.ln_f.bias", -torch.inf), {"device": torch.device("cpu")}
    with pytest.raises(CheckpointError, match=r"not finite .*ln_f\.bias"):
        load_trunk(folder)
    with pytest.raises(CheckpointError, match=r"not finite .*ln_f\.bias"):
        load_reward_model(folder, load_tokenizer(folder), seed=0, compute_dtype=torch.float32, **cpu)


def test_a_model_in_memory(tiny, tmp_path):
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(tiny()), AutoTokenizer.from_pretrained(tiny())
    with torch.no_grad():
        lm.transformer.ln_f.weight[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"not finite .*transformer\.ln_f\.weight"):
        train_sft(SFTConfig(output=tmp_path / "运行", batch_size=2), model=lm, tokenizer=tokenizer, data=DATA)


def test_a_saved_head(tmp_path):
    path = tmp_path / "头.safetensors"
    save_file({"weight": torch.full((1, 4), torch.nan), "bias": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"头\.safetensors: 1 of its weights are not finite .*first weight"):
        load_head(torch.nn.Linear(4, 1), path)
