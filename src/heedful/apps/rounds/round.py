"""``heedful round``: sample, label, train a reward model and a policy, evaluate.

The steps are functions over commands that resume, so a round that was killed goes on where it was: sampled answers and
exported labels are complete or absent, a run continues from its last checkpoint, an item is never added twice.

PROJECT/rounds/N/round.json is written when the round begins and after each step. It holds

- ``round``: N; ``settings``: those of the round; ``before``: the policy that wrote its answers
- ``steps``, one object per finished step, in order; each has ``seconds``
  - ``sample``: ``prompts``, ``asked`` (pairs), ``random`` and ``active`` (how many of them), ``checkpoint``,
    ``items`` (their ids)
  - ``label``: ``labels``, ``pairs`` (labelled ones of this round), ``events`` (the number of the project's last event; undo
    does not reach labels up to it), ``statistics`` (`heedful.apps.label.statistics`, of this round); written first as
    PROJECT/rounds/N/labels/numbers.json, beside the labels that it counts
  - ``reward``: ``models`` (folders), ``train_pairs``, ``eval_pairs``, ``accuracy`` (mean of the models on held-out labels, or
    null)
  - ``ppo``: ``model`` (folder), ``score_mean`` (held out, by the reward models), ``kl``, ``steps``
  - ``evaluate``: ``over_previous`` (``win_rate``, ``interval_95``, ``verdict``: better, worse or not distinguishable,
    ``score_mean``, ``baseline_score_mean`` by this round's reward models), ``judge_over_previous`` and ``judge_over_first``
    (the same by ``--judge``, or null), ``kl`` (to the first policy), ``samples`` (ten prompts with the answers of the new and
    the previous policy, and their scores)
"""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from heedful.algorithms.online import start as online
from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import start as start_reward
from heedful.algorithms.reward_model import train_reward
from heedful.apps.label.exporting import ExportOptions, export
from heedful.apps.label.project import Project
from heedful.apps.label.records import Item, Snapshot
from heedful.apps.label.rounds_page import COUNTED, REMEDY, STEPS, last_round, read_notes
from heedful.apps.label.settings_file import read_settings
from heedful.apps.label.statistics import statistics
from heedful.apps.rounds.judging import load_judge, scores_of, scores_of_items
from heedful.apps.rounds.pairs import Pair, Row, choose, compared, disagreement, item_of, new_pairs
from heedful.apps.rounds.sample import sample_answers, write_rows
from heedful.configs.evaluate import KLConfig, WinRateConfig
from heedful.configs.offline import RewardConfig
from heedful.configs.online import PPOConfig
from heedful.configs.options import RunOptions
from heedful.configs.parse import parse, plain_value, read_keys
from heedful.configs.rounds import RoundConfig
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import flag
from heedful.configs.tools import SampleConfig
from heedful.data.messages import read_conversation
from heedful.data.splits import split_by_prompt
from heedful.display import counted
from heedful.errors import ConfigError, DataError
from heedful.evaluate.policies import evaluate_kl, evaluate_win_rate
from heedful.faults import hit
from heedful.files import read_object, to_json, write_json
from heedful.lock import FolderLock
from heedful.rewards import Ensemble
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
PER_INVOCATION = ("project", "enough", "device", "micro_batch_size")
"""Settings that may differ when a round is resumed."""
FILES = ("reward_config", "ppo_config")
"""Settings files that a flag may replace at any time; the new one stays for later rounds."""
FIXED = ("policy", "prompts", "eval_fraction", "max_new_tokens")
"""Settings fixed for all rounds of a project, so that rounds stay comparable."""
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
    steps: dict[str, Note] = field(default_factory=dict)

    @property
    def step(self) -> str | None:
        """The next step; None if all are done."""
        return next((name for name in STEPS if name not in self.steps), None)

    @property
    def policy(self) -> str:
        """The policy that the round trains."""
        return f"{self.folder}/ppo/final"

    @property
    def reward_models(self) -> list[str]:
        """The folders of the reward models that the round trains."""
        number = self.settings["reward_models"]
        names = ["reward"] if number == 1 else [f"reward-{member}" for member in range(1, number + 1)]
        return [f"{self.folder}/{name}/final" for name in names]

    def write(self) -> None:
        content = {"round": self.number, "settings": self.settings, "before": self.before, "steps": self.steps}
        write_json(self.folder / "round.json", content)


