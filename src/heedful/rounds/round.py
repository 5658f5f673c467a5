"""``heedful round``: sample, label, train a reward model and a policy, evaluate; every step can be resumed.

PROJECT/rounds.json holds ``rounds`` (how many have begun) and ``settings`` (those of the last one).
PROJECT/rounds/N/round.json of round N holds

- ``round``: N; ``settings``: those at its start; ``before``: the policy that wrote its answers
- ``steps``, one object per finished step, in order; each has ``seconds``
  - ``sample``: ``prompts``, ``asked`` (pairs), ``random`` and ``active`` (how many of them), ``checkpoint``,
    ``items`` (their ids)
  - ``label``: ``labels``, ``pairs`` (labelled ones of this round), ``events`` (the number of the project's last event; undo
    does not reach labels up to it), ``statistics`` (`heedful.label.statistics`, of this round)
  - ``reward``: ``models`` (folders), ``train_pairs``, ``eval_pairs``, ``accuracy`` (mean of the models on held-out labels, or
    null)
  - ``ppo``: ``model`` (folder), ``score_mean`` (held out, by the reward models), ``kl``, ``steps``
  - ``evaluate``: ``over_previous`` (``win_rate``, ``interval_95``, ``verdict``: better, worse or not distinguishable,
    ``score_mean``, ``baseline_score_mean`` by this round's reward models), ``judge_over_previous`` and ``judge_over_first``
    (the same by ``--judge``, or null), ``kl`` (to the first policy), ``samples`` (ten prompts with the answers of the new and
    the previous policy, and their scores)

A step is recorded once it is complete; a missing step is run again or resumed: training from its last checkpoint, sampled
answers are kept, an item is never added twice. The numbers of the step ``label`` are also in
PROJECT/rounds/N/labels/numbers.json, beside the labels that they count.
"""

import contextlib
import dataclasses
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from heedful.algorithms.online import start as online
from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import start as start_reward
from heedful.algorithms.reward_model import train_reward
from heedful.configs.evaluate import KLConfig, WinRateConfig
from heedful.configs.help import settings as known_settings
from heedful.configs.names import answer
from heedful.configs.offline import RewardConfig
from heedful.configs.online import PPOConfig
from heedful.configs.options import RunOptions
from heedful.configs.parse import parse, plain_value, read_keys
from heedful.configs.rounds import RoundConfig
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import flag
from heedful.configs.tools import SampleConfig
from heedful.data.messages import read_conversation
from heedful.data.schemas import read_prompts
from heedful.data.splits import split_by_prompt
from heedful.display import counted
from heedful.errors import ConfigError, DataError
from heedful.evaluate.policies import evaluate_kl, evaluate_win_rate
from heedful.faults import hit
from heedful.files import read_record, to_json, write_json
from heedful.label.exporting import Export, ExportOptions, export
from heedful.label.project import Project
from heedful.label.records import Item, Snapshot
from heedful.label.rounds_page import COUNTED, REMEDY, ROUND, STEPS, read_noted
from heedful.label.statistics import statistics
from heedful.lock import FolderLock
from heedful.rewards.resolve import check_reward_string
from heedful.rounds.judging import load_judge, scores_of, scores_of_items
from heedful.rounds.pairs import Asked, choose, compared, disagreement, item_of, new_pairs
from heedful.rounds.sample import Row, load_writers, sampled_rows, write_rows
from heedful.training.checkpoints import check_space
from heedful.training.output_folder import finished
from heedful.training.result import TrainingResult
from heedful.types import Prompt

