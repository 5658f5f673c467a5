"""Answers that change in front of the reader's eyes: the same held-out prompts, answered anew by each better model."""

from collections.abc import Callable
from pathlib import Path

from heedful.configs.online import PPOConfig
from heedful.data import prompt_key, read_prompts, split_by_prompt
from heedful.display import say, shown
from heedful.engines import local
from heedful.models.policy import Policy

WATCHED = ("opposites", "lists", "加法")
"""The families whose first held-out prompt is answered."""
MOST = 80
"""Characters of an answer; those of the random model are long."""


def watch(config: PPOConfig) -> Callable[[int, Path], None]:
    """A function to call with the folder of a saved model (``on_save``): prints the answers of each ``best/``.

    Every model draws the same random numbers at temperature 1, so an answer changes only if the model does. ``config`` has
    the prompts, the length of answers and the seed.
    """
    held_out = split_by_prompt(read_prompts(config.data), config.eval_fraction)[1]
    first = {prompt.columns["family"]: prompt for prompt in reversed(held_out)}
    prompts = [first[family] for family in WATCHED if family in first]

    def show(_step: int, folder: Path) -> None:
        if folder.name == "best":
            policy = Policy.from_pretrained(folder, device=config.device, dtype=config.dtype)
            engine = local.LocalEngine(policy, max_new_tokens=config.max_new_tokens, seed=config.seed)
            for completion in engine.generate(prompts).completions:
                say(f"{prompt_key(completion.prompt.prompt)} -> {shown(completion.response, MOST)}")

    return show
