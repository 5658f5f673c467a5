"""The clinic: runs with diseases that are planted, and healthy twins. Which alarms speak, how early, and how often wrongly?

python benchmarks/clinic.py run runs/clinic [--half development] [--only dead-critic ppo ...]
python benchmarks/clinic.py doctor runs/clinic [--half held-out]
python benchmarks/clinic.py table runs/clinic [--half held-out] [--picture docs/clinic.png]

A world is that of ``heedful demo``: its fine-tuned model, its reward model, and a second reward model (another seed, half the
steps), the independent judge of ``--selection-rewards``. Worlds 0 and 1 and seeds 0 to 7 are for choosing thresholds
(development); worlds 2 and 3 and seeds 8 to 15 are for the numbers that are reported (held-out). A run has 40 steps of 64
responses. The gold judge, which knows the truth, scores every response of every step; no run sees its scores.

A disease is planted in this process alone: by settings, by a wrapper around the reward, or by a function in place of one of
heedful's. Every run is a line of OUTPUT/runs.jsonl as soon as it is done, with its metrics; what has its
line is not done again. ``doctor`` has ``heedful doctor`` examine each case in each world (OUTPUT/doctor.jsonl).
``table`` plays the metrics to the alarms as they are now: a threshold that changes needs no new run.
"""

import argparse
import contextlib
import copy
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import pad

from heedful.algorithms import ppo
from heedful.algorithms.online import loop, start
from heedful.algorithms.online.loop import alarms_of
from heedful.algorithms.online_dpo import train_online_dpo
from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps.demo.folder import make_beginning
from heedful.apps.demo.judge import gold_score
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.cli.doctor import examine
from heedful.configs.online import GRPOConfig, OnlineDPOConfig, PPOConfig, RolloutConfig
from heedful.configs.tools import DemoConfig
from heedful.core import share_interval
from heedful.data.chat import RewardInputs
from heedful.display import silence
from heedful.errors import HeedfulError
from heedful.files import to_json
from heedful.rewards.models import ModelReward, model_rewards
from heedful.training.alarm_rules import JUDGED, Limits
from heedful.training.alarms import ALARMS, Alarms, RaisedAlarm

Row = dict[str, Any]
STEPS, BATCH, EVAL_EVERY = 40, 64, 4
HALVES = {"development": (range(8), (0, 1)), "held-out": (range(8, 16), (2, 3))}
"""The seeds of each half, and its worlds."""
LOSS, SMOOTH = 0.1, 5
"""A disease has cost something if the gold judge's mean over the last so many steps is this much below that of the twin."""


# Worlds ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A demo's models and prompts."""

    folder: Path
    ppo: PPOConfig
    judge: str


def world(output: Path, number: int) -> World:
    """Make a world, unless it is there: about three minutes."""
    folder = output / f"world-{number}"
    config = DemoConfig(output=folder, seed=number, device="cpu")
    recipe = read_recipe(config, RECIPE)
    judge = replace(
        recipe.reward, output=folder / "judge", seed=1000 + number, max_steps=250, eval_every=250, resume="auto"
    )
    if not (folder / "demo.json").is_file():
        make_beginning(config, recipe.tiny).release()
    stages = ((recipe.sft, train_sft), (recipe.reward, train_reward), (judge, train_reward))
    for settings, train in stages:
        if not (settings.folder / "summary.json").is_file():
            train(settings)
    return World(folder, recipe.ppo, f"model:{judge.folder / 'final'}")


# Diseases ----------------------------------------------------------------------------------------------------------------

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A disease, or a healthy kind of run: how it differs from the twin."""

    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    plant: Plant = nullcontext
    kind: type[RolloutConfig] = PPOConfig
    rewards: Sequence[Callable[..., list[float]]] = ()


def wrong_sign() -> AbstractContextManager[Any]:
    real = ppo.estimate_advantages

    def wrong(*given: Any) -> Any:
        advantages, returns = real(*given)
        return -advantages, returns

    return patch.object(ppo, "estimate_advantages", wrong)


def end_masked() -> AbstractContextManager[Any]:
    """The policy's loss leaves out the last token of every response."""
    real = ppo.objective_loss

    def masked(new: Any, old: Any, advantages: Any, mask: Any, **options: Any) -> Any:
        return real(new, old, advantages, mask & pad(mask[:, 1:], (0, 1)), **options)

    return patch.object(ppo, "objective_loss", masked)