C = TypeVar("C")
R = TypeVar("R", bound=RunOptions)
Note = dict[str, Any]
"""The numbers of a step."""
Say = Callable[[str], None]
Verdict = Literal["better", "worse", "not distinguishable"]
OF_THIS_CALL = ("project", "enough", "device", "micro_batch_size")
"""Settings that may differ when a round is resumed."""
FILES = {"reward_config": "reward", "ppo_config": "ppo"}
"""Settings files that a flag may replace until their step is done; the other stays for later rounds."""
FIXED = ("policy", "prompts", "eval_fraction", "max_new_tokens")
"""Settings fixed for all rounds of a project, so that rounds stay comparable."""
SAMPLING = (
    "max_new_tokens", "response_length", "temperature", "top_k", "top_p", "cuda_graphs",
    "trust_remote_code", "device", "dtype", "micro_batch_size",
)  # fmt: skip
"""Sampling settings of a round."""
READ_LATER: Mapping[str, tuple[str, type[str] | type[list[str]]]] = {
    "sample": ("items", list),
    "reward": ("models", list),
    "ppo": ("model", str),
}
"""Keys of a step's notes that later steps and rounds read, and their types."""
BUSY = "another heedful round is running on this project ({owner}); wait for it, or stop it"
TRAIN, EVAL = "preferences.train.jsonl", "preferences.eval.jsonl"
COMPARED = ("win_rate", "interval_95", "ties", "score_mean", "baseline_score_mean", "prompts")
EQUAL = 0.5
"""The win rate of two equal policies."""
SHOWN = 10
"""Prompts whose answers are kept."""


@dataclass
class RoundNotes:
    """The content of round.json."""

    folder: Path
    number: int
    settings: Mapping[str, Any]
    before: str
    """The policy that wrote the round's answers."""
    steps: dict[str, Note] = field(default_factory=dict)

    @property
    def step(self) -> str | None:
        """The next step; None if all are done."""
        return next((name for name in STEPS if name not in self.steps), None)

    def write(self) -> None:
        """Write round.json."""
        content = {"round": self.number, "settings": self.settings, "before": self.before, "steps": self.steps}
        write_json(self.folder / "round.json", content)


def run_round(config: RoundConfig, say: Say = print) -> RoundNotes:
    """Run the steps of the project's current round as far as possible, and return its notes.

    Without ``policy``, the settings are those of the last round, overridden by command-line flags and by values other than
    the default. The next round begins if the last one is finished. If the step ``label`` is not done on return, more labels
    are needed.

    Raises ConfigError for settings that differ from those of a begun round, and the errors of training and evaluation.
    """
    if not (config.project / "project.yaml").is_file():
        raise ConfigError(f"{config.project} is no labelling project; make one with heedful label new {config.project}")
    for reward in config.judge:
        check_reward_string(reward)
    (config.project / "rounds").mkdir(exist_ok=True)
    with FolderLock(config.project / "rounds", refusal=BUSY):
        config, notes = _current(config)
        say(f"round {notes.number}: {'all steps are done' if notes.step is None else f'the next step is {notes.step}'}")
        for name, step in STAGES:
            if name in notes.steps:
                continue
            since = time.perf_counter()
            numbers = step(config, notes, say)
            if numbers is None:  # people have to label first
                return notes
            hit("round.step")
            notes.steps[name] = {**numbers, "seconds": round(time.perf_counter() - since, 2)}
            notes.write()
            hit("round.noted")
        say(_result(config, notes))
    return notes


def _current(config: RoundConfig) -> tuple[RoundConfig, RoundNotes]:
    """Settings and notes of the current round; if it is finished, begin the next one. Raises ConfigError."""
    given = config.given
    state = read_noted(config.project / "rounds.json", "rounds", "settings") or {"rounds": 0, "settings": None}
    number, settings = state["rounds"], state["settings"]
    if not config.policy:
        if settings is None:
            raise ConfigError("--policy and --prompts are missing: the project has no earlier round to take them from")
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
        if changed:
            if "label" not in notes.steps:
                check_settings(config, number, notes.before)
            write_state(config.project, number, {**settings, **changed})
            notes.settings = {**notes.settings, **changed}
            notes.write()
        return config, notes
    if settings is not None:
        _refuse_other(config, settings, FIXED)
    _refuse_few_prompts(config)
    finished_rounds = number if notes is not None else number - 1  # killed before it wrote round.json
    number = max(finished_rounds, 0) + 1
    before = config.policy
    if number > 1:
        before = _finished_round(config.project, number - 1).steps["ppo"]["model"]
    check_settings(config, number, before)
    written = {field.name: plain_value(getattr(config, field.name)) for field in dataclasses.fields(config)}
    written.pop("project")
    write_state(config.project, number, written)
    notes = RoundNotes(config.project / "rounds" / str(number), number, written, before)
    notes.folder.mkdir(parents=True, exist_ok=True)
    notes.write()
    return config, notes


