"""Frozen models in the compute dtype: less memory, and every number as it was."""

from pathlib import Path

import pytest
import torch

from heedful import PPOConfig, make_tiny_model
from heedful.configs.scoring import RewardOptions
from heedful.data.batches import collate
from heedful.distributed import ranks
from heedful.engines.teacher_forced import token_outputs
from heedful.models import load_policy, load_reward_model, load_tokenizer, save_reward_model
from heedful.models.source import resolve
from heedful.rewards.models import load_model_reward
from heedful.rewards.resolve import load_rewards
from heedful.training.setup import load_reference, load_trained
from heedful.types import MicroBatch

CPU = torch.device("cpu")
HALF = {"device": CPU, "compute_dtype": torch.bfloat16}
MATRICES = {"gpt2": "transformer.h.0.mlp.c_fc", "qwen3": "model.layers.0.mlp.up_proj"}


def ppo(model, **changes):
    return PPOConfig(model=model, data="x", output="o", rewards=("rule:digits",), **changes)


@pytest.fixture
def model(tiny):
    return tiny("qwen3")


def weights_in_files(module):
    """Names of the tensors that lie in a mapped checkpoint, as those of a model do that was loaded."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            ranges.append([int(end, 16) for end in line.split()[0].split("-")])
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [name for name, t in tensors.items() if any(start <= t.data_ptr() < end for start, end in ranges)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells mapped files by Linux's /proc")
def test_what_is_frozen_in_half_precision_holds_no_file_in_memory(model, reward_model):
    policy = load_policy(model, **HALF)
    assert weights_in_files(policy)
    assert not weights_in_files(load_reference(ppo(model), resolve(model), policy))
    folder = reward_model.removeprefix("model:")
    assert weights_in_files(load_reward_model(folder, load_tokenizer(folder), **HALF))
    assert not weights_in_files(load_model_reward(folder, micro_batch=MicroBatch(2), **HALF).model)


def assert_reference_is_policy(reference, policy):
    batch = collate([[5, 6, 7], [8]], [[9, 10, 11], [12]], pad_id=0)
    ours, theirs = (
        token_outputs(m, batch, temperature=1.0, micro_batch=MicroBatch(2)).logprobs for m in (reference, policy)
    )
    assert torch.equal(ours, theirs)
    assert ours.any()


@pytest.mark.parametrize("architecture", MATRICES)
def test_a_reference_in_half_precision_is_the_policy_bit_for_bit(tiny, architecture):
    """Its tied head stays float32: a copy of it would take more memory, not less."""
    model = tiny(architecture)
    policy = load_policy(model, **HALF)
    reference = load_reference(ppo(model), resolve(model), policy)
    assert reference.lm.get_submodule(MATRICES[architecture]).weight.dtype == torch.bfloat16
    assert policy.lm.get_submodule(MATRICES[architecture]).weight.dtype == torch.float32
    assert reference.lm.get_output_embeddings().weight is reference.lm.get_input_embeddings().weight
    assert_reference_is_policy(reference, policy)


@pytest.mark.parametrize("architecture", MATRICES)
def test_a_reference_is_rounded_as_a_policy_in_bfloat16_is(tiny, architecture):
    """Its embedding too, whose rows no product rounds: before the first update the KL is 0, and every pair of DPO ties."""
    config = ppo(tiny(architecture), weights_dtype="bfloat16")
    policy = load_trained(config, resolve(config.model), CPU, torch.bfloat16)
    assert_reference_is_policy(load_reference(config, resolve(config.model), policy), policy)


@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {"weights_dtype": "bfloat16"}], ids=str)
def test_a_divided_reference_on_a_gpu_is_where_the_policy_starts(model, monkeypatch, changes):
    """Both wait in main memory for their parts to go to the GPU, and are rounded as that has them: the first KL is 0."""
    config = ppo(model, shard="full", **changes)
    monkeypatch.setattr(ranks._World, "size", 2)  # nothing is sent: they are only loaded
    source, gpu = resolve(config.model), torch.device("cuda")
    policy = load_trained(config, source, gpu, torch.bfloat16)
    reference = load_reference(config, source, policy, gpu)
    assert {str(p.device) for p in reference.lm.parameters()} == {"cpu"}
    monkeypatch.undo()
    assert_reference_is_policy(reference, policy)


def test_reward_models_that_wait_for_a_gpu_are_stored_as_it_has_them(reward_model):
    for stored in (torch.float32, torch.bfloat16):
        loaded = load_rewards([reward_model], RewardOptions(), micro_batch=MicroBatch(2), stored=stored, **HALF)
        model = loaded.rewards[0].function.model
        assert model.classifier.get_input_embeddings().weight.dtype == stored


@pytest.mark.parametrize("architecture", ["qwen3", "deberta-v2"])
def test_a_reward_in_half_precision_gives_the_same_scores(tmp_path, architecture):
    base, folder = str(tmp_path / "base"), str(tmp_path / "m")
    make_tiny_model(architecture, base, hidden_size=32, num_layers=2)
    tokenizer = load_tokenizer(base)
    save_reward_model(load_reward_model(base, tokenizer, seed=0, **HALF), tokenizer, tmp_path / "m")
    whole = load_reward_model(folder, tokenizer, **HALF)
    reward = load_model_reward(folder, micro_batch=MicroBatch(2), **HALF)
    dtypes = {name: p.dtype for name, p in reward.model.classifier.named_parameters()}
    assert torch.bfloat16 in dtypes.values()
    assert {dtype for name, dtype in dtypes.items() if name.startswith(("score", "classifier"))} == {torch.float32}
    prompts, responses = ["你好", "a b"], ["再见", "no"]
    rows = [reward.inputs.encode(p, r, truncated=False) for p, r in zip(prompts, responses, strict=True)]
    expected = whole.eval()(rows).tolist()
    assert reward(prompts, responses, [False, False]) == expected
    assert expected[0] != expected[1]
