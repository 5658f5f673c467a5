"""Train a critic before the policy moves: on the returns of the policy as it starts, which nothing else changes.

    o ~ pi(. | q)                        responses of the fixed policy              rollout
    G_t = sum_{k >= t} gamma^(k-t) r_k   Monte Carlo returns                        core.rewards_to_go
    L = 1/N sum_t 1/2 (V_t - G_t)^2      the value loss, without a clip             core.value_loss

A critic that starts from a language model with a new head says 0 of everything, and one that starts from a reward model is
wrong about every unfinished answer: the first advantages are noise, and with lambda below 1 they teach the critic its own
errors (Yuan et al. 2025, VC-PPO, section 3.2; Yue et al. 2025, VAPO, section 4.1). The run ends when the values come no
nearer to held-out returns. ``final/`` is the critic, for ``--critic separate --value-model``.
"""

import time
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.advantages import Rewards, action_mask, action_rewards
from heedful.algorithms.online.experience import Experience, finite_rows
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.loop import run_online
from heedful.algorithms.online.metrics import experience_metrics, without_undefined
from heedful.algorithms.online.recorder import Learned, Recorder
from heedful.algorithms.online.rollout import ScoredBatch, shape_scores
from heedful.algorithms.online.values import learn_values
from heedful.configs.online import CriticConfig
from heedful.data.loading import EncodedPrompt
from heedful.data.splits import prompt_key
from heedful.devices import upload
from heedful.engines.responses import Responses
from heedful.faults import hit
from heedful.rewards import score_tokens
from heedful.rewards.resolve import AnyRewards
from heedful.rewards.scoring import Scores
from heedful.training.from_python import Objects, check_kind, spill_to_files
from heedful.training.metric_sums import read
from heedful.training.optimization import step_metrics
from heedful.training.result import TrainingResult
from heedful.training.verdict import Yardstick

SHOWN = {
    "reward/score_mean": "score",
    "loss/value": "loss",
    "value/explained_variance": "explained",
    "value/explained_variance_first": "at first",
}
"""Metrics of the progress bar, with their labels."""
GROUP = 4
"""Responses to each held-out prompt: the others' mean is the baseline without a critic."""


def train_critic(config: CriticConfig, rewards: AnyRewards = (), **objects: Unpack[Objects]) -> TrainingResult:
    """Train a critic on the returns of a fixed policy and write a run folder; ``final/`` is a value model.

    Args:
        config: the settings.
        rewards: added to the config's: functions, `Reward` objects or strings.
        objects: ``model``, ``tokenizer``, ``data``, ``eval_data`` in memory; callbacks (`Objects`).

    Raises ConfigError, DataError, CheckpointError before anything is written; RewardError, TrainingError during training.
    """
    check_kind(config, CriticConfig)
    with spill_to_files(config, CriticConfig, **objects) as (settings, callbacks):
        return run_online(
            settings,
            rewards,
            callbacks,
            make_experience=make_experience,
            learn=learn,
            shown=SHOWN,
            evaluate=Evaluation(),
            yardstick=yardstick,
        )


def make_experience(learner: Learner[CriticConfig], scored: ScoredBatch) -> Experience:
    """From scored responses to the critic's values and their targets, the Monte Carlo returns, ``[B, T]``. No gradient."""
    cfg, batch, mask, started = learner.config, scored.batch, scored.batch.response_mask, time.perf_counter()
    rewards = rewards_of(learner, scored.responses, scored.reward_scores, scored.shaped)
    per_token = action_rewards(rewards, cfg)
    returns = core.rewards_to_go(per_token, action_mask(mask, cfg), gamma=cfg.gamma)
    assert rewards.values is not None
    return Experience(
        batch=batch,
        rows=upload(torch.arange(len(mask)), mask.device),
        old_logprobs=None,
        ref_logprobs=None,
        rewards=per_token,
        advantages=returns - rewards.values,
        old_values=rewards.values,
        returns=returns,
        kl=torch.zeros_like(scored.shaped),
        kl_coef=0.0,
        entropy_coef=0.0,
        completions=scored.completions,
        scores=scored.scores,
        metrics=experience_metrics(scored, None, None, rewards, config=cfg, started=started),
        sampled_tokens=scored.sampled.sampled_tokens,
        states=None,
        sampler_logprobs=scored.responses.logprobs,
        drawn_logprobs=scored.responses.drawn_logprobs,
        is_finite=finite_rows(per_token, rewards.values),
        temperature=cfg.temperature,
    )