def reward_models(change: Callable[[ModelReward], None]) -> AbstractContextManager[Any]:
    """Something is done to the reward model, but not to the judge."""
    real = start.load_rewards

    def load(*given: Any, **machine: Any) -> Any:
        rewards = real(*given, **machine)
        for _, reward in model_rewards(rewards):
            change(reward)
        return rewards

    return patch.object(start, "load_rewards", load)


def take_end_for_padding(reward: ModelReward) -> None:
    """Padding is left out, so that the score is read before the end."""
    assert reward.inputs.renderer is not None
    reward.model.classifier.config.pad_token_id = reward.inputs.renderer.turn_end_id


RAW = (
    "{% for message in messages %}{{ 'User: ' if message['role'] == 'user' else 'Assistant: ' }}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


def read_raw_text(reward: ModelReward) -> None:
    """A conversation is rendered as text with names of roles, and not as the reward model has learned it."""
    tokenizer = copy.copy(reward.inputs.tokenizer)
    tokenizer.chat_template = RAW
    reward.inputs = RewardInputs(tokenizer, reward.inputs.reads)


def tied() -> AbstractContextManager[Any]:
    """The reward says of nearly all responses that they are fine."""
    real = start.load_rewards

    def load(*given: Any, **machine: Any) -> Any:
        rewards = real(*given, **machine)
        scored = [replace(one, function=coarse(one.function)) for one in rewards]
        return replace(rewards, rewards=tuple(scored))

    def coarse(function: Any) -> Any:
        return lambda **given: [float(score > -7.5) for score in function(**given)]

    return patch.object(start, "load_rewards", load)


def before_rollout(act: Callable[[Any], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Something is done to the learner while it samples."""
    real = loop.rollout

    def rollout(learner: Any, prompts: Any) -> Any:
        with act(learner):
            return real(learner, prompts)

    return patch.object(loop, "rollout", rollout)


def stale_sampler() -> AbstractContextManager[Any]:
    """Responses come from the weights of ten steps ago."""
    kept: deque[dict[str, torch.Tensor]] = deque(maxlen=11)

    @contextlib.contextmanager
    def older(learner: Any) -> Iterator[None]:
        weights = learner.policy.lm.state_dict()
        now = copy.deepcopy(weights)
        kept.append(now)
        learner.policy.lm.load_state_dict(kept[0])
        yield
        learner.policy.lm.load_state_dict(now)

    return before_rollout(older)


def moving_reference() -> AbstractContextManager[Any]:
    """The reference is given the policy's weights before each step."""

    @contextlib.contextmanager
    def copied(learner: Any) -> Iterator[None]:
        learner.reference.lm.load_state_dict(learner.policy.lm.state_dict(), strict=False)
        yield

    return before_rollout(copied)


def off_by_one() -> AbstractContextManager[Any]:
    """The mask of the responses begins and ends one token late: their first token is not in it, what follows them is."""
    real = ppo.make_experience

    def late(learner: Any, scored: Any) -> Any:
        batch = scored.responses.batch
        mask = pad(batch.response_mask[:, :-1], (1, 0))
        width = batch.ids.shape[1] - mask.shape[1]
        shifted = replace(batch, response_mask=mask, attention_mask=batch.attention_mask | pad(mask, (width, 0)))
        return real(learner, replace(scored, responses=replace(scored.responses, batch=shifted)))

    return patch.object(ppo, "make_experience", late)


def length_bonus(completions: Sequence[Any], **_: Any) -> list[float]:
    """A tenth of a point for each character."""
    return [0.1 * len(one if isinstance(one, str) else one[-1]["content"]) for one in completions]


GROUPED = {"samples_per_prompt": 8, "score_norm_samples": 0}
DISEASES = {
    "dead-critic": Case("the critic's learning rate is 1e-12", {"value_learning_rate": 1e-12}),
    "wrong-sign": Case("advantages have the wrong sign", plant=wrong_sign),
    "end-masked": Case("the end token is not learned", plant=end_masked),
    "read-early": Case("the reward model is read one token early", plant=lambda: reward_models(take_end_for_padding)),
    "no-template": Case("the reward model reads raw text", plant=lambda: reward_models(read_raw_text)),
    "length-hacked": Case("the reward pays 0.1 per character", {"score_norm_samples": 0}, rewards=(length_bonus,)),
    "kl-0": Case("no KL penalty", {"kl_coef": 0.0}),
    "rate-30": Case("30 times the learning rate", {"learning_rate": 9e-3}),
    "stale-sampler": Case("sampled by weights ten steps old", plant=stale_sampler),
    "off-by-one": Case("the mask is one token late", plant=off_by_one),
    "moving-reference": Case("the reference is the policy", plant=moving_reference),
    "tied": Case("a reward that is 1 for nearly all", GROUPED, tied, GRPOConfig),
}
HEALTHY = {
    "ppo": Case("the twin of the diseases"),
    "grpo": Case("GRPO, groups of 8", GROUPED, kind=GRPOConfig),
    "rloo": Case("RLOO", {**GROUPED, "advantage": "rloo", "kl_in": "reward", "kl_coef": 0.02}, kind=GRPOConfig),
    "lora": Case("LoRA of rank 8", {"lora_rank": 8, "learning_rate": 3e-3}),
    "separate": Case("a critic of its own", {"critic": "separate", "value_learning_rate": 1e-3}),
    "long": Case("up to 160 tokens, temperature 1", {"max_new_tokens": 160, "temperature": 1.0}),
    "online-dpo": Case("online DPO", {**GROUPED, "samples_per_prompt": 4}, kind=OnlineDPOConfig),
}
CASES = DISEASES | HEALTHY
TRAINERS = {PPOConfig: train_ppo, GRPOConfig: train_ppo, OnlineDPOConfig: train_online_dpo}


# Runs --------------------------------------------------------------------------------------------------------------------


def settings_of(case: Case, of: World, output: Path, seed: int) -> RolloutConfig:
    """Those of the demo's PPO, smaller."""
    demo = of.ppo
    shared: dict[str, Any] = {
        "model": demo.model, "data": demo.data, "output": output, "rewards": demo.rewards, "selection_rewards": (of.judge,),
        "steps": STEPS, "rollout_batch_size": BATCH, "minibatch_size": 16, "micro_batch_size": 16, "ppo_epochs": 1,
        "max_new_tokens": demo.max_new_tokens, "temperature": demo.temperature, "learning_rate": demo.learning_rate,
        "missing_eos_penalty": demo.missing_eos_penalty, "score_norm_samples": 128, "eval_fraction": demo.eval_fraction,
        "eval_every": EVAL_EVERY, "eval_prompts": 64, "sample_every": 0, "seed": seed, "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    if case.kind is PPOConfig:
        shared |= {
            "value_learning_rate": demo.value_learning_rate,
            "gae_lambda": demo.gae_lambda,
            "kl_coef": demo.kl_coef,
        }
    return case.kind(**shared | dict(case.changes))


def run_case(name: str, of: World, output: Path, seed: int) -> Row:
    """Run a case. Returns its line."""
    case, started = CASES[name], time.perf_counter()
    config = settings_of(case, of, output, seed)
    steps: list[Row] = []
    evaluations: list[Row] = []
    gold: list[float] = []
    real = loop.rollout

    def judged(learner: Any, prompts: Any) -> Any:
        scored = real(learner, prompts)
        said = [(c.prompt.columns, c.response, not c.truncated) for c in scored.completions]
        gold.append(fmean(gold_score(c["family"], c["answer"], text, ended) for c, text, ended in said))
        return scored

    ended = ""
    with patch.object(loop, "rollout", judged), case.plant(), silence():
        try:
            TRAINERS[case.kind](
                config,
                case.rewards,
                on_step=lambda _, found: steps.append(
                    {k: found[k] for k in found if not k.startswith(("time/", "perf/"))}
                ),
                on_evaluation=lambda step, found: evaluations.append({"step": step, **found}),
            )
        except HeedfulError as error:
            ended = f"{type(error).__name__}: {error}"
    shutil.rmtree(output, ignore_errors=True)
    return {
        "case": name, "seed": seed, "world": of.folder.name, "gold": gold, "steps": steps, "evaluations": evaluations,
        "limits": asdict(alarms_of(config).history.limits), "ended": ended, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """The lines of a file that are whole."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def add_row(path: Path, row: Row) -> None:
    """Append a line in one piece."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (to_json(row) + "\n").encode())
    os.close(file)


def run_all(options: argparse.Namespace) -> None:
    """All runs that have no line yet: for each seed every case, so that an early end leaves whole seeds."""
    done = {(row["case"], row["seed"]) for row in read_rows(options.output / "runs.jsonl")}
    for half in options.half or HALVES:
        seeds, worlds = HALVES[half]
        for seed in seeds[: options.seeds]:
            here = world(options.output, worlds[seed % len(worlds)])
            for name in options.only or CASES:
                if (name, seed) in done:
                    continue
                folder = options.output / "run"
                shutil.rmtree(folder, ignore_errors=True)
                row = run_case(name, here, folder, seed)
                add_row(options.output / "runs.jsonl", row)
                spoke = ", ".join(f"{one.alarm} {one.step}" for one in replay(row))
                print(f"{half} {name} {seed}: {row['seconds']:.0f} s, gold {row['gold'][-1]:.2f}, {spoke}", flush=True)


def examine_all(options: argparse.Namespace) -> None:
    """What the doctor finds of each case in each world, before the first step, with the first seed that the world has."""
    done = {(row["case"], row["world"]) for row in read_rows(options.output / "doctor.jsonl")}
    for half in options.half or HALVES:
        seeds, worlds = HALVES[half]
        for number in worlds:
            here = world(options.output, number)
            for name in options.only or CASES:
                if (name, here.folder.name) in done:
                    continue
                case = CASES[name]
                settings = settings_of(case, here, options.output / "run", seeds[number % len(worlds)])
                named = tuple(f"python:{Path(__file__).resolve()}:{function.__name__}" for function in case.rewards)
                with case.plant(), silence():
                    found = examine(replace(settings, rewards=(*settings.rewards, *named))).result
                row = {"case": name, "world": here.folder.name, "findings": [asdict(one) for one in found]}
                add_row(options.output / "doctor.jsonl", row)
                print(f"{here.folder.name} {name}: {', '.join(one.check for one in found)}", flush=True)


# The table ---------------------------------------------------------------------------------------------------------------


def replay(row: Row) -> list[RaisedAlarm]:
    """What the alarms say to the metrics of a run."""
    alarms = Alarms(Limits(**row["limits"]))
    evaluations = {one["step"]: {name: one[name] for name in JUDGED if name in one} for one in row["evaluations"]}
    alarms.see_evaluation(0, evaluations.get(0, {}))
    for step, metrics in enumerate(row["steps"], start=1):
        alarms.see(step, metrics)
        if step in evaluations:
            alarms.see_evaluation(step, evaluations[step])
    return alarms.raised


def smooth(values: Sequence[float]) -> list[float]:
    """Means of the last `SMOOTH` values at each place."""
    return [fmean(values[max(0, at + 1 - SMOOTH) : at + 1]) for at in range(len(values))]


def half_lost(ill: Sequence[float], twin: Sequence[float]) -> int | None:
    """The step from which on the gold judge is below the twin's by half of what it will be; None if that is below `LOSS`.

    Both runs have the same seed; each is smoothed.
    """
    gap = [healthy - here for healthy, here in zip(smooth(twin), smooth(ill), strict=False)]
    if gap[-1] < LOSS:
        return None
    return 2 + max((at for at, lost in enumerate(gap) if lost < gap[-1] / 2), default=-1)


def table(rows: Sequence[Row], examined: Sequence[Row] = ()) -> str:
    """Markdown: a line for each disease and for each healthy kind. ``examined`` is what the doctor found in these worlds."""
    lines = [
        "| disease | runs | detected | by (runs, median step) | gold at the end, twin's | lost | lead time | doctor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    healthy = {(row["case"], row["seed"]): row for row in rows if row["case"] in HEALTHY}
    for name, case in DISEASES.items():
        mine = [row for row in rows if row["case"] == name and (twin_of(case), row["seed"]) in healthy]
        if not mine:
            continue
        twins = [healthy[twin_of(case), row["seed"]] for row in mine]
        said = [replay(row) for row in mine]
        halves = [half_lost(row["gold"], twin["gold"]) for row, twin in zip(mine, twins, strict=True)]
        leads = [half - one[0].step for half, one in zip(halves, said, strict=True) if half is not None and one]
        lead = f"{round(median(leads))} ({min(leads)} to {max(leads)})" if leads else ""
        lines.append(
            f"| {name}: {case.what} | {len(mine)} | {sum(map(bool, said))} | {by_alarm(said)} | {end(mine)}, {end(twins)} | "
            f"{sum(half is not None for half in halves)} | {lead} | {by_doctor(name, examined)} |"
        )
    lines += [
        "",
        "| healthy runs | runs | with a false alarm | which | gold at the end | doctor |",
        "|---|---|---|---|---|---|",
    ]
    every: list[list[RaisedAlarm]] = []
    for name, case in HEALTHY.items():
        mine = [row for row in rows if row["case"] == name]
        said = [replay(row) for row in mine]
        every += said
        if mine:
            lines.append(
                f"| {name}: {case.what} | {len(mine)} | {sum(map(bool, said))} | {by_alarm(said)} | {end(mine)} | "
                f"{by_doctor(name, examined)} |"
            )
    wrong, number = sum(map(bool, every)), len(every)
    if number:
        low, high = share_interval([[float(bool(said))] for said in every])
        share = f"{wrong / number:.1%} (95 % interval {low:.1%} to {high:.1%})"
        lines.append(f"| all | {number} | {wrong}: {share} | {by_alarm(every)} | | |")
    lines += ["", "| alarm | spoke in | in healthy runs |", "|---|---|---|"]
    for alarm in ALARMS:
        of_alarm = {name: [steps_of(alarm, row) for row in rows if row["case"] == name] for name in CASES}
        ill = [spoke_in(name, of_alarm[name]) for name in DISEASES if any(of_alarm[name])]
        well = [steps for name in HEALTHY for steps in of_alarm[name]]
        lines.append(f"| {alarm} | {', '.join(ill)} | {sum(map(bool, well))} of {len(well)} |")
    return "\n".join(lines)


def twin_of(case: Case) -> str:
    """The healthy kind with the same settings."""
    return "grpo" if case.kind is GRPOConfig else "ppo"


def end(rows: Sequence[Row]) -> str:
    """The gold judge's mean over the last steps of some runs."""
    return f"{fmean(fmean(row['gold'][-SMOOTH:]) for row in rows):.2f}"


def steps_of(alarm: str, row: Row) -> list[int]:
    """The steps at which an alarm spoke in a run."""
    return [one.step for one in replay(row) if one.alarm == alarm]


def spoke_in(case: str, steps: Sequence[Sequence[int]]) -> str:
    """In how many runs of a case, and the median step of the first time."""
    first = [spoken[0] for spoken in steps if spoken]
    return f"{case} {len(first)} of {len(steps)} (step {median(first):.0f})"


def by_alarm(said: Sequence[Sequence[RaisedAlarm]]) -> str:
    """Each alarm with the number of runs in which it spoke, and the median step."""
    found = {name: [one.step for raised in said for one in raised if one.alarm == name] for name in ALARMS}
    parts = [f"{name} {len(steps)} ({median(steps):.0f})" for name, steps in found.items() if steps]
    return ", ".join(sorted(parts, key=lambda part: -int(part.split()[1])))


def by_doctor(case: str, examined: Sequence[Row]) -> str:
    """Each check of the doctor with the number of worlds in which it found something."""
    mine = [row for row in examined if row["case"] == case]
    found = Counter(check for row in mine for check in {one["check"] for one in row["findings"]})
    return ", ".join(f"{check} {number} of {len(mine)}" for check, number in found.most_common())


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each disease: the gold judge of its runs and of their twins, and a line at the first alarm of each."""
    from heedful.apps.plot.style import as_text, current_theme, picture, save

    theme = current_theme()
    page = picture(13, 8, layout="constrained")
    for panel, (name, case) in zip(page.subplots(3, 4, sharex=True, sharey=True).flat, DISEASES.items(), strict=True):
        for row in (row for row in rows if row["case"] in (name, twin_of(case))):
            is_ill, gold = row["case"] == name, smooth(row["gold"])
            panel.plot(
                range(1, len(gold) + 1),
                gold,
                color=theme.negative if is_ill else theme.muted,
                lw=1.2 if is_ill else 0.6,
            )
            if is_ill and (said := replay(row)):
                panel.plot([said[0].step], [gold[said[0].step - 1]], "o", color=theme.positive, ms=5)
        panel.set_title(f"{name}: {case.what}", fontsize=8)
        panel.grid(visible=True, alpha=0.2)
    page.supxlabel("step")
    page.supylabel("gold judge")
    as_text(page.findobj())
    save(page, path)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "doctor", "table"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--half", nargs="+", choices=HALVES, help="seeds; all if left out")
    parser.add_argument("--seeds", type=int, default=8, help="how many of each half")
    parser.add_argument("--only", nargs="+", choices=CASES, help="cases; all if left out")
    parser.add_argument("--picture", type=Path, help="where to draw the gold judge of each disease")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.command == "run":
        return run_all(options)
    if options.command == "doctor":
        return examine_all(options)
    halves = options.half or HALVES
    seeds = {seed for half in halves for seed in HALVES[half][0][: options.seeds]}
    rows = [row for row in read_rows(options.output / "runs.jsonl") if row["seed"] in seeds]
    worlds = {f"world-{number}" for half in halves for number in HALVES[half][1]}
    print(table(rows, [row for row in read_rows(options.output / "doctor.jsonl") if row["world"] in worlds]))
    if options.picture:
        draw(rows, options.picture)
    return None


if __name__ == "__main__":
    main()
