"""The runs of ``heedful choose``: PPO and GRPO with equal settings, until both have sampled equally many tokens.

OUTPUT holds, each complete or absent, so that the same command goes on where it ended:

- ``settings.json``: the settings; other ones are refused, but for more ``seeds``
- ``start.json``: what `measure` finds of the model that all runs start from, and the number of prompts to train on
- ``ppo-0/``, ``grpo-0/``, ``ppo-1/``, ...: runs as of ``heedful ppo`` and ``heedful grpo``, and ``ppo-0.json``, ...: what
  `measure` finds of each
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from heedful.algorithms.online.evaluation import evaluate
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import train_grpo, train_ppo
from heedful.apps.choose.gradient import noise
from heedful.checks.findings import LoadedRun
from heedful.checks.preflight import refuse_unfit
from heedful.configs.choose import ChooseConfig
from heedful.configs.online import GRPOConfig, OnlineConfig, PPOConfig
from heedful.configs.parse import to_plain
from heedful.configs.settings import flag, types_of
from heedful.data.loading import EncodedPrompt
from heedful.data.splits import prompt_key
from heedful.display import counted, say, silence
from heedful.errors import ConfigError
from heedful.files import read_object, write_json
from heedful.lock import FolderLock
from heedful.training.callbacks import STOP, Stop
from heedful.training.output_folder import check_folder, finished_before, logged
from heedful.training.provenance import differences
from heedful.training.verdict import FEWEST

Method = Literal["ppo", "grpo"]
NAMES: dict[Method, str] = {"ppo": "PPO", "grpo": "GRPO"}
MARK = "heedful choose"
OWN = ("output", "json", "seed", "samples_per_prompt", "critic", "value_model")
"""Settings that are not passed on to both."""
PER_INVOCATION = ("output", "json", "seeds")
MOST_STEPS = 1_000_000
"""Of a run; its tokens end it."""
LOOKS = 4
"""Rollout batches of the starting model in which all groups must tie before a run is refused."""
OTHERS = "choose another folder"
Found = dict[str, Any]


def run_all(config: ChooseConfig) -> Iterator[tuple[Method, int, Path]]:
    """Train and measure what has not been, and yield each run's method, seed and folder.

    Raises ConfigError, DataError, CheckpointError and RewardError before anything is written, and the errors of training.
    """
    _check_output(config)
    for method in NAMES:
        run_settings(
            config, method, config.seed, prompts=config.rollout_batch_size
        )  # refuses what does not fit together
    folder = config.output
    found = read_object(folder / "start.json", OTHERS) if (folder / "start.json").exists() else look(config)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        write_json(folder / "settings.json", {"made by": MARK, "settings": _settings(config)})
        write_json(folder / "start.json", found)
        budget = None if config.minutes else config.budget
        for number in range(2 * config.seeds):
            method, seed = list(NAMES)[number % 2], config.seed + number // 2
            run = run_settings(config, method, seed, prompts=found["prompts"])
            name = f"{NAMES[method]}, seed {seed} (run {number + 1} of {2 * config.seeds})"
            if finished_before(run) is None:
                say(f"{name} begins")
                train: Callable[..., object] = {"ppo": train_ppo, "grpo": train_grpo}[method]
                with silence():
                    train(run, on_step=_until(run.folder, budget, config))
                tokens, seconds = spent(run.folder)
                say(f"{name}: {tokens:,} tokens in {seconds:.0f} s")
            path = run.folder.with_suffix(".json")
            if not path.exists():
                with silence():
                    write_json(path, measure(final(run), config))
            budget = budget or spent(run.folder)[0]
            yield method, seed, run.folder


def run_settings(config: ChooseConfig, method: Method, seed: int, *, prompts: int) -> OnlineConfig:
    """The settings of a run: both methods have those that `ChooseConfig` shares with them, else their own defaults.

    PPO draws one response per prompt, or as few as the number of ``prompts`` to train on allows. Raises ConfigError.
    """
    kind = PPOConfig if method == "ppo" else GRPOConfig
    shared = {
        name: getattr(config, name) for name in types_of(ChooseConfig) if name in types_of(kind) and name not in OWN
    }
    each = config.samples_per_prompt
    critic: dict[str, Any] = {}
    if method == "ppo":
        size = config.rollout_batch_size
        each = next((n for n in range(1, size + 1) if size % n == 0 and size // n <= prompts), size)
        critic = {"critic": config.critic, "value_model": config.value_model}
    return kind(
        **shared,
        **critic,
        samples_per_prompt=each,
        seed=seed,
        output=config.output / f"{method}-{seed}",
        steps=MOST_STEPS,
        lr_schedule="constant",
        eval_every=0,
        sample_every=0,
    )


def _until(folder: Path, tokens: int | None, config: ChooseConfig) -> Callable[[int, dict[str, float]], Stop | None]:
    """Ends a run once its log has this many tokens; without a number, its share of the minutes."""

    def on_step(_step: int, _metrics: dict[str, float]) -> Stop | None:
        sampled, seconds = spent(folder)
        if tokens is None:
            assert config.minutes is not None
            return STOP if seconds >= 60 * config.minutes / (2 * config.seeds) else None
        return STOP if sampled >= tokens else None

    return on_step


def spent(folder: Path) -> tuple[int, float]:
    """Tokens that a run has sampled, and seconds that its steps took."""
    steps = [line for line in logged(folder) if "time/update" in line]
    tokens = sum(line["perf/rollout_tokens_per_second"] * line["time/rollout"] for line in steps)
    return round(tokens), sum(line[f"time/{phase}"] for line in steps for phase in ("rollout", "score", "update"))


# What is measured of a model --------------------------------------------------------------------------------------------


def look(config: ChooseConfig) -> Found:
    """`measure` the model that all runs start from, after checks that need models and data.

    Raises ConfigError if too little is held out, if a step needs more prompts than there are, or if all groups of responses
    tie; else as a run would.
    """
    with _started(run_settings(config, "grpo", config.seed, prompts=1), refuse_unfit) as (learner, held_out):
        few = len({prompt_key(one.prompt.prompt) for one in held_out[: config.eval_prompts]})
        if few < FEWEST:
            raise ConfigError(
                f"{counted(few, 'prompt')} held out: the interval of fewer than {FEWEST} is too short to compare by; raise "
                "--eval-fraction (of the data) or --eval-prompts, or give --eval-data"
            )
        say("looking at the model that all runs start from")
        found = _scores(learner, held_out, config)
        _refuse_ties(learner, config)
        return {"prompts": len(learner.prompts.prompts), **found}


def _refuse_ties(learner: Learner[Any], config: ChooseConfig) -> None:
    """Raise ConfigError if the scores of all groups tie: then nothing can be learned within the budget."""
    seen: list[float] = []
    for _ in range(LOOKS):
        scored = rollout(learner, next(learner.prompts))
        groups = scored.shaped.view(-1, config.samples_per_prompt)
        if (groups != groups[:, :1]).any():
            return
        seen += scored.scores
    prompts = counted(len(seen) // config.samples_per_prompt, "prompt")
    raise ConfigError(
        f"the reward ties always: the {config.samples_per_prompt} responses to a prompt scored the same for each of "
        f"{prompts}, from {min(seen):g} to {max(seen):g}, so neither PPO nor GRPO would learn what is better. Start from a "
        "model that is sometimes right (heedful sft), or give a reward that says which of two is better; heedful doctor grpo "
        "looks closer"
    )


def final(run: OnlineConfig) -> OnlineConfig:
    """The settings of a run with the model that it left."""
    model = f"{run.folder}/final"
    changes: dict[str, Any] = {"model": model}
    if run.needs_reference:
        changes["reference"] = run.reference or run.model
    if run.critic == "separate":
        changes["value_model"] = f"{model}/value_model"
    return replace(run, **changes)


def measure(run: OnlineConfig, config: ChooseConfig) -> Found:
    """Scores of the held-out responses of ``run.model``, with the same random numbers for every model; its KL to the
    reference; and how noisy the run's estimate of its gradient is there (`noise`)."""
    with _started(replace(run, seed=config.seed), lambda _: None) as (learner, held_out):
        return {**_scores(learner, held_out, config), "noise": noise(learner)}