def run_round(config: RoundConfig, say: Say = print) -> RoundNotes:
    """Run the steps of the project's current round as far as possible, and return its notes.

    Without ``policy``, the settings are those of the last round, overridden by command-line flags and by values other than
    the default. The next round begins if the last one is finished. If the step ``label`` is not done on return, more labels
    are needed.

    Raises ConfigError for settings that differ from those of a begun round, and the errors of training and evaluation.
    """
    read_settings(config.project)  # raises if it is no project
    (config.project / "rounds").mkdir(exist_ok=True)
    with FolderLock(config.project / "rounds", refusal=BUSY):
        config, notes = _current(config)
        say(f"round {notes.number}: {'all steps are done' if notes.step is None else f'the next step is {notes.step}'}")
        while notes.step is not None:
            name, since = notes.step, time.perf_counter()
            numbers = STEP_FUNCTIONS[name](config, notes, say)
            if numbers is None:  # people have to label first
                return notes
            hit("round.step")
            notes.steps[name] = {**numbers, "seconds": round(time.perf_counter() - since, 2)}
            notes.write()
            hit("round.noted")
        say(_result(config, notes))
    return notes


# Settings ---------------------------------------------------------------------------------------------------------------


def _current(config: RoundConfig) -> tuple[RoundConfig, RoundNotes]:
    """Settings and notes of the current round; if it is finished, begin the next one. Raises ConfigError."""
    number, given = last_round(config.project), config.given
    if not number:
        if not config.policy:
            raise ConfigError("--policy and --prompts are missing: the project has no earlier round to take them from")
        return config, _begin(config, 1, config.policy)
    last = _read_round(_folder(config, number))
    if not config.policy:
        config = _with_settings_of(last, config)
    if last.step is None:
        _refuse_other(config, last, FIXED)
        return config, _begin(config, number + 1, last.policy)
    changed = {name: plain_value(getattr(config, name)) for name in FILES if name in given}
    _refuse_other(config, last, [one.name for one in fields(config) if one.name not in {*PER_INVOCATION, *changed}])
    if changed:
        if "label" not in last.steps:
            _check_settings(config, last)
        last.settings = {**last.settings, **changed}
        last.write()
    return config, last


def _begin(config: RoundConfig, number: int, before: str) -> RoundNotes:
    """The notes of a new round, once its settings are checked."""
    settings = {one.name: plain_value(getattr(config, one.name)) for one in fields(config) if one.name != "project"}
    notes = RoundNotes(_folder(config, number), number, settings, before)
    _check_settings(config, notes)
    notes.folder.mkdir(parents=True, exist_ok=True)
    notes.write()
    return notes


def _folder(config: RoundConfig, number: int) -> Path:
    return config.project / "rounds" / str(number)


def _read_round(folder: Path) -> RoundNotes:
    """The notes of a round that has begun. Raises DataError for a damaged file."""
    content = read_notes(folder)
    items = content["steps"].get("sample", {"items": []}).get("items")
    if not (isinstance(items, list) and all(isinstance(one, str) for one in items)):
        raise DataError(f"{folder / 'round.json'}: items of the step sample must be a list of strings; {REMEDY}")
    return RoundNotes(folder, int(folder.name), content["settings"], content["before"], content["steps"])