def rewards_of(learner: Learner[CriticConfig], responses: Responses, scores: Scores, shaped: Tensor) -> Rewards:
    """Rewards per token, without a penalty, as the policy is its own reference; and what the critic says before each."""
    mask, nothing = responses.mask, torch.zeros_like(responses.logprobs)
    placed = core.spread_scores(shaped, scores.tokens, mask, std=learner.score_norm.std)
    return Rewards(
        per_token=core.kl_shaped_rewards(placed, nothing, nothing, mask, kl_coef=0.0),
        per_response=shaped,
        values=learner.critic_values(responses.batch),
        response_mask=mask,
        prompts=[completion.prompt for completion in responses.completions],
    )


def learn(learner: Learner[CriticConfig], experience: Experience) -> Learned:
    """The critic's epochs on a rollout batch; the policy stays."""
    hit("pass")
    learning_rate, recorder = learner.schedule.advance(), Recorder(learner, experience.kl)
    metrics, steps = learn_values(learner, experience)
    learner.non_finite_guard.count(steps)
    metrics = experience.metrics | metrics | step_metrics([step.norm for step in steps])
    metrics["optimizer/learning_rate"] = learning_rate
    return recorder.end(metrics, experience.mask.sum(), experience.sampled_tokens)


def yardstick(config: CriticConfig, held_out: Sequence[EncodedPrompt]) -> Yardstick | None:
    """The squared error of a held-out response's values, by which the run is judged; None if nothing is held out."""
    prompts = [prompt_key(one.prompt.prompt) for one in held_out[: config.eval_prompts] for _ in range(GROUP)]
    return Yardstick("eval/value_error", higher_is_better=False, prompts=prompts) if prompts else None


class Evaluation:
    """What the critic knows of the returns of `GROUP` responses to each held-out prompt, drawn and scored once, as the policy
    stays.

    ``eval/explained_variance`` of all tokens (`core.explained_variance`), ``_first`` of the first ones, ``_prompt`` if the
    first one's value stood at all; ``_group``: if the mean return of the prompt's other responses did, which needs no
    critic. ``eval/value_error``: mean squared error per response; ``eval/value_bias``: mean return minus value.
    """

    def __init__(self) -> None:
        self._known: tuple[Responses, Scores] | None = None

    def __call__(
        self,
        learner: Learner[CriticConfig],
        held_out: Sequence[EncodedPrompt],
        shares: list[tuple[float, float]] | None = None,
    ) -> dict[str, float]:
        """``shares`` gets the `yardstick` of each response. Empty if nothing is held out. Raises RewardError."""
        if not held_out:
            return {}
        self._known = self._known or _asked(learner, held_out)
        (responses, given), config = self._known, learner.config
        scores, mask = given.without_failed(), action_mask(responses.mask, config)
        totals = torch.tensor(scores.totals, device=mask.device)
        rewards = rewards_of(learner, responses, scores, shape_scores(totals, responses, learner.score_norm, config))
        returns, values = core.rewards_to_go(action_rewards(rewards, config), mask, gamma=config.gamma), rewards.values
        assert values is not None
        errors = torch.where(mask, (returns - values).square(), 0.0).sum(dim=1) / mask.sum(dim=1)
        if shares is not None:
            found = dict(zip(given.scored, errors.tolist(), strict=True))
            shares += [(found[place], 1.0) if place in found else (0.0, 0.0) for place in range(len(given.totals))]
        first = core.first_in_mask(mask)
        metrics = {
            "eval/explained_variance": core.explained_variance(values, returns, mask),
            "eval/explained_variance_first": core.explained_variance(values, returns, first),
            "eval/explained_variance_prompt": core.explained_variance(core.first_values(values, mask), returns, mask),
            "eval/value_error": errors.mean(),
            "eval/value_bias": core.masked_mean(returns - values, mask),
            "eval/score_mean": totals.mean(),
        }
        if given.failed:
            metrics["eval/failed_frac"] = torch.tensor(len(given.failed) / len(given.totals))
        else:
            whole = torch.where(first, returns, 0.0).sum(dim=1)
            of_group = core.others_mean(whole, group_size=GROUP).unsqueeze(1).expand_as(returns)
            metrics["eval/explained_variance_group"] = core.explained_variance(of_group, returns, mask)
        return without_undefined(read(metrics))


def _asked(learner: Learner[CriticConfig], held_out: Sequence[EncodedPrompt]) -> tuple[Responses, Scores]:
    """The responses that have a score, and the scores of all."""
    config, generator = learner.config, torch.Generator().manual_seed(learner.config.seed + 1)
    asked = [one for one in held_out[: config.eval_prompts] for _ in range(GROUP)]
    responses = learner.sampler.generate(learner.policy, asked, generator)
    given = score_tokens(learner.rewards, responses.completions)
    return responses.select(given.scored) if given.failed else responses, given