@contextlib.contextmanager
def _started(
    run: OnlineConfig, examine: Callable[[LoadedRun], None]
) -> Iterator[tuple[Learner[OnlineConfig], list[EncodedPrompt]]]:
    """A run ready for its first step, which is not written anywhere."""
    with tempfile.TemporaryDirectory(prefix="heedful-choose-") as folder:
        started = start(replace(run, output=Path(folder) / "run"), (), examine=examine)
        with contextlib.closing(started.learner):
            yield started.learner, started.held_out


def _scores(learner: Learner[OnlineConfig], held_out: list[EncodedPrompt], config: ChooseConfig) -> Found:
    """The score of each response to the held-out prompts, None where a reward failed, and each one's number of the prompt."""
    asked = [one for one in held_out[: config.eval_prompts] for _ in range(config.eval_samples)]
    shares: list[tuple[float, float]] = []
    learner.config = replace(learner.config, eval_prompts=len(asked))
    metrics = evaluate(learner, asked, shares)
    numbers: dict[str, int] = {}
    return {
        "held_out": [numbers.setdefault(prompt_key(one.prompt.prompt), len(numbers)) for one in asked],
        "scores": [score if count else None for score, count in shares],
        "kl": metrics.get("eval/kl"),
        "length": metrics["eval/response_length"],
    }


# The folder ---------------------------------------------------------------------------------------------------------------


def _settings(config: ChooseConfig) -> Found:
    return to_plain(config, leave_out=PER_INVOCATION, without_secrets=True)


def _check_output(config: ChooseConfig) -> None:
    """Raise ConfigError for a folder of something else, or of other settings."""
    folder = config.output
    check_folder(folder)
    if not folder.exists() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    if not (folder / "settings.json").exists():
        raise ConfigError(f"--output {folder} has files that are not from {MARK}; {OTHERS}")
    saved = read_object(folder / "settings.json", OTHERS, needs=["settings"], error=ConfigError)["settings"]
    changed = differences(saved, _settings(config))
    if changed:
        listing = "\n".join(f"  {flag(name)}: {old!r} there, {new!r} now" for name, (old, new) in changed.items())
        raise ConfigError(
            f"--output {folder} has runs with other settings:\n{listing}\nUse the same (only --seeds may change), or {OTHERS}"
        )


def mean(values: list[float]) -> float | None:
    """None without values."""
    return math.fsum(values) / len(values) if values else None