def _from_settings(config: RoundConfig, settings: Mapping[str, Any]) -> RoundConfig:
    """Settings of the last round, overridden by this call's flags and by values other than the default."""
    path, known = config.project / "rounds.json", {one.name: one for one in known_settings(RoundConfig)}
    last: dict[str, Any] = {"project": config.project}
    for name, value in settings.items():
        if name not in known:
            raise DataError(f"{path}: {name} is not a setting of heedful round{answer(name, known)}; {REMEDY}")
        last[name] = value
    try:
        before = RoundConfig(**last)
    except ConfigError as error:
        raise DataError(f"{path}: {str(error).removesuffix('.')}; {REMEDY}") from error
    called = {
        name: getattr(config, name)
        for name, one in known.items()
        if name not in ("policy", "prompts") and (name in config.given or getattr(config, name) != one.default)
    }
    return replace(before, **called)


def _refuse_other(config: RoundConfig, settings: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        now, then = plain_value(getattr(config, name)), settings.get(name)
        if now != then:
            raise ConfigError(
                f"{flag(name)} is {now!r}, but the project's rounds use {then!r}; use that, leave out --policy and "
                "--prompts to keep all settings, or make another project"
            )


def _refuse_few_prompts(config: RoundConfig) -> None:
    """Raise DataError if the split leaves no held-out prompts or no others: later steps need both."""
    prompts = read_prompts(config.prompts)
    train, held_out = split_by_prompt(prompts, config.eval_fraction, may_be_one_sided=True)
    if not (train and held_out):
        raise DataError(
            f"{config.prompts}: of {len(prompts)} prompts --eval-fraction {config.eval_fraction:g} holds out "
            f"{len(held_out)}, but a round needs at least one held out and one not; give more prompts, or another "
            "--eval-fraction"
        )


def write_state(project: Path, number: int, settings: Mapping[str, Any]) -> None:
    """Write rounds.json when a round begins."""
    write_json(project / "rounds.json", {"rounds": number, "settings": settings})


def read_round(project: Path, number: int) -> RoundNotes | None:
    """The notes of a round; None if it has none yet. Raises DataError for a damaged file."""
    folder = project / "rounds" / str(number)
    path = folder / "round.json"
    content = read_noted(path, *ROUND, "before")
    if content is None:
        return None
    steps = content["steps"]
    missing = next((name for name in STEPS if name not in steps), None)
    if missing and any(name in steps for name in STEPS[STEPS.index(missing) :]):
        raise DataError(f"{path}: step {missing} is missing, but a later one is there; {REMEDY}")
    for step, (key, kind) in READ_LATER.items():
        value = steps[step].get(key) if step in steps else kind()
        if not (isinstance(value, kind) and all(isinstance(one, str) for one in value)):
            raise DataError(
                f"{path}: {key} of the step {step} must be {'a string' if kind is str else 'a list of strings'}; {REMEDY}"
            )
    return RoundNotes(folder, number, content["settings"], content["before"], content["steps"])


def _finished_round(project: Path, number: int) -> RoundNotes:
    """The notes of a round that has a policy. Raises DataError if it has none."""
    notes = read_round(project, number)
    if notes is None or "ppo" not in notes.steps:
        folder = project / "rounds" / str(number)
        raise DataError(f"{folder}: round {number} has no policy, so the next cannot begin")
    return notes


def _sample(config: RoundConfig, notes: RoundNotes, say: Say) -> Note:
    """Sample answers, select pairs to label, and add them to the project. Raises DataError if there are none."""
    with Project.open(config.project) as project:
        file = notes.folder / "answers.jsonl"
        if not file.exists():
            _write_answers(config, notes, file)
            hit("round.sampled")
        rows = _read_answers(file)
        earlier: set[Asked] = set()
        for item in project.items():
            if item.round != notes.number or item.chosen_by == "import":
                earlier |= compared(item)
        pairs = [new_pairs(row, earlier) for row in rows]
        disagreements = None
        if config.random_share < 1 and notes.number > 1:
            options = RewardOptions(trust_remote_code=config.trust_remote_code)
            answered = [(row["prompt"], row["responses"], row) for row in rows]
            models = _finished_round(config.project, notes.number - 1).steps["reward"]["models"]
            scores = [scores_of(load_judge([f"model:{model}"], options, config), answered) for model in models]
            disagreements = [
                [disagreement([of_model[at] for of_model in scores], pair) for pair in found]
                for at, found in enumerate(pairs)
            ]
        seed = f"round {notes.number} {config.seed}"
        share = 1.0 if disagreements is None else config.random_share
        chosen = choose(pairs, config.labels, seed, disagreements=disagreements, random_share=share)
        if not chosen:
            raise DataError(
                f"{file}: no two answers to one prompt differ, so there is nothing to compare; raise --answers or "
                "--temperature"
            )
        items = [item_of(rows[choice.prompt], choice, notes.number) for choice in chosen]
        check_pairs(config, notes, [*items, *project.items()])
        project.add_items(items)
    by = [choice.chosen_by for choice in chosen]
    say(how_many(config, asked=len(chosen), prompts=len(rows)))
    return {
        "prompts": len(rows),
        "asked": len(chosen),
        "random": by.count("random"),
        "active": by.count("active"),
        "checkpoint": notes.before,
        "items": [item.item_id for item in items],
    }


def _write_answers(config: RoundConfig, notes: RoundNotes, file: Path) -> None:
    """Sample answers to prompts drawn for this round and write them as heedful sample does."""
    prompts = read_prompts(config.prompts)
    if not config.ask_held_out:
        prompts = split_by_prompt(prompts, config.eval_fraction)[0]
    wanted = min(len(prompts), math.ceil(config.pool * config.labels))
    prompts = random.Random(f"prompts of round {notes.number} {config.seed}").sample(prompts, wanted)
    sampling = SampleConfig(
        models=(notes.before,),
        data=config.prompts,
        output=file,
        answers=config.answers,
        seed=(config.seed + 7919 * notes.number) % 2**63,
        **{name: getattr(config, name) for name in SAMPLING},
    )
    write_rows(file, sampled_rows(load_writers(sampling), prompts, sampling)[0])


def _read_answers(file: Path) -> list[Row]:
    """The sampled answers of a round. Raises DataError for a damaged file."""
    remedy = "restore it, or remove it to sample the round's answers again"
    if not file.is_file():
        raise DataError(f"{file} is a folder, not a file; {remedy}")
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line:
            row = read_record(line) or {}
            answers = row.get("responses")
            if not (isinstance(answers, list) and "prompt" in row and all(map(_is_answer, answers))):
                raise DataError(f"{file}:{number} is damaged: a prompt has no answers; {remedy}")
            rows.append(row)
    return rows


def _is_answer(answer: Any) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("response"), str) and "source" in answer


