"""Every recipe is parsed by its own command, and its header says how it is run."""

from pathlib import Path

import pytest

from heedful.configs.parse import parse
from heedful.configs.ppo import PPOConfig
from heedful.configs.reward import RewardConfig
from heedful.configs.sft import SFTConfig

ROOT = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(ROOT.rglob("*.yaml"))
COMMANDS = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}


def test_there_are_recipes():
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_parsed_by_its_command(path):
    command = path.stem.rpartition("-")[2]
    text = path.read_text(encoding="utf-8")
    assert f"heedful {command} recipes/{path.relative_to(ROOT)}" in text
    required = [] if "\nmodel: " in text else ["--model", "m", "--data", "d.jsonl", "--output", "o"]
    config = parse(COMMANDS[command], [str(path), *required], prog="test")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition(": ")
            assert hasattr(config, key), f"{path.name}: {key}"
            assert str(getattr(config, key)).lower() == value or isinstance(getattr(config, key), float | tuple | Path)
