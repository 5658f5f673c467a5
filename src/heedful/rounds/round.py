"""``heedful round``: take a project from sampling to a measured policy, one step after another; each can be resumed.

notes.py says what is written where. A step that was cut short goes on when the command is run again: training goes on from
its last checkpoint, answers that were sampled stay, an item is never added twice.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heedful.configs.parse import plain_value
from heedful.configs.rounds import RoundConfig
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import flag
from heedful.errors import ConfigError, DataError
from heedful.files import to_json, write_text
from heedful.label.project import Project
from heedful.label.records import LabelledItem
from heedful.label.statistics import statistics
from heedful.lock import FolderLock
from heedful.rewards.resolve import check_reward_string
from heedful.rounds.asking import ask, how_many, refuse_few_prompts
from heedful.rounds.judging import load_judge, scores_of_items
from heedful.rounds.notes import Note, RoundNotes, folder_of, read_round, read_state, write_state
from heedful.rounds.training import (
    check_pairs,
    check_settings,
    evaluate,
    train_policy,
    train_reward_models,
    verdict,
    write_labels,
)

Say = Callable[[str], None]
Done = tuple[Note | None, str]
"""The numbers of a step, None if people have to label first; and what to tell the user, if anything."""
OF_THIS_CALL = ("project", "enough", "device", "micro_batch_size")
"""Settings that may differ when a round goes on."""
FILES = {"reward_config": "reward", "ppo_config": "ppo"}
"""Files of settings that a flag may replace until the step that reads them is done; the other stays for later rounds."""
BUSY = "another heedful round is at work on this project ({owner}); wait for it, or end it"
FIXED = ("policy", "prompts", "eval_fraction", "max_new_tokens")
"""Settings that all rounds of a project share: with others, rounds could not be compared."""


def run_round(config: RoundConfig, say: Say = print) -> RoundNotes:
    """Do every step of the project's current round that can be done, and return its notes.

    Settings without a policy are those of the last round, but for what a command's flags gave and what is not at its default.
    The next round begins if the last one is finished. If the step ``label`` is not done when this returns, people have to
    label more first.

    Raises ConfigError for settings that do not fit a round that has begun, and what training and measuring raise.
    """
    if not (config.project / "project.yaml").is_file():
        raise ConfigError(f"{config.project} is no labelling project; make one with heedful label new {config.project}")
    for reward in config.judge:
        check_reward_string(reward)
    (config.project / "rounds").mkdir(exist_ok=True)
    with FolderLock(config.project / "rounds", refusal=BUSY):
        config, notes = _current(config)
        say(f"round {notes.number}: {'all steps are done' if notes.step is None else f'the next step is {notes.step}'}")
        while notes.step is not None:
            since = time.perf_counter()
            numbers, text = STAGES[notes.step](config, notes)
            if numbers is not None:
                notes.note(notes.step, numbers, since=since)
            if text:
                say(text)
            if numbers is None:  # people have to label first
                return notes
        say(_result(config, notes))
    return notes


def _sample(config: RoundConfig, notes: RoundNotes) -> Done:
    with Project.open(config.project) as project:
        models = _models_before(config, notes)
        asked = ask(config, project, notes, models, lambda items: check_pairs(config, notes, items))
    return asked, how_many(config, asked)


def _label(config: RoundConfig, notes: RoundNotes) -> Done:
    counted = notes.counted()
    if counted is not None:
        return counted, ""
    with Project.open(config.project, read_only=True) as project:
        waiting, numbers = _labelled(config, project, notes)
        if waiting:
            return None, waiting
        write_labels(config, project, notes, numbers)
    return numbers, ""


def _reward(config: RoundConfig, notes: RoundNotes) -> Done:
    numbers = train_reward_models(config, notes, notes.folder / "labels")
    _write_scores(config, numbers["models"])
    if numbers["accuracy"] is None:
        return numbers, f"reward model: trained on {numbers['train_pairs']} labels; none is held out to measure it"
    return numbers, (
        f"reward model: trained on {numbers['train_pairs']} labels, orders {numbers['accuracy']:.0%} of "
        f"{numbers['eval_pairs']} held-out ones as people did"
    )


def _ppo(config: RoundConfig, notes: RoundNotes) -> Done:
    return train_policy(config, notes, notes.steps["reward"]["models"]), ""


def _evaluate(config: RoundConfig, notes: RoundNotes) -> Done:
    return evaluate(config, notes.before, notes.steps["ppo"]["model"], notes.steps["reward"]["models"]), ""


STAGES: Mapping[str, Callable[[RoundConfig, RoundNotes], Done]] = {
    "sample": _sample,
    "label": _label,
    "reward": _reward,
    "ppo": _ppo,
    "evaluate": _evaluate,
}
"""The steps of a round, in order (`heedful.label.rounds_page.STEPS`)."""


def _current(config: RoundConfig) -> tuple[RoundConfig, RoundNotes]:
    """The settings and notes of the round that is under way, or of the next one, which then begins. Raises ConfigError."""
    given = config.given
    number, settings = read_state(config.project)
    if not config.policy:
        if settings is None:
            raise ConfigError(
                "--policy and --prompts are missing: the project has no round yet whose settings could be used"
            )
        config = _from_settings(config, settings)
    notes = read_round(config.project, number) if number else None
    if notes is not None and settings is not None and notes.step is not None:
        changed = {
            name: plain_value(getattr(config, name))
            for name, step in FILES.items()
            if name in given and step not in notes.steps
        }
        free = (*OF_THIS_CALL, *changed)
        _refuse_other(config, notes.settings, [f.name for f in dataclasses.fields(config) if f.name not in free])
        if changed and "label" not in notes.steps:
            check_settings(config, number, notes.before)
        if changed:
            write_state(config.project, number, {**settings, **changed})
            notes.settings = {**notes.settings, **changed}
            notes.write()
        return config, notes
    if settings is not None:
        _refuse_other(config, settings, FIXED)
    refuse_few_prompts(config)
    finished = number if notes is not None else number - 1  # a kill may have come between rounds.json and round.json
    number = max(finished, 0) + 1
    before = config.policy if number == 1 else _policy_of(config.project, number - 1)
    check_settings(config, number, before)
    written = {field.name: plain_value(getattr(config, field.name)) for field in dataclasses.fields(config)}
    written.pop("project")
    write_state(config.project, number, written)
    folder = folder_of(config.project, number)
    folder.mkdir(parents=True, exist_ok=True)
    notes = RoundNotes(folder, number, written, before)
    notes.write()
    return config, notes


def _from_settings(config: RoundConfig, settings: Mapping[str, Any]) -> RoundConfig:
    """The settings of the last round, with those of this call: what its flags named, and what is not at its default."""
    own = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in ("project", *config.given) or getattr(config, field.name) != field.default
    }
    own = {name: value for name, value in own.items() if name not in ("policy", "prompts")}
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return RoundConfig(**{**known, **own})


def _refuse_other(config: RoundConfig, settings: Mapping[str, Any], names: Any) -> None:
    for name in names:
        now, then = plain_value(getattr(config, name)), settings.get(name)
        if now != then:
            raise ConfigError(
                f"{flag(name)} is {now!r}, but the project's rounds have {then!r}; use that, leave out --policy and "
                "--prompts to go on with the same settings, or make another project"
            )


def _policy_of(project: Path, number: int) -> str:
    notes = read_round(project, number)
    if notes is None or "ppo" not in notes.steps:
        raise DataError(f"{folder_of(project, number)}: round {number} has no policy, so the next cannot begin")
    return str(notes.steps["ppo"]["model"])


def _models_before(config: RoundConfig, notes: RoundNotes) -> list[str]:
    before = read_round(config.project, notes.number - 1) if notes.number > 1 else None
    return [] if before is None else list(before.steps["reward"]["models"])


def _labelled(config: RoundConfig, project: Project, notes: RoundNotes) -> tuple[str, Note]:
    """What people have to be told if there are not enough labels (else nothing), and the numbers of the step."""
    asked = set(notes.steps["sample"]["items"])
    labels = [one for one in project.labels() if one.item.item_id in asked]
    done = {one.item.item_id for one in labels if _counts(one)}
    wanted = max(1, round(config.enough * len(asked)))
    if len(done) < wanted:
        skipped = {event.content["item"] for event in project.events() if event.kind == "skip"}
        passed = len((asked & skipped) - done)
        also = f" ({passed} were skipped; --enough goes on without them)" if passed else ""
        return (
            f"{len(done)} of {len(asked)} pairs are labelled, {wanted} are needed{also}. Have them labelled:\n"
            f"  heedful label serve {config.project}\nand go on with:\n  heedful round {config.project}"
        ), {}
    numbers = {
        "labels": len(labels),
        "pairs": len(done),
        "events": len(project.events()),
        "statistics": statistics(labels, project.people()),
    }
    return "", numbers


def _counts(one: LabelledItem) -> bool:
    """Whether a label is one that can be trained on: hidden repeats, and those of held-out and of refused people, are not."""
    return not one.event.content.get("repeat") and one.person.standing not in ("held-out", "refused")


def _write_scores(config: RoundConfig, models: list[str]) -> None:
    """Write PROJECT/scores.jsonl: what the reward models give each candidate, for the page of statistics."""
    with Project.open(config.project, read_only=True) as project:
        items = project.items()
    options = RewardOptions(
        reward_combine="mean" if len(models) > 1 else "sum", trust_remote_code=config.trust_remote_code
    )
    scores = scores_of_items(load_judge([f"model:{model}" for model in models], options, config), items)
    lines = (to_json({"item": item, "scores": values}) for item, values in scores.items())
    write_text(config.project / "scores.jsonl", "".join(f"{line}\n" for line in lines))


def _result(config: RoundConfig, notes: RoundNotes) -> str:
    measured = notes.steps["evaluate"]
    found = [_compared(measured["over_previous"], "under its reward model")]
    if measured["judge_over_previous"]:
        found.append(_compared(measured["judge_over_previous"], "under the judge"))
    return (
        f"round {notes.number} is finished. Its policy, compared with the one before on held-out prompts:\n"
        + "".join(f"  {line}\n" for line in found)
        + f"KL to the first policy: {measured['kl']:.2f} nats per answer.\n"
        f"The next round:\n  heedful round {config.project}"
    )


def _compared(numbers: Note, by: str) -> str:
    """What a comparison came to. Notes of earlier versions have no verdict."""
    interval = numbers["interval_95"]
    within = "" if interval is None else f", 95 % interval {interval[0]:.1%} to {interval[1]:.1%}"
    wins = f"{numbers['win_rate']:.1%} of {numbers['prompts']}{within}; a tie counts one half"
    return f"{by}: {verdict(interval)} (it wins {wins})"
