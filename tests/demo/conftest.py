"""A demo that is small enough for the suite: the real pipeline, a few steps of a very small model on few records."""

from pathlib import Path

import pytest

from heedful.demo import world

COMMON = "eval_fraction: 0.12\neval_every: 0\nsample_every: 0\n"
RECIPE = {
    "tiny": "hidden_size: 32\nnum_layers: 1\nmax_length: 128\ninitializer_range: 0.15\nvocab_size: 320\n",
    "sft": f"max_steps: 30\nbatch_size: 16\nmicro_batch_size: 16\nlearning_rate: 1e-2\n{COMMON}",
    "reward": f"max_steps: 6\nbatch_size: 16\nmicro_batch_size: 64\nlearning_rate: 3e-3\n{COMMON}",
    "ppo": "steps: 3\nrollout_batch_size: 32\nminibatch_size: 16\nmicro_batch_size: 16\nmax_new_tokens: 12\n"
    f"temperature: 1.5\nkl_target: 6\nlearning_rate: 2e-3\neval_prompts: 16\n{COMMON}",
}


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory):
    """The folder of a recipe of a few steps."""
    folder: Path = tmp_path_factory.mktemp("recipe")
    for name, text in RECIPE.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def small_world():
    """Every third prompt, with one demonstration and one pair, where the shipped world has ten and twelve."""
    few = world.instructions()[1::3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "instructions", lambda: few)
        patch.setattr(world, "DEMONSTRATIONS", 1)
        patch.setattr(world, "PAIRS", 1)
        yield
