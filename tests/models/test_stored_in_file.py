"""Weights that are in half precision in their files: not converted to float32 in main memory, and with the same numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heedful import SFTConfig
from heedful.distributed import ranks
from heedful.models import load_causal_lm, load_policy, load_reward_model, load_tokenizer, load_value_model, source
from heedful.models.source import resolve
from heedful.training.setup import load_trained

CPU = torch.device("cpu")
HALF = {"device": CPU, "compute_dtype": torch.bfloat16}


def rewrite(folder, convert):
    file = folder / "model.safetensors"
    save_file({name: convert(name, weight) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return str(folder)


@pytest.fixture
def in_half(tiny, tmp_path):
    """Folders of a model in bfloat16, and of the same numbers in float32."""

    def make(name="qwen3"):
        folders = []
        for dtype in (torch.bfloat16, torch.float32):
            folder = tmp_path / f"模型-{name}-{dtype}"
            folders.append(copied(tiny(name), folder, dtype))
        return folders

    def copied(source, folder, dtype):
        folder.mkdir()
        for file in Path(source).iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        return rewrite(folder, lambda _, weight: weight.bfloat16().to(dtype))

    return make


def bytes_beside_files(module):
    """Bytes of weights that are not parts of a mapped file."""
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if line.endswith(".safetensors")
    ]
    return sum(p.nbytes for p in module.parameters() if not any(a <= p.data_ptr() < b for a, b in ranges))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells mapped files by Linux's /proc")
@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {"weights_dtype": "bfloat16"}], ids=str)
def test_a_rank_with_a_gpu_needs_no_main_memory_for_matrices_that_will_be_sharded(in_half, monkeypatch, changes):
    """All were converted to float32, 4 bytes per weight on each rank. Now they are parts of the file, which ranks share."""
    config = SFTConfig(model=in_half()[0], data="d", output="o", shard="full", **changes)
    monkeypatch.setattr(ranks._World, "size", 2)  # nothing is sent: it is only loaded
    policy = load_trained(config, resolve(config.model), torch.device("cuda"), torch.bfloat16)
    vectors = sum(p.nbytes for p in policy.parameters() if p.dim() == 1)
    assert bytes_beside_files(policy) == vectors
    assert vectors < 0.1 * sum(p.nbytes for p in policy.parameters())


@pytest.mark.parametrize(("name", "stored"), [("qwen3", torch.bfloat16), ("gpt2", torch.float32)])
def test_the_numbers_are_those_of_the_same_weights_in_float32(in_half, name, stored):
    ours, theirs = (load_policy(folder, stored=stored, **HALF) for folder in in_half(name))
    assert ours.logit_map == theirs.logit_map
    for (key, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert a.dtype == b.dtype, key
        assert torch.equal(a, b), key
    for (key, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b), key


def test_a_head_that_a_file_lacks_starts_as_ever(in_half):
    heads = []
    for folder in in_half():
        tokenizer = load_tokenizer(folder)
        model = load_reward_model(folder, tokenizer, seed=3, stored=torch.bfloat16, **HALF)
        assert model.classifier.get_input_embeddings().weight.dtype == torch.bfloat16
        heads.append(model.classifier.score.weight)
    assert torch.equal(*heads)
    assert heads[0].dtype == torch.float32


def test_values_are_those_of_the_same_weights_in_float32(in_half):
    ours, theirs = (load_value_model(folder, stored=torch.bfloat16, **HALF) for folder in in_half())
    assert {p.dtype for p in ours.trunk.parameters() if p.dim() == 2} == {torch.bfloat16}
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_files_in_one_half_precision_are_left_as_they_are(in_half):
    half, whole = in_half()
    half_of_file = source.half_of_file
    assert half_of_file(resolve(half)) == torch.bfloat16
    assert half_of_file(resolve(whole)) is None
    mixed = rewrite(Path(half), lambda name, weight: weight.float() if "norm" in name else weight)
    assert half_of_file(resolve(mixed)) is None
    lm = load_causal_lm(mixed, as_in_file=True)
    assert {p.dtype for p in lm.parameters()} == {torch.float32}


def test_a_run_in_float32_on_a_cpu_computes_with_float32_weights(in_half):
    policy = load_policy(in_half()[0], device=CPU, compute_dtype=torch.float32)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
