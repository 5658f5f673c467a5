"""The middle and the end of a round: reward models from all labels so far, a policy that follows them, and how it compares.

`check_settings` and `check_pairs` try what the later steps of a round need before people label for it: the steps begin with
stand-ins for what is not there yet.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from heedful.configs.evaluate import KLConfig, WinRateConfig
from heedful.configs.offline import RewardConfig
from heedful.configs.online import PPOConfig
from heedful.configs.parse import parse, read_yaml_flags
from heedful.configs.rounds import RoundConfig
from heedful.data.messages import read_conversation
from heedful.data.splits import split_by_prompt
from heedful.errors import ConfigError, DataError
from heedful.evaluate.policies import evaluate_kl, evaluate_win_rate
from heedful.files import to_json
from heedful.label.exporting import Export, ExportOptions, export_project
from heedful.label.project import Project
from heedful.label.records import Item
from heedful.label.rounds_page import COUNTED
from heedful.rounds.asking import SHARED
from heedful.rounds.notes import Note, RoundNotes, folder_of
from heedful.train.checkpoints import check_space
from heedful.train.online import start as online
from heedful.train.online.engine import train_ppo
from heedful.train.output_folder import finished
from heedful.train.reward import start as start_reward
from heedful.train.reward import train_reward
from heedful.types import Prompt, Text

C = TypeVar("C")
COMPARED = ("win_rate", "interval_95", "ties", "score_mean", "baseline_score_mean", "prompts")
EQUAL = 0.5
Verdict = Literal["better", "worse", "not distinguishable"]
SHOWN = 10
"""Prompts whose answers are kept."""
TRAIN, EVAL = "preferences.train.jsonl", "preferences.eval.jsonl"


def write_labels(config: RoundConfig, project: Project, notes: RoundNotes, numbers: Note) -> Path:
    """Write the files that reward models learn from, once per round: what is labelled later belongs to the next one.

    Args:
        config: the round's settings.
        project: with the labels.
        notes: of the round.
        numbers: of the step, kept beside the labels that they count.

    Raises DataError if there is nothing to train on.
    """
    folder = notes.folder / "labels"
    if not folder.is_dir():
        fraction = config.eval_fraction if config.ask_held_out else 0.0
        exported = export_project(project, ExportOptions(eval_fraction=fraction, margin=config.margin))
        if TRAIN not in exported.files:
            raise DataError(
                f"{config.project}: no label is left to train on ({_elsewhere(exported)}); add pairs of answers to other "
                "prompts (heedful label import), have them labelled, and go on"
            )
        counted = (to_json(numbers, indent=2) + "\n").encode()
        replace(exported, files={**exported.files, COUNTED: counted}).write(folder, None)
    return folder


def _elsewhere(exported: Export) -> str:
    """Where the labels are that are not trained on."""
    beside = {EVAL: "about held-out prompts", "preferences.held-out.jsonl": "of people who label for evaluation only"}
    files = exported.manifest["files"]
    found = [f"{files[name]['records']} {what}" for name, what in beside.items() if name in files]
    return ", ".join([*found, *(f"{count} {what}" for what, count in exported.manifest["left_out"].items())]) or "none"


def train_reward_models(config: RoundConfig, notes: RoundNotes, labels: Path) -> Note:
    """Train the round's reward models, or go on with them. Returns what notes.py says, without ``content_hash``."""
    measured = []
    configs = [reward_config(config, notes, labels, member) for member in range(config.reward_models)]
    for of_member in configs:
        summary = finished(of_member) or _trained(train_reward, of_member, "reward")
        measured.append(summary["last_evaluation"].get("eval/accuracy"))
    known = [value for value in measured if value is not None]
    return {
        "models": [f"{one.output}/final" for one in configs],
        "train_pairs": _lines(labels / TRAIN),
        "eval_pairs": _lines(labels / EVAL),
        "accuracy": sum(known) / len(known) if known else None,
    }


def _trained(train: Callable[[C], dict[str, Any]], settings: C, name: str) -> dict[str, Any]:
    with naming_config(name):
        return train(settings)


@contextlib.contextmanager
def naming_config(name: str) -> Iterator[None]:
    """Have a ConfigError say where this stage of a round has its settings from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{error} (here heedful {name} reads its settings from --{name}-config, which you may change and give again)"
        ) from error


def reward_config(config: RoundConfig, notes: RoundNotes, labels: Path | None, member: int) -> RewardConfig:
    """The settings of one of the round's reward models: those of --reward-config, with the round's in front of them.

    ``labels`` is None as long as there are none: then only the file is read.

    Raises ConfigError if they need held-out labels and there are none.
    """
    if labels is None:
        flags = [f"--model={config.policy}", "--data=labels", f"--output={notes.folder / 'reward'}", *_machine(config)]
        return _read(RewardConfig, "reward", config.reward_config, flags)
    held_out = labels / EVAL
    data = [f"--data={labels / TRAIN}", f"--eval-data={held_out}" if held_out.is_file() else "--eval-fraction=0"]
    name = "reward" if config.reward_models == 1 else f"reward-{member + 1}"
    seed = (config.seed + 101 * notes.number + member) % 2**63
    settings = _read(
        RewardConfig,
        "reward",
        config.reward_config,
        [f"--model={config.policy}", *data, f"--output={notes.folder / name}", f"--seed={seed}", *_machine(config)],
    )
    if settings.patience and not held_out.is_file():
        raise ConfigError(
            f"{config.reward_config}: patience counts evaluations on held-out labels, and none of the "
            f"{_lines(labels / TRAIN)} labels so far is about a held-out prompt; take it out for this round, and go on"
        )
    return settings


def train_policy(config: RoundConfig, notes: RoundNotes, models: Sequence[str]) -> Note:
    """Run PPO against the round's reward models, or go on with it. Returns what notes.py says."""
    settings = ppo_config(config, notes, models)
    summary = finished(settings) or _trained(train_ppo, settings, "ppo")
    last = summary["last_evaluation"]
    return {
        "model": f"{settings.output}/final",
        "score_mean": last.get("eval/score_mean"),
        "kl": last.get("eval/kl"),
        "steps": summary["steps"],
    }