def _with_settings_of(last: RoundNotes, config: RoundConfig) -> RoundConfig:
    """Settings of the last round, overridden by this call's flags and by values other than the default."""
    try:
        before = RoundConfig(project=config.project, **last.settings)
    except (ConfigError, TypeError) as error:
        raise DataError(f"{last.folder / 'round.json'}: {str(error).removesuffix('.')}; {REMEDY}") from error
    called = {one.name: getattr(config, one.name) for one in fields(config) if one.name not in ("policy", "prompts")}
    defaults = {one.name: one.default for one in fields(config)}
    return replace(
        before, **{name: value for name, value in called.items() if name in config.given or value != defaults[name]}
    )


def _refuse_other(config: RoundConfig, last: RoundNotes, names: Iterable[str]) -> None:
    for name in names:
        now, then = plain_value(getattr(config, name)), last.settings.get(name)
        if now != then:
            raise ConfigError(
                f"{flag(name)} is {now!r}, but the project's rounds use {then!r}; use that, leave out --policy and "
                "--prompts to keep all settings, or make another project"
            )


def _check_settings(config: RoundConfig, notes: RoundNotes) -> None:
    """Read the settings of reward models, and start PPO with placeholders for them.

    Raises what would otherwise end the round after people have labelled.
    """
    _reward_config(config, notes, notes.folder / "labels", 0)
    stand_ins = [f"rule:length:0-{length}" for length in range(1, config.reward_models + 1)]
    settings = _ppo_config(config, notes, stand_ins)
    judges = dict.fromkeys((*settings.selection_rewards, *config.judge))  # a judge scores a few answers as a check
    settings = replace(
        settings,
        selection_rewards=tuple(one for one in judges if one not in stand_ins),
        critic="separate" if settings.critic == "reward" else settings.critic,  # a placeholder starts no critic
    )
    with _naming_file("ppo"):
        check_space(settings, online.start(settings, ()).learner)


# Steps ------------------------------------------------------------------------------------------------------------------


def _sample(config: RoundConfig, notes: RoundNotes, say: Say) -> Note:
    """Sample answers, select pairs to label, and add them to the project. Raises DataError if there are none."""
    with Project.open(config.project) as project:
        file = notes.folder / "answers.jsonl"
        if not file.exists():
            sample_answers(
                _shared(
                    SampleConfig,
                    config,
                    models=(notes.before,),
                    data=config.prompts,
                    output=file,
                    max_prompts=math.ceil(config.pool * config.labels),
                    eval_fraction=0.0 if config.ask_held_out else config.eval_fraction,
                    too_long="truncate",
                    seed=(config.seed + 7919 * notes.number) % 2**63,
                )
            )
            hit("round.sampled")
        others = (item for item in project.items() if item.round != notes.number or item.chosen_by == "import")
        earlier = set().union(*map(compared, others))
        try:
            rows: list[Row] = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
            pairs = [new_pairs(row, earlier) for row in rows]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, IsADirectoryError) as error:
            remedy = "restore it, or remove it to sample the round's answers again"
            raise DataError(f"{file} is damaged ({type(error).__name__}: {error}); {remedy}") from error
        values = _disagreements(config, notes, rows, pairs)
        seed, share = f"round {notes.number} {config.seed}", 1.0 if values is None else config.random_share
        chosen = choose(pairs, config.labels, seed, disagreements=values, random_share=share)
        if not chosen:
            raise DataError(
                f"{file}: no two answers to one prompt differ, so there is nothing to compare; raise --answers or "
                "--temperature"
            )
        items = [item_of(rows[choice.prompt], choice, notes.number) for choice in chosen]
        _check_pairs(config, notes, [*items, *project.items()])
        project.add_items(items)
    few = f", fewer than --labels {config.labels}; for more in the next round: a higher --pool, --answers or --temperature"
    say(f"{len(chosen)} pairs are ready to be labelled{few if len(chosen) < config.labels else ''}")
    by = [choice.chosen_by for choice in chosen]
    return {
        "prompts": len(rows),
        "asked": len(chosen),
        "random": by.count("random"),
        "active": by.count("active"),
        "checkpoint": notes.before,
        "items": [item.item_id for item in items],
    }