def how_many(config: RoundConfig, *, asked: int, prompts: int) -> str:
    """A message with the number of pairs; if it is below --labels, also the reason and how to get more."""
    if asked >= config.labels:
        return f"{asked} pairs are ready to be labelled"
    return (
        f"{asked} pairs are ready to be labelled, fewer than --labels {config.labels}: the {config.answers} answers to each "
        f"of {prompts} prompts give no further pairs that are new and differ. For more in the next round: "
        f"--pool {math.ceil(10 * config.pool * config.labels / asked) / 10:g} (or more prompts, if these are all), or "
        "a higher --answers or --temperature"
    )


def _label(config: RoundConfig, notes: RoundNotes, say: Say) -> Note | None:
    """Write the training labels of the reward models, once there are enough; None if more are needed.

    Later labels belong to the next round. Hidden repeats and labels of held-out and refused people do not count, because they
    are not trained on. Raises DataError if there is nothing to train on.
    """
    folder = notes.folder / "labels"
    counted = read_noted(folder / COUNTED)
    if counted is not None:
        return counted
    with Project.open(config.project, read_only=True) as project:
        now = project.snapshot()  # trained on, and therefore out of reach of undo
    asked = set(notes.steps["sample"]["items"])
    labels = [one for one in now.counting() if one.item.item_id in asked]
    done = {
        one.item.item_id
        for one in labels
        if not one.event.content.get("repeat") and one.person.standing not in ("held-out", "refused")
    }
    wanted = max(1, round(config.enough * len(asked)))
    if len(done) < wanted:
        skipped = {event.content["item"] for event in now.events if event.kind == "skip"}
        passed = len((asked & skipped) - done)
        also = f" ({passed} were skipped; --enough continues without them)" if passed else ""
        say(
            f"{len(done)} of {len(asked)} pairs are labelled, {wanted} are needed{also}. Have them labelled:\n"
            f"  heedful label serve {config.project}\nand continue with:\n  heedful round {config.project}"
        )
        return None
    numbers = {
        "labels": len(labels),
        "pairs": len(done),
        "events": len(now.events),
        "statistics": statistics(labels, now.people),
    }
    write_labels(config, now, folder, numbers)
    return numbers


