"""The training loop of online algorithms: sample, score, learn, log; periodically evaluate and save."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from heedful.algorithms.online.evaluation import evaluate as evaluate_policy
from heedful.algorithms.online.evaluation import sample_rows
from heedful.algorithms.online.evaluation import yardstick as yardstick_of_policy
from heedful.algorithms.online.experience import TokenNumbers
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.recorder import Learned
from heedful.algorithms.online.rollout import ScoredBatch, rollout
from heedful.algorithms.online.rollout_files import forget_rollouts, write_rollouts
from heedful.algorithms.online.start import start
from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.data.loading import EncodedPrompt
from heedful.rewards.resolve import AnyRewards
from heedful.training.alarms import Alarms, Limits
from heedful.training.callbacks import Callbacks
from heedful.training.compilation import compile_layers
from heedful.training.result import TrainingResult
from heedful.training.run import Run
from heedful.training.verdict import Yardstick


class HasTokenNumbers(Protocol):
    """What an update learns from."""

    def token_numbers(self) -> dict[str, TokenNumbers]:
        """What it knows of each token, by the columns of ``rollouts/``."""


C = TypeVar("C", bound=RolloutConfig)
E = TypeVar("E", bound=HasTokenNumbers)


def run_online(
    config: C,
    rewards: AnyRewards,
    callbacks: Callbacks,
    *,
    make_experience: Callable[[Learner[C], ScoredBatch], E],
    learn: Callable[[Learner[C], E], Learned],
    shown: Mapping[str, str],
    evaluate: Callable[
        [Learner[C], Sequence[EncodedPrompt], list[tuple[float, float]]], dict[str, float]
    ] = evaluate_policy,
    yardstick: Callable[[C, Sequence[EncodedPrompt]], Yardstick | None] = yardstick_of_policy,
) -> TrainingResult:
    """Optimise a policy on its own responses and write a run folder.

    Args:
        config: the settings.
        rewards: added to the config's.
        callbacks: the user's functions.
        make_experience: makes the update's data from scored responses.
        learn: takes one or more optimizer steps on it.
        shown: metrics of the progress bar, with their labels.
        evaluate: measures the model on held-out prompts, and what each adds to the yardstick.
        yardstick: what the run is judged by at its end.

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    config, learner, held_out, about = start(config, rewards)
    compile_layers(config, learner.trained)
    with (
        contextlib.closing(learner),
        Run(
            config,
            learner,
            config.algorithm,
            config.steps,
            objective=config.best_metric,
            higher_is_better=config.trains_policy,
            shown=shown,
            yardstick=yardstick(config, held_out),
            callbacks=callbacks,
            alarms=alarms_of(config, len(held_out)),
            **about,
        ) as run,
    ):
        forget_rollouts(config, after=run.done)
        for step in run.steps():
            if run.needs_update(step):
                scored = rollout(learner, next(learner.prompts))
                experience = make_experience(learner, scored)
                with run.update():
                    metrics, kl, token_numbers = learn(learner, experience)
                    write_rollouts(config, step, scored, kl, experience.token_numbers() | token_numbers)
                    run.log(step, metrics, note=scored.reward_scores.note)
                    if run.samples_due(step):
                        run.show_samples(step, sample_rows(scored, kl, config))
                    learner.non_finite_guard.check()
                del experience  # its states are gone before the next responses are sampled
            if run.evaluation_due(step):
                shares: list[tuple[float, float]] = []
                run.evaluate(step, evaluate(learner, held_out, shares), shares)
        run.summary["score_norm"] = learner.score_norm.state_dict()
    return TrainingResult(run.path, run.summary, config)


def alarms_of(config: RolloutConfig, held_out: int = 0) -> Alarms:
    """A run's alarms, with what its settings and the number of held-out prompts say that they compare metrics with."""
    chooses_end = config.response_length == "stop" and config.max_new_tokens > 1
    limits = Limits(
        steps=config.steps,
        learning_rate=config.learning_rate,
        max_new_tokens=config.max_new_tokens if chooses_end else None,
        max_kl=config.max_kl,
        async_steps=config.async_steps if isinstance(config, OnlineConfig) else 0,
        filters_on_servers=config.filters_on_servers,
        responses=config.rollout_batch_size,
        groups=config.rollout_batch_size // (config.samples_per_prompt if config.compares == "prompt" else 1),
        held_out=min(held_out, config.eval_prompts),
    )
    return Alarms(limits, config.stop_on)