def _disagreements(
    config: RoundConfig, notes: RoundNotes, rows: Sequence[Row], pairs: Sequence[Sequence[Pair]]
) -> list[list[float]] | None:
    """The disagreement of the last round's reward models about each pair; None if all pairs are drawn at random."""
    if config.random_share == 1 or notes.number == 1:
        return None
    answered = [(row["prompt"], row["responses"], row) for row in rows]
    models = _read_round(_folder(config, notes.number - 1)).reward_models
    scores = [scores_of(_ensemble(config, [model]), answered) for model in models]
    return [
        [disagreement([of_model[at] for of_model in scores], pair) for pair in found] for at, found in enumerate(pairs)
    ]


def _check_pairs(config: RoundConfig, notes: RoundNotes, items: Sequence[Item]) -> None:
    """Start a reward model on the pairs among items, for any labels. Raises the errors of ``heedful reward``."""
    rows, prompts = [], list[Prompt]()
    for item in items:
        if item.task == "pair":
            chosen, rejected = (candidate.response for candidate in item.candidates)
            rows.append({"prompt": item.prompt, "chosen": chosen, "rejected": rejected})
            text = item.prompt if isinstance(item.prompt, str) else read_conversation("item", "prompt", item.prompt)
            prompts.append(Prompt(text, str(len(prompts))))
    parts = split_by_prompt(prompts, config.eval_fraction if config.ask_held_out else 0.0, may_be_one_sided=True)
    if not parts[0]:
        return  # said once there are labels
    with tempfile.TemporaryDirectory() as folder:
        for name, part in zip((TRAIN, EVAL), parts, strict=True):
            if part:
                write_rows(Path(folder, name), [rows[int(prompt.source)] for prompt in part])
        settings = _reward_config(config, notes, Path(folder), 0)
        with _naming_file("reward"):
            check_space(settings, start_reward(settings)[0])


def _label(config: RoundConfig, notes: RoundNotes, say: Say) -> Note | None:
    """Write the training labels of the reward models, once there are enough; None if more are needed.

    Later labels belong to the next round. Hidden repeats and labels of held-out and refused people do not count, because they
    are not trained on. Raises DataError if there is nothing to train on.
    """
    folder = notes.folder / "labels"
    if not folder.is_dir():
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
        found = {"labels": len(labels), "pairs": len(done), "events": len(now.events)}
        _write_labels(config, now, folder, {**found, "statistics": statistics(labels, now.people)})
    return read_object(folder / COUNTED, REMEDY, error=DataError)


def _write_labels(config: RoundConfig, now: Snapshot, folder: Path, numbers: Note) -> None:
    """Write the training files of the reward models and their counts. Raises DataError if there is nothing to train on."""
    fraction = config.eval_fraction if config.ask_held_out else 0.0
    exported = export(now, ExportOptions(eval_fraction=fraction, margin=config.margin))
    if TRAIN not in exported.files:
        beside = {
            EVAL: "about held-out prompts",
            "preferences.held-out.jsonl": "of people who label for evaluation only",
        }
        records, left_out = exported.manifest["files"], exported.manifest["left_out"]
        why = [f"{records[name]['records']} {what}" for name, what in beside.items() if name in records]
        why += [f"{count} {what}" for what, count in left_out.items()]
        raise DataError(
            f"{config.project}: there are no labels to train on ({', '.join(why) or 'none'}); add pairs of answers to other "
            "prompts (heedful label import), have them labelled, and run the command again"
        )
    numbers_file = {COUNTED: (to_json(numbers, indent=2) + "\n").encode()}
    replace(exported, files={**exported.files, **numbers_file}).write(folder, None)