def write_labels(config: RoundConfig, now: Snapshot, folder: Path, numbers: Note) -> None:
    """Write the training files of the reward models and their counts, once per round.

    Raises DataError if there is nothing to train on.
    """
    if folder.is_dir():
        return
    fraction = config.eval_fraction if config.ask_held_out else 0.0
    exported = export(now, ExportOptions(eval_fraction=fraction, margin=config.margin))
    if TRAIN not in exported.files:
        raise DataError(
            f"{config.project}: there are no labels to train on ({_elsewhere(exported)}); add pairs of answers to other "
            "prompts (heedful label import), have them labelled, and run the command again"
        )
    counted = (to_json(numbers, indent=2) + "\n").encode()
    replace(exported, files={**exported.files, COUNTED: counted}).write(folder, None)


def _elsewhere(exported: Export) -> str:
    """The reasons why labels are not trained on."""
    beside = {EVAL: "about held-out prompts", "preferences.held-out.jsonl": "of people who label for evaluation only"}
    files = exported.manifest["files"]
    found = [f"{files[name]['records']} {what}" for name, what in beside.items() if name in files]
    return ", ".join([*found, *(f"{count} {what}" for what, count in exported.manifest["left_out"].items())]) or "none"


def _reward(config: RoundConfig, notes: RoundNotes, say: Say) -> Note:
    """Train the round's reward models, and write each candidate's score into PROJECT/scores.jsonl."""
    labels = notes.folder / "labels"
    runs = [reward_config(config, notes, labels, member) for member in range(config.reward_models)]
    summaries = [_finished_or_trained(train_reward, run, "reward") for run in runs]
    measured = [summary["last_evaluation"].get("eval/accuracy") for summary in summaries]
    accuracies = [value for value in measured if value is not None]
    accuracy = sum(accuracies) / len(accuracies) if accuracies else None
    models = [f"{run.output}/final" for run in runs]
    train_pairs, eval_pairs = _lines(labels / TRAIN), _lines(labels / EVAL)
    with Project.open(config.project, read_only=True) as project:
        items = project.items()
    options = RewardOptions(
        reward_combine="mean" if len(models) > 1 else "sum", trust_remote_code=config.trust_remote_code
    )
    scores = scores_of_items(load_judge([f"model:{model}" for model in models], options, config), items)
    write_rows(config.project / "scores.jsonl", [{"item": item, "scores": of} for item, of in scores.items()])
    if accuracy is None:
        found = "; no held-out labels to evaluate it"
    else:
        found = f", agrees with people on {accuracy:.0%} of {eval_pairs} held-out ones"
    say(f"reward model: trained on {counted(train_pairs, 'label')}{found}")
    return {"models": models, "train_pairs": train_pairs, "eval_pairs": eval_pairs, "accuracy": accuracy}


def _ppo(config: RoundConfig, notes: RoundNotes, _: Say) -> Note:
    settings = ppo_config(config, notes, [f"model:{model}" for model in notes.steps["reward"]["models"]])
    summary = _finished_or_trained(train_ppo, settings, "ppo")
    last = summary["last_evaluation"]
    return {
        "model": f"{settings.output}/final",
        "score_mean": last.get("eval/score_mean"),
        "kl": last.get("eval/kl"),
        "steps": summary["steps"],
    }


def _evaluate(config: RoundConfig, notes: RoundNotes, _: Say) -> Note:
    """Compare the round's policy with the one before, and under ``--judge`` also with the first, on held-out prompts."""
    policy = notes.steps["ppo"]["model"]
    models = [f"model:{model}" for model in notes.steps["reward"]["models"]]
    over_previous, samples = _win_rate(config, policy, notes.before, models)
    by_judge = by_judge_over_first = None
    if config.judge:
        by_judge, judged = _win_rate(config, policy, notes.before, config.judge)
        for row, same in zip(samples, judged, strict=True):  # one seed gives the same answers each time
            assert (row["prompt"], row["response"]) == (same["prompt"], same["response"])
            row |= {"judge": same["score"], "previous_judge": same["previous_score"]}
        by_judge_over_first = by_judge
        if notes.before != config.policy:
            by_judge_over_first = _win_rate(config, policy, config.policy, config.judge)[0]
    kl = evaluate_kl(KLConfig(model=policy, reference=config.policy, **_evaluation(config)))
    return {
        "over_previous": over_previous,
        "judge_over_previous": by_judge,
        "judge_over_first": by_judge_over_first,
        "kl": kl["kl"],
        "samples": samples,
    }


