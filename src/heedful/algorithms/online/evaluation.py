"""Evaluation of a policy in training on held-out prompts, and rows of the sample table."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.average import averaged
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.rollout import ScoredBatch, shape_scores
from heedful.configs.online import RolloutConfig
from heedful.data.chat import plain_text
from heedful.data.loading import EncodedPrompt
from heedful.data.splits import prompt_key
from heedful.rewards import score_tokens
from heedful.training.verdict import Yardstick


def yardstick(config: RolloutConfig, held_out: Sequence[EncodedPrompt]) -> Yardstick | None:
    """The score by which a run is judged: the judge's, if there is one. None if nothing is held out."""
    if not held_out:
        return None
    prompts = [prompt_key(one.prompt.prompt) for one in held_out[: config.eval_prompts]]
    metric = "eval/judge_mean" if config.selection_rewards else "eval/score_mean"
    return Yardstick(metric, higher_is_better=True, prompts=prompts)


def evaluate(
    learner: Learner[RolloutConfig], held_out: Sequence[EncodedPrompt], shares: list[tuple[float, float]] | None = None
) -> dict[str, float]:
    """Mean score, objective, KL (with a reference), length, and share of responses with an end token.

        objective = mean + std (mean of shaped scores - kl_price * KL)

    is the training objective in score units: scores are shaped as in training (`shape_scores`), where they were
    shifted by mean and divided by std. Judges' mean scores are measured too. Responses on which a reward fails are left
    out and counted.

    ``shares`` gets the `yardstick` of each response. Evaluates the averaged weights, if there is an average. Random
    numbers are the same at each evaluation. Empty if nothing is held out. Raises RewardError.
    """
    if not held_out:
        return {}
    config = learner.config
    generator = torch.Generator().manual_seed(config.seed + 1)
    with averaged(learner.average):
        responses = learner.sampler.generate(learner.policy, held_out[: config.eval_prompts], generator)
        completions = responses.completions
        given = score_tokens(learner.rewards, completions)
        if given.failed:
            responses = responses.select(given.scored)
        scores = given.without_failed().totals
        models = [] if learner.reference is None else [learner.policy, learner.reference]
        logprobs = [learner.token_outputs(model, responses.batch).logprobs for model in models]
    kl = float(core.kl_estimate(*logprobs, kind="k1").sum(dim=1).mean()) if logprobs else None
    judged: dict[str, float] = {}
    judged_by: dict[str, float] = {}
    if learner.judges:
        verdicts = score_tokens(learner.judges, completions)
        judged_by = verdicts.measured
        judged["eval/judge_mean"] = sum(verdicts.without_failed().totals) / len(verdicts.scored)
        if verdicts.failed:
            judged["eval/judge_failed_frac"] = len(verdicts.failed) / len(completions)
    if shares is not None:
        measured = verdicts if learner.judges else given
        shares += [(0.0, 0.0) if math.isnan(total) else (total, 1.0) for total in measured.totals]
    norm = learner.score_norm
    shaped = shape_scores(torch.tensor(scores, device=responses.truncated.device), responses, norm, config)
    return {
        "eval/score_mean": sum(scores) / len(scores),
        "eval/objective": norm.mean + norm.std * (float(shaped.mean()) - config.kl_price * (kl or 0.0)),
        **judged,
        **({} if kl is None else {"eval/kl": kl}),
        **({"eval/failed_frac": len(given.failed) / len(completions)} if given.failed else {}),
        **{f"eval/{name}": value for name, value in given.measured.items() if not name.startswith("time/")},
        **{f"eval/selection/{name}": value for name, value in judged_by.items() if not name.startswith("time/")},
        "eval/response_length": float(responses.lengths.float().mean()),
        "eval/eos_frac": 1 - float(responses.truncated.float().mean()),
    }


def sample_rows(scored: ScoredBatch, kl: Tensor, config: RolloutConfig) -> list[dict[str, Any]]:
    """Rows of the sample table: the first scored response to each of the first prompts of a rollout batch."""
    row_of = {id(completion): row for row, completion in enumerate(scored.completions)}
    firsts: dict[int, int] = {}
    for place, completion in enumerate(scored.sampled.completions):
        if id(completion) in row_of:
            firsts.setdefault(place // config.samples_per_prompt, row_of[id(completion)])
    return [
        {
            "prompt": plain_text(scored.completions[row].prompt.prompt),
            "response": scored.completions[row].response,
            "score": scored.scores[row],
            **({"kl": float(kl[row])} if config.needs_reference else {}),
        }
        for row in list(firsts.values())[: config.num_samples]
    ]