def _reward(config: RoundConfig, notes: RoundNotes, say: Say) -> Note:
    """Train the round's reward models, and write each candidate's score into PROJECT/scores.jsonl."""
    labels = notes.folder / "labels"
    runs = [_reward_config(config, notes, labels, member) for member in range(config.reward_models)]
    train_pairs, eval_pairs = _lines(labels / TRAIN), _lines(labels / EVAL)
    if runs[0].early_stopping_patience and not eval_pairs:
        raise ConfigError(
            f"{config.reward_config}: early_stopping_patience counts evaluations on held-out labels, and none of the "
            f"{counted(train_pairs, 'label')} so far belongs to a held-out prompt; remove it for this round, and run the "
            "command again"
        )
    evaluations = [_trained(train_reward, run, "reward")["last_evaluation"] for run in runs]
    accuracies = [found["eval/accuracy"] for found in evaluations if found.get("eval/accuracy") is not None]
    accuracy = sum(accuracies) / len(accuracies) if accuracies else None
    with Project.open(config.project, read_only=True) as project:
        items = project.items()
    scores = scores_of_items(_ensemble(config, notes.reward_models), items)
    write_rows(config.project / "scores.jsonl", [{"item": item, "scores": of} for item, of in scores.items()])
    agrees = f", agrees with people on {accuracy:.0%} of {eval_pairs} held-out ones" if accuracy is not None else ""
    say(f"reward model: trained on {counted(train_pairs, 'label')}{agrees or '; no held-out labels to evaluate it'}")
    found = {"train_pairs": train_pairs, "eval_pairs": eval_pairs, "accuracy": accuracy}
    return {"models": notes.reward_models, **found}


def _ppo(config: RoundConfig, notes: RoundNotes, _: Say) -> Note:
    summary = _trained(train_ppo, _ppo_config(config, notes, [f"model:{one}" for one in notes.reward_models]), "ppo")
    last = summary["last_evaluation"]
    found = {"score_mean": last.get("eval/score_mean"), "kl": last.get("eval/kl"), "steps": summary["steps"]}
    return {"model": notes.policy, **found}


def _evaluate(config: RoundConfig, notes: RoundNotes, _: Say) -> Note:
    """Compare the round's policy with the one before, and under ``--judge`` also with the first, on held-out prompts."""
    over_previous, samples = _win_rate(config, notes, notes.before, [f"model:{one}" for one in notes.reward_models])
    by_judge = by_judge_over_first = None
    if config.judge:
        by_judge, judged = _win_rate(config, notes, notes.before, config.judge)
        for row, same in zip(samples, judged, strict=True):  # one seed gives the same answers each time
            assert (row["prompt"], row["response"]) == (same["prompt"], same["response"])
            row |= {"judge": same["score"], "previous_judge": same["previous_score"]}
        by_judge_over_first = by_judge
        if notes.before != config.policy:
            by_judge_over_first = _win_rate(config, notes, config.policy, config.judge)[0]
    kl = evaluate_kl(_shared(KLConfig, config, model=notes.policy, data=config.prompts, reference=config.policy))
    return {
        "over_previous": over_previous,
        "judge_over_previous": by_judge,
        "judge_over_first": by_judge_over_first,
        "kl": kl["kl"],
        "samples": samples,
    }


STEP_FUNCTIONS: Mapping[str, Callable[[RoundConfig, RoundNotes, Say], Note | None]] = dict(
    zip(STEPS, (_sample, _label, _reward, _ppo, _evaluate), strict=True)
)


# The commands of the steps ----------------------------------------------------------------------------------------------


def _shared(config_class: type[C], config: RoundConfig, **settings: Any) -> C:
    """A command's settings; what ``settings`` does not name and the round has, is the round's."""
    known = {one.name: getattr(config, one.name) for one in fields(config_class) if hasattr(config, one.name)}  # type: ignore[arg-type]
    return config_class(**(known | settings))