STAGES: tuple[tuple[str, Callable[[RoundConfig, RoundNotes, Say], Note | None]], ...] = (
    ("sample", _sample),
    ("label", _label),
    ("reward", _reward),
    ("ppo", _ppo),
    ("evaluate", _evaluate),
)
"""The steps of a round, in order (`heedful.label.rounds_page.STEPS`)."""


def reward_config(config: RoundConfig, notes: RoundNotes, labels: Path | None, member: int) -> RewardConfig:
    """Settings of one reward model: those of --reward-config, overridden by the round's.

    ``labels`` is None before labelling: then only the file is read.

    Raises ConfigError if the settings need held-out labels and there are none.
    """
    name = "reward" if config.reward_models == 1 else f"reward-{member + 1}"
    flags = [f"--model={config.policy}", f"--output={notes.folder / name}", *_machine(config)]
    if labels is None:
        return _read(RewardConfig, "reward", config.reward_config, [*flags, "--data=labels"])
    has_held_out = (labels / EVAL).is_file()
    flags += [f"--data={labels / TRAIN}", f"--eval-data={labels / EVAL}" if has_held_out else "--eval-fraction=0"]
    flags.append(f"--seed={(config.seed + 101 * notes.number + member) % 2**63}")
    settings = _read(RewardConfig, "reward", config.reward_config, flags)
    if settings.early_stopping_patience and not has_held_out:
        raise ConfigError(
            f"{config.reward_config}: early_stopping_patience counts evaluations on held-out labels, and none of the "
            f"{counted(_lines(labels / TRAIN), 'label')} so far belongs to a held-out prompt; remove it for this round, and "
            "run the command again"
        )
    return settings


def ppo_config(config: RoundConfig, notes: RoundNotes, rewards: Sequence[str]) -> PPOConfig:
    """Settings of the round's PPO: those of --ppo-config, overridden by the round's."""
    flags = [
        f"--model={config.policy if config.policy_from == 'first' else notes.before}",
        f"--reference={config.policy}",
        f"--data={config.prompts}",
        f"--eval-fraction={config.eval_fraction}",
        f"--max-new-tokens={config.max_new_tokens}",
        f"--output={notes.folder / 'ppo'}",
        f"--seed={(config.seed + 101 * notes.number) % 2**63}",
        *_machine(config),
        "--rewards",
        *rewards,
    ]
    chosen = [] if config.ppo_config is None else [one.key for one in read_keys(config.ppo_config, PPOConfig)]
    if len(rewards) > 1 and "reward_combine" not in chosen:
        flags.append("--reward-combine=mean")
    return _read(PPOConfig, "ppo", config.ppo_config, flags)


def _machine(config: RoundConfig) -> list[str]:
    trust = ["--trust-remote-code"] if config.trust_remote_code else []
    return [f"--device={config.device}", f"--dtype={config.dtype}", *trust]


def _read(config_class: type[C], name: str, file: Path | None, flags: Sequence[str]) -> C:
    """Settings read from a file and flags, as the command reads them."""
    return parse(config_class, [*([str(file)] if file else []), *flags], prog=f"heedful {name}")


def _finished_or_trained(train: Callable[[R], TrainingResult], settings: R, name: str) -> dict[str, Any]:
    done = finished(settings)
    if done is None:
        with naming_config(name):
            done = train(settings).summary
    return done


