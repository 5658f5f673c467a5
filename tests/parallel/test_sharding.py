"""Models divided among two ranks train, sample, are saved and go on as whole ones do. All cases share one launch."""

import json
import math

import pytest
from safetensors.torch import load_file

from heedful.checkpoints.tiny import DECODERS

TRAINED = (
    "tied, with a value head",
    "untied",
    "adapters",
    "layers recomputed",
    "a rank without rows",
    "unequal micro-batches",
    "sums in every micro-batch",
    "reward model",
    "encoder",
    "value model",
    "in float64",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("分")


@pytest.fixture(scope="module")
def two(results, checkpoints, folder):
    assert {"gpt2", "llama", "qwen2", "qwen3"} <= set(DECODERS)
    return results(2, "divided.py", checkpoints["gpt2"].parent, folder)


@pytest.mark.parametrize("name", TRAINED)
def test_five_steps_give_the_numbers_of_one_process(two, name):
    """Sums are made in another order: rounding, and what AdamW makes of it, is all that may differ."""
    for found in two:
        most = 1e-10 if name == "in float64" else 1e-5
        assert found[name]["loss"] < most
        assert found[name]["norm"] < most
        assert found[name]["weights"] < most
        assert found[name]["moved"] > 1e-3, "nothing was learned"
        assert found[name]["names"]


def test_each_rank_holds_half(two):
    """Weights, gradients and Adam's moments; a tensor whose rows are odd has one more on rank 0."""
    for place, whole in enumerate(two[0]["memory"][0]):
        parts = [found["memory"][1][place] for found in two]
        assert sum(parts) == whole
        assert max(parts) < 0.51 * whole


def test_copies_are_whole(two, folder):
    """They sample the same tokens with the same log-probs, and are saved as the same files, by rank 0 only."""
    for here, found in enumerate(two):
        assert found["copies"] == {
            "same": [True, True],
            "equal": True,
            "tied": True,
            "on first": here == 0,
            "whole is itself": True,
        }
    one, several = folder / "one", folder / "several"
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(several) for path in several.rglob("*") if path.is_file())
    for name in names:
        assert (one / name).read_bytes() == (several / name).read_bytes(), name


def test_an_average_is_put_in_place_and_taken_out(two):
    for found in two:
        assert found["average"]["held"] < 1e-6
        assert found["average"]["loss"] < 1e-6
        assert found["average"]["back"]
        assert found["average"]["differs"]


def test_a_state_goes_to_ranks_and_to_one_process_and_back(two, folder):
    for found in two:
        assert found["states"] == {
            "suffixes": [".json", ".safetensors"],
            "tree": [[0, 1, 2], [1, 2.5]],
            "divided": True,
            "whole": True,
            "from whole": True,
            "kind": "Tensor",
        }


def test_each_rank_writes_its_parts_only(two, folder):
    """Every number is in one file, and the header says where it belongs: there is nothing else beside it."""
    files = sorted((folder / "state" / "divided").iterdir())
    assert len(files) == 2
    sizes = [sum(tensor.numel() for tensor in load_file(path).values()) for path in files]
    tree = json.loads((folder / "state" / "state.json").read_text(encoding="utf-8"))
    assert sum(sizes) == sum(math.prod(shape) for _, shape in divided(tree))
    assert max(sizes) < 0.51 * sum(sizes)


def divided(tree):
    """What is written in a state's tree of divided tensors."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from [value] if name == "$divided" else divided(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from divided(value)
