"""What a round will need, tried before people label for it: its steps begin with stand-ins for what is not there yet."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heedful.configs.rounds import RoundConfig
from heedful.data.messages import read_conversation
from heedful.data.splits import split_by_prompt
from heedful.files import to_json
from heedful.label.records import Item
from heedful.rounds.measuring import win_rate_config
from heedful.rounds.notes import RoundNotes, folder_of
from heedful.rounds.training import EVAL, TRAIN, naming_config, ppo_config, reward_config
from heedful.train.disk_space import check_space
from heedful.train.online import start as online
from heedful.train.reward import start as start_reward
from heedful.types import Prompt, Text


def check_settings(config: RoundConfig, number: int, before: str) -> None:
    """Check that PPO and the measurement of a round could begin, with reward models that are still to be trained.

    Args:
        config: the round's settings.
        number: of the round.
        before: the policy that its answers come from.

    Raises what ``heedful reward``, ``heedful ppo`` and ``heedful evaluate win-rate`` raise before they begin.
    """
    notes = RoundNotes(folder_of(config.project, number), number, {}, before)
    reward_config(config, notes, None, 0)
    win_rate_config(config, config.policy, before, config.judge or ("rule:digits",))
    stand_ins = [f"rule:length:0-{length}" for length in range(1, config.reward_models + 1)]
    settings = ppo_config(config, notes, stand_ins, are_models=False)
    judges = dict.fromkeys((*settings.best_by, *config.judge))  # so that they score a few answers
    settings = replace(settings, best_by=tuple(one for one in judges if one not in stand_ins))
    with naming_config("ppo"):
        check_space(settings, online.start(settings, ()).learner)


def check_pairs(config: RoundConfig, notes: RoundNotes, items: Sequence[Item]) -> None:
    """Check that a reward model could learn from pairs, whatever people say of them.

    Args:
        config: the round's settings.
        notes: of the round.
        items: those of the round, and of earlier ones.

    Raises what ``heedful reward`` raises before it begins.
    """
    pairs = [one for one in items if one.task == "pair"]
    prompts = [Prompt(_prompt(one.prompt), str(place)) for place, one in enumerate(pairs)]
    parts = split_by_prompt(prompts, config.eval_fraction if config.ask_held_out else 0.0, may_be_one_sided=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, part in zip((TRAIN, EVAL), parts, strict=True):
            rows = [_as_preference(pairs[int(one.source)]) for one in part]
            if rows:
                Path(folder, name).write_text("".join(f"{to_json(row)}\n" for row in rows), encoding="utf-8")
        if not parts[0]:
            return  # the round says so when there are labels
        settings = reward_config(config, notes, Path(folder), 0)
        with naming_config("reward"):
            check_space(settings, start_reward(settings)[0])


def _prompt(prompt: Any) -> Text:
    return prompt if isinstance(prompt, str) else read_conversation("an item", "prompt", prompt)


def _as_preference(item: Item) -> dict[str, Any]:
    chosen, rejected = (one.response for one in item.candidates)
    return {"prompt": item.prompt, "chosen": chosen, "rejected": rejected}
