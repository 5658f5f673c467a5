"""A generation config that transformers would refuse to save is mended when the model is loaded, and the user is told."""

import json
import shutil
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from heedful.models import load_causal_lm, load_policy, load_tokenizer, save_policy


@pytest.fixture
def with_settings(checkpoints, tmp_path):
    """A model whose generation config has further settings."""

    def make(**settings):
        folder = shutil.copytree(checkpoints["gpt2"], tmp_path / "model", dirs_exist_ok=True)
        path = folder / "generation_config.json"
        own = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(own | settings), encoding="utf-8")
        return str(folder)

    return make


def saved(folder, output):
    policy = load_policy(folder, device=torch.device("cpu"), compute_dtype=torch.float32)
    save_policy(policy, load_tokenizer(folder), output, stop_ids=[1, 7])
    return AutoModelForCausalLM.from_pretrained(output).generation_config


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"temperature": 0.6}, "`temperature`"), ({"do_sample": False, "top_p": 0.9, "top_k": 20}, "`top_p`")],
)
def test_a_temperature_without_sampling_samples(with_settings, tmp_path, settings, reason):
    with pytest.warns(
        UserWarning, match=f"model: transformers refuses .* {reason}.*; do_sample is set to true"
    ) as told:
        config = saved(with_settings(**settings), tmp_path / "saved")
    assert len(told) == 1
    assert config.do_sample is True
    assert config.eos_token_id == [1, 7]
    assert {name: getattr(config, name) for name in settings} == settings | {
        name: True for name in settings if name == "do_sample"
    }


def test_of_what_cannot_be_mended_so_the_special_tokens_stay(with_settings, tmp_path):
    with pytest.warns(UserWarning, match="only bos_token_id, eos_token_id, pad_token_id are kept"):
        config = saved(with_settings(temperature=0.6, output_scores=True), tmp_path / "saved")
    assert (config.temperature, config.do_sample, config.output_scores) == (None, None, None)
    assert (config.eos_token_id, config.pad_token_id) == ([1, 7], 0)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}])
def test_what_can_be_saved_stays_as_it_is(with_settings, settings):
    folder = with_settings(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_causal_lm(folder).generation_config
    assert config.to_dict() == GenerationConfig.from_pretrained(folder).to_dict()