def _reward_config(config: RoundConfig, notes: RoundNotes, labels: Path, member: int) -> RewardConfig:
    """Settings of one reward model: those of --reward-config, overridden by the round's."""
    output = Path(notes.reward_models[member]).parent
    flags = [f"--model={config.policy}", f"--output={output}", f"--data={labels / TRAIN}"]
    flags.append(f"--eval-data={labels / EVAL}" if (labels / EVAL).is_file() else "--eval-fraction=0")
    return _parsed(RewardConfig, config, "reward", flags, seed=config.seed + 101 * notes.number + member)


def _ppo_config(config: RoundConfig, notes: RoundNotes, rewards: Sequence[str]) -> PPOConfig:
    """Settings of the round's PPO: those of --ppo-config, overridden by the round's."""
    flags = [
        f"--model={config.policy if config.policy_from == 'first' else notes.before}",
        f"--reference={config.policy}",
        f"--data={config.prompts}",
        f"--eval-fraction={config.eval_fraction}",
        f"--max-new-tokens={config.max_new_tokens}",
        f"--output={notes.folder / 'ppo'}",
        "--rewards",
        *rewards,
    ]
    chosen = [] if config.ppo_config is None else [one.key for one in read_keys(config.ppo_config, PPOConfig)]
    if len(rewards) > 1 and "reward_combine" not in chosen:
        flags.append("--reward-combine=mean")
    return _parsed(PPOConfig, config, "ppo", flags, seed=config.seed + 101 * notes.number)


def _parsed(config_class: type[C], config: RoundConfig, name: str, flags: Sequence[str], *, seed: int) -> C:
    """Settings as the command reads them: those of its file, overridden by flags and by the round's machine."""
    file = getattr(config, f"{name}_config")
    own = [f"--device={config.device}", f"--dtype={config.dtype}", f"--seed={seed % 2**63}"]
    own += ["--trust-remote-code"] if config.trust_remote_code else []
    return parse(config_class, [*([str(file)] if file else []), *own, *flags], prog=f"heedful {name}")


def _trained(train: Callable[[R], TrainingResult], settings: R, name: str) -> dict[str, Any]:
    """The summary of a run, which is trained or resumed unless it is finished."""
    with _naming_file(name):
        return finished(settings) or train(settings).summary


@contextlib.contextmanager
def _naming_file(name: str) -> Iterator[None]:
    """Add the source of a command's settings to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{error} (in a round, heedful {name} reads its settings from --{name}-config: change it and give it again)"
        ) from error


def _ensemble(config: RoundConfig, models: Sequence[str]) -> Ensemble:
    """Reward models whose mean scores an answer."""
    combine: Literal["mean", "sum"] = "mean" if len(models) > 1 else "sum"
    options = RewardOptions(reward_combine=combine, trust_remote_code=config.trust_remote_code)
    return load_judge([f"model:{model}" for model in models], options, config)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


# The result -------------------------------------------------------------------------------------------------------------


def _win_rate(config: RoundConfig, notes: RoundNotes, baseline: str, rewards: Sequence[str]) -> tuple[Note, list[Note]]:
    """Win rate of the round's policy over another under rewards, and the first answers of both."""
    result = evaluate_win_rate(
        _shared(
            WinRateConfig,
            config,
            model=notes.policy,
            baseline=baseline,
            data=config.prompts,
            rewards=tuple(rewards),
            reward_combine="mean" if len(rewards) > 1 else "sum",
            num_samples=SHOWN,
        )
    )
    names = {"score": "score", "previous": "baseline", "previous_score": "baseline score"}
    samples = [
        {"prompt": row["prompt"], "response": row["response"], **{name: row[of] for name, of in names.items()}}
        for row in result["samples"]
    ]
    numbers = {name: result[name] for name in COMPARED}
    return numbers | {"verdict": verdict(numbers["interval_95"])}, samples


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