@contextlib.contextmanager
def naming_config(name: str) -> Iterator[None]:
    """Add the source of this stage's settings to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{error} (in a round, heedful {name} reads its settings from --{name}-config: change it and give it again)"
        ) from error


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def check_settings(config: RoundConfig, number: int, before: str) -> None:
    """Check the settings of PPO and evaluation of round ``number``, with placeholders for its reward models.

    Raises the errors of ``heedful reward``, ``heedful ppo`` and ``heedful evaluate win-rate`` before they start.
    """
    notes = RoundNotes(config.project / "rounds" / str(number), number, {}, before)
    reward_config(config, notes, None, 0)
    win_rate_config(config, config.policy, before, config.judge or ("rule:digits",))
    stand_ins = [f"rule:length:0-{length}" for length in range(1, config.reward_models + 1)]
    settings = ppo_config(config, notes, stand_ins)
    judges = dict.fromkeys((*settings.selection_rewards, *config.judge))  # a judge scores a few answers as a check
    settings = replace(
        settings,
        selection_rewards=tuple(one for one in judges if one not in stand_ins),
        critic="separate" if settings.critic == "reward" else settings.critic,  # a placeholder starts no critic
    )
    with naming_config("ppo"):
        check_space(settings, online.start(settings, ()).learner)


def check_pairs(config: RoundConfig, notes: RoundNotes, items: Sequence[Item]) -> None:
    """Check that a reward model can train on the pairs among items, for any labels.

    Raises the errors of ``heedful reward`` before it starts.
    """
    pairs = [one for one in items if one.task == "pair"]
    prompts = [
        Prompt(
            one.prompt if isinstance(one.prompt, str) else read_conversation("an item", "prompt", one.prompt), str(i)
        )
        for i, one in enumerate(pairs)
    ]
    parts = split_by_prompt(prompts, config.eval_fraction if config.ask_held_out else 0.0, may_be_one_sided=True)
    if not parts[0]:
        return  # reported by the round once there are labels
    with tempfile.TemporaryDirectory() as folder:
        for name, part in zip((TRAIN, EVAL), parts, strict=True):
            rows = []
            for item in (pairs[int(prompt.source)] for prompt in part):
                chosen, rejected = (candidate.response for candidate in item.candidates)
                rows.append({"prompt": item.prompt, "chosen": chosen, "rejected": rejected})
            if rows:
                write_rows(Path(folder, name), rows)
        settings = reward_config(config, notes, Path(folder), 0)
        with naming_config("reward"):
            check_space(settings, start_reward(settings)[0])


def _win_rate(config: RoundConfig, policy: str, baseline: str, rewards: Sequence[str]) -> tuple[Note, list[Note]]:
    """Win rate of a policy over another under rewards, and the first answers of both."""
    result = evaluate_win_rate(win_rate_config(config, policy, baseline, rewards))
    samples = [
        {
            "prompt": row["prompt"],
            "response": row["response"],
            "score": row["score"],
            "previous": row["baseline"],
            "previous_score": row["baseline score"],
        }
        for row in result["samples"]
    ]
    numbers = {name: result[name] for name in COMPARED}
    return numbers | {"verdict": verdict(numbers["interval_95"])}, samples


def win_rate_config(config: RoundConfig, policy: str, baseline: str, rewards: Sequence[str]) -> WinRateConfig:
    """Settings for comparing two policies."""
    return WinRateConfig(
        model=policy,
        baseline=baseline,
        rewards=tuple(rewards),
        reward_combine="mean" if len(rewards) > 1 else "sum",
        **_evaluation(config),
    )


def _evaluation(config: RoundConfig) -> dict[str, Any]:
    shared = {name: getattr(config, name) for name in SAMPLING}
    return {
        **shared,
        "data": config.prompts,
        "eval_fraction": config.eval_fraction,
        "num_samples": SHOWN,
        "seed": config.seed,
    }


def verdict(interval: Sequence[float] | None) -> Verdict:
    """Verdict from the 95 % interval of a win rate; two equal policies have one half.

    "not distinguishable" if the interval contains one half or is None (too few prompts).
    """
    if interval is None or not all(map(math.isfinite, interval)) or interval[0] <= EQUAL <= interval[1]:
        return "not distinguishable"
    return "better" if interval[0] > EQUAL else "worse"


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
    interval = numbers["interval_95"]
    within = "" if interval is None else f", 95 % interval {interval[0]:.1%} to {interval[1]:.1%}"
    wins = f"{numbers['win_rate']:.1%} of {numbers['prompts']}{within}; a tie counts one half"
    return f"{by}: {numbers['verdict']} (it wins {wins})"