def ppo_config(config: RoundConfig, notes: RoundNotes, models: Sequence[str], *, are_models: bool = True) -> PPOConfig:
    """The settings of the round's PPO: those of --ppo-config, with the round's in front of them.

    ``models`` are reward models; not ``are_models``: other rewards in their place, so a critic cannot start from them.
    """
    start = config.policy if config.policy_from == "first" else notes.before
    flags = [
        f"--model={start}",
        f"--reference={config.policy}",
        f"--data={config.prompts}",
        f"--eval-fraction={config.eval_fraction}",
        f"--max-new-tokens={config.max_new_tokens}",
        f"--output={notes.folder / 'ppo'}",
        f"--seed={(config.seed + 101 * notes.number) % 2**63}",
        *_machine(config),
        "--rewards",
        *(f"model:{model}" if are_models else model for model in models),
    ]
    chosen = [] if config.ppo_config is None else [one.key for one in read_yaml_flags(config.ppo_config, PPOConfig)]
    if len(models) > 1 and "reward_combine" not in chosen:
        flags.append("--reward-combine=mean")
    settings = _read(PPOConfig, "ppo", config.ppo_config, flags)
    return replace(settings, critic="separate") if settings.critic == "reward" and not are_models else settings


def _machine(config: RoundConfig) -> list[str]:
    trust = ["--trust-remote-code"] if config.trust_remote_code else []
    return [f"--device={config.device}", f"--dtype={config.dtype}", *trust]


def _read(config_class: type[C], name: str, file: Path | None, flags: Sequence[str]) -> C:
    """Settings as the command would read them from a file and flags."""
    return parse(config_class, [*([str(file)] if file else []), *flags], prog=f"heedful {name}")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def evaluate(config: RoundConfig, before: str, policy: str, models: Sequence[str]) -> Note:
    """Compare a round's policy with others on held-out prompts. Returns what notes.py says.

    Args:
        config: the round's settings.
        before: the policy of the round before.
        policy: the round's.
        models: its reward models.
    """
    learned = [f"model:{model}" for model in models]
    over_previous, samples = _win_rate(config, policy, before, learned)
    judged: dict[str, Note | None] = {"judge_over_previous": None, "judge_over_first": None}
    if config.judge:
        judged["judge_over_previous"], by_judge = _win_rate(config, policy, before, config.judge)
        samples = [_with_judge(*pair) for pair in zip(samples, by_judge, strict=True)]
        judged["judge_over_first"] = (
            judged["judge_over_previous"]
            if before == config.policy
            else _win_rate(config, policy, config.policy, config.judge)[0]
        )
    kl = evaluate_kl(KLConfig(model=policy, reference=config.policy, **_evaluation(config)))
    return {"over_previous": over_previous, **judged, "kl": kl["kl"], "samples": samples}


def _win_rate(
    config: RoundConfig, policy: str, baseline: str, rewards: Sequence[str]
) -> tuple[Note, list[dict[str, Any]]]:
    """A policy against another under rewards: the numbers, and the first answers of both."""
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
    """The settings with which a round compares two policies."""
    return WinRateConfig(
        model=policy,
        baseline=baseline,
        rewards=tuple(rewards),
        reward_combine="mean" if len(rewards) > 1 else "sum",
        **_evaluation(config),
    )


def verdict(interval: Sequence[float] | None) -> Verdict:
    """What the 95 % interval of a win rate says; one half is what two equal policies have.

    None (too few prompts for an interval) says nothing, as does one with one half in it or at its end.
    """
    if interval is None or not all(map(math.isfinite, interval)) or interval[0] <= EQUAL <= interval[1]:
        return "not distinguishable"
    return "better" if interval[0] > EQUAL else "worse"


def _with_judge(row: dict[str, Any], judged: dict[str, Any]) -> dict[str, Any]:
    """The same answers with the judge's scores: one seed gives the same answers each time."""
    assert (row["prompt"], row["response"]) == (judged["prompt"], judged["response"])
    return row | {"judge": judged["score"], "previous_judge": judged["previous_score"]}


def _evaluation(config: RoundConfig) -> dict[str, Any]:
    shared = {name: getattr(config, name) for name in SHARED}
    return {
        **shared,
        "data": config.prompts,
        "eval_fraction": config.eval_fraction,
        "num_samples": SHOWN,
        "seed": config.seed,
    }


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
    prompts = [Prompt(_text(one.prompt), str(place)) for place, one in enumerate(pairs)]
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


def _text(prompt: Any) -> Text:
    return prompt if isinstance(prompt, str) else read_conversation("an item", "prompt", prompt)


def _as_preference(item: Item) -> dict[str, Any]:
    chosen, rejected = (one.response for one in item.candidates)
    return {"prompt": item.prompt, "chosen": chosen, "rejected": rejected}
