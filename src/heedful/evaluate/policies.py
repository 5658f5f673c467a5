"""Measure a policy: scores, win rate against another policy, best-of-n, pass@k, KL to a reference, perplexity."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heedful import core
from heedful.configs.evaluate import (
    BestOfNConfig,
    KLConfig,
    PassAtKConfig,
    PerplexityConfig,
    ScoresConfig,
    WinRateConfig,
)
from heedful.core.best_of_n import best_row, expected_best, kl_bound
from heedful.core.intervals import mean_interval, share_interval
from heedful.data.batches import collate, in_micro_batches
from heedful.data.chat import Renderer
from heedful.data.fitting import Refusal, added, check_dropped, max_length, settle
from heedful.data.learned import ask
from heedful.data.loading import encode_demonstrations, read_to_learn
from heedful.engines.teacher_forced import token_outputs
from heedful.errors import ConfigError, DataError
from heedful.evaluate.measuring import (
    answer,
    by_prompt,
    counted,
    held_out,
    left_out,
    load_frozen,
    load_functions,
    prompts_of,
    sample,
    shown_rows,
    without_failed,
)
from heedful.models.shape import check_rows, context_length
from heedful.models.source import resolve
from heedful.models.tokenizer import check_companion, load_chat_tokenizer, load_tokenizer
from heedful.rewards import Completion, Reward, score_tokens
from heedful.rewards.judge import JudgeReward
from heedful.rewards.resolve import AnyRewards, listed
from heedful.rewards.scoring import Scores
from heedful.types import Prompt


def evaluate_scores(config: ScoresConfig, rewards: AnyRewards = ()) -> dict[str, Any]:
    """Measure the mean score of a policy's responses with its 95 % interval, their length, and the share with an end token.

    Args:
        config: the settings of the measurement.
        rewards: rewards besides those of ``config``: functions, `Reward` objects or strings, or one of them.

    Raises ConfigError, DataError, CheckpointError and RewardError.
    """
    functions, _ = load_functions(config, rewards)
    prompts, counts = prompts_of(config, [config.model], functions)
    answered = answer(config, config.model, prompts)
    given = score_tokens(functions, answered.completions)
    rows, failed = without_failed([given], len(given.totals))
    kept, scores = answered.select(rows), [given.totals[row] for row in rows]
    return {
        "score_mean": sum(scores) / len(scores),
        "interval_95": mean_interval(by_prompt(scores, kept.prompts)),
        **kept.shape(),
        **counted(prompts, answered.completions, counts, failed),
        "samples": [
            sample(answered.completions[row], score=given.totals[row])
            for row in shown_rows(prompts, config)
            if row in rows
        ],
    }


def evaluate_best_of_n(config: BestOfNConfig, rewards: AnyRewards = (), judge: AnyRewards = ()) -> dict[str, Any]:
    """Measure the mean score of the best of n responses to each prompt, with its 95 % interval over prompts.

    Of equally good responses, the first counts as the best. If a reward or judge fails on one of the n, the prompt's choice
    is left out and counted. The result also has

    - the mean score over all responses: the plain model's score;
    - both means under the judge, if there is one;
    - the win rate of the best response against the first, by the judge (without one, by the rewards); ties count one half;
    - an upper bound on the KL to the plain model;
    - the table ``best_of``: the expected score of the best of k responses, for every k up to n.

    Args:
        config: the settings of the measurement.
        rewards: rewards besides those of ``config``, which choose the best: functions, `Reward` objects or strings, or one
            of them.
        judge: judges besides those of ``config``, in the same forms.

    Raises ConfigError, DataError, CheckpointError and RewardError.
    """
    functions, judges = load_functions(config, rewards, [*config.judge, *listed(judge)])
    prompts, counts = prompts_of(config, [config.model], [*functions, *judges])
    answered = answer(config, config.model, prompts, best_of=config.n)
    given = [score_tokens(rewards, answered.completions) for rewards in (functions, judges) if rewards]
    kept, failed = without_failed(given, len(answered.completions) // config.n, each=config.n)
    rows = [choice * config.n + i for choice in kept for i in range(config.n)]
    answered = answered.select(rows)
    scores, *judgements = ([of_all.totals[row] for row in rows] for of_all in given)
    judged = judgements[0] if judgements else None
    firsts = range(0, len(scores), config.n)
    best = [first + best_row(scores[first : first + config.n]) for first in firsts]
    decisive = scores if judged is None else judged
    wins = [_win(decisive[row], decisive[first]) for row, first in zip(best, firsts, strict=True)]
    chosen = answered.select(best)
    table = best_of_table(scores, judged, chosen.prompts, config.n)
    plain, of_n = table[0], table[-1]
    under_judge = {}
    if judged is not None:
        under_judge = {
            "judge_score_mean": of_n["judge_score"],
            "judge_interval_95": of_n["judge_interval_95"],
            "plain_judge_score_mean": plain["judge_score"],
        }
    return {
        "score_mean": of_n["score"],
        "interval_95": of_n["interval_95"],
        "plain_score_mean": plain["score"],
        **under_judge,
        "win_rate": sum(wins) / len(wins),
        "win_interval_95": share_interval(by_prompt(wins, chosen.prompts)),
        "ties": wins.count(0.5),
        "kl_bound": kl_bound(config.n),
        **chosen.shape(),
        **counted(prompts, answered.completions, counts, failed),
        "best_of": table,
        "samples": [
            sample(answered.completions[row], score=scores[row])
            | ({"judge score": judged[row]} if judged is not None else {})
            for row in (best[kept.index(choice)] for choice in shown_rows(prompts, config) if choice in kept)
        ],
    }


def evaluate_pass_at_k(config: PassAtKConfig, rewards: AnyRewards = ()) -> dict[str, Any]:
    """Measure pass@k for each k of ``config``, with its 95 % interval over prompts, and the share of correct responses.

    Every k is estimated without bias from the ``samples_per_prompt`` responses to a prompt (`heedful.core.pass_at_k`). A
    prompt is left out and counted if a reward failed on one of its responses.

    Args:
        config: the settings of the measurement.
        rewards: rewards besides those of ``config``, summed with them; a response is correct from ``correct_from`` on.

    Raises ConfigError, DataError, CheckpointError and RewardError.
    """
    functions, _ = load_functions(config, rewards)
    prompts, counts = prompts_of(config, [config.model], functions)
    answered = answer(config, config.model, prompts)
    given, n = score_tokens(functions, answered.completions), config.samples_per_prompt
    measured, failed = without_failed([given], len(prompts), each=n)
    kept = [prompt * n + i for prompt in measured for i in range(n)]
    correct = [sum(given.totals[prompt * n + i] >= config.correct_from for i in range(n)) for prompt in measured]
    found: dict[str, Any] = {}
    for k in config.k:
        passed = [core.pass_at_k(n, right, k) for right in correct]
        found[f"pass_at_{k}"] = sum(passed) / len(passed)
        found[f"interval_95_at_{k}"] = share_interval(by_prompt(passed, [prompts[i] for i in measured]))
    return {
        **found,
        "correct_frac": sum(correct) / len(kept),
        **answered.select(kept).shape(),
        **counted(prompts, answered.completions, counts, failed),
        "samples": [
            sample(answered.completions[row], score=given.totals[row])
            | {f"correct of {n}": correct[measured.index(row // n)]}
            for row in shown_rows(prompts, config)
            if row // n in measured
        ],
    }


def evaluate_win_rate(config: WinRateConfig, rewards: AnyRewards = ()) -> dict[str, Any]:
    """Measure a policy's win rate: how often its response scores higher than the baseline's, with its 95 % interval.

    A tie counts one half. Both models answer the same prompts, each through its own tokenizer and chat template. If there are
    several responses per prompt, the policy's j-th is compared with the baseline's j-th.

    Args:
        config: the settings of the measurement.
        rewards: rewards besides those of ``config``: functions, `Reward` objects or strings, or one of them.

    Raises ConfigError, DataError, CheckpointError and RewardError.
    """
    functions, _ = load_functions(config, rewards)
    prompts, counts = prompts_of(config, [config.model, config.baseline], functions)
    ours, theirs = (answer(config, name, prompts).completions for name in (config.model, config.baseline))
    given = _score_pairs(functions, ours, theirs)
    our_scores, their_scores = (of_all.totals for of_all in given)
    rows, failed = without_failed(given, len(ours))
    wins = [_win(our_scores[row], their_scores[row]) for row in rows]
    return {
        "win_rate": sum(wins) / len(wins),
        "interval_95": share_interval(by_prompt(wins, [ours[row].prompt for row in rows])),
        "ties": wins.count(0.5),
        "score_mean": sum(our_scores[row] for row in rows) / len(wins),
        "baseline_score_mean": sum(their_scores[row] for row in rows) / len(wins),
        **counted(prompts, ours, counts, failed),
        "samples": [
            sample(ours[row], score=our_scores[row])
            | {"baseline": theirs[row].response, "baseline score": their_scores[row]}
            for row in shown_rows(prompts, config)
            if row in rows
        ],
    }


def evaluate_kl(config: KLConfig) -> dict[str, Any]:
    """Measure ``KL(policy || reference)`` in nats per response, with its 95 % interval over prompts.

    It is estimated on responses sampled from the policy, by k1 summed over tokens. ``kl_per_token`` is in nats per token.

    Raises ConfigError if top-k or top-p is set, DataError, and CheckpointError, also if the two models have different
    tokenizers.
    """
    if config.top_k or config.top_p < 1:
        raise ConfigError("--top-k and --top-p must be left out here: filtered responses do not estimate the KL")
    source = resolve(config.model, config)
    check_companion("--reference", config.reference, source, load_tokenizer(source), longest=0, options=config)
    prompts, counts = prompts_of(config, [config.model, config.reference])
    answered = answer(config, config.model, prompts)
    reference = load_frozen(resolve(config.reference, config), config)
    logprobs, ref_logprobs = (
        token_outputs(
            model, answered.responses.batch, temperature=config.temperature, micro_batch=config.micro_batch
        ).logprobs
        for model in (answered.policy, reference)
    )
    per_response = core.kl_estimate(logprobs, ref_logprobs, kind="k1").sum(dim=1).tolist()
    return {
        "kl": sum(per_response) / len(per_response),
        "interval_95": mean_interval(by_prompt(per_response, answered.prompts)),
        "kl_per_token": sum(per_response) / int(answered.responses.lengths.sum()),
        **answered.shape(),
        **counted(prompts, answered.completions, counts),
        "samples": [sample(answered.completions[row], kl=per_response[row]) for row in shown_rows(prompts, config)],
    }


def evaluate_perplexity(config: PerplexityConfig) -> dict[str, Any]:
    """Measure perplexity: ``exp`` of the mean negative log-probability per token, on text (in pieces) or demonstrations.

    ``loss`` is that mean, in nats per token. Raises DataError and CheckpointError.
    """
    source = resolve(config.model, config)
    renderer = Renderer(load_chat_tokenizer(source, config), config.special_tokens)
    records, counts = held_out(read_to_learn(config.loss_on), config)
    policy = load_frozen(source, config)
    if not config.raw_prompts:
        ask(config.model, renderer, records, policy.lm.generation_config.eos_token_id, columns=config.columns)
    refused: list[Refusal] = []
    examples, done = encode_demonstrations(
        records,
        renderer,
        max_length=max_length(config.max_length, context_length(policy.lm.config)),
        action=config.too_long,
        learn_prompt=config.loss_on == "all",
        learns=False,
        refused=refused,
    )
    counts = added(counts, done, settle(refused, len(records) - len(refused), config))
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if not examples:
        raise DataError(
            f"{config.data}: no token has another before it, so there is nothing to predict; give longer texts"
        )
    texts = ((one.source, ids) for one in examples for ids in (one.prompt, one.response))
    check_rows(policy.lm, renderer.tokenizer, texts)
    examples.sort(key=lambda example: example.length)
    total, tokens = 0.0, 0
    for part in in_micro_batches(examples, config.micro_batch, lambda example: (1, example.length)):
        batch = collate([e.prompt for e in part], [e.response for e in part], pad_id=renderer.pad_id)
        batch = batch.to(policy.device)
        outputs = token_outputs(policy, batch, temperature=1.0, micro_batch=config.micro_batch)
        total -= float(outputs.logprobs.cpu().double().sum())
        tokens += int(batch.response_mask.sum())
    return {
        "perplexity": math.exp(total / tokens) if total / tokens < 700 else math.inf,
        "loss": total / tokens,
        "tokens": tokens,
        "records": len(records),
        **left_out(counts),
    }


def _score_pairs(rewards: Sequence[Reward], ours: Sequence[Completion], theirs: Sequence[Completion]) -> list[Scores]:
    """The scores of two lists of responses, compared one by one.

    A comparing judge reads each two as one group: the better one gets the score 1, the other 0. Raises RewardError.
    """
    if not any(isinstance(reward.function, JudgeReward) and reward.function.group_size == 2 for reward in rewards):
        return [score_tokens(rewards, completions) for completions in (ours, theirs)]
    given = score_tokens(rewards, [completion for pair in zip(ours, theirs, strict=True) for completion in pair])
    return [
        replace(
            given,
            totals=given.totals[side::2],
            tokens=None,
            failed=tuple(row // 2 for row in given.failed if row % 2 == side),
            measured=given.measured if side == 0 else {},
        )
        for side in (0, 1)
    ]


def _win(ours: float, theirs: float) -> float:
    return 1.0 if ours > theirs else 0.5 if ours == theirs else 0.0


def best_of_table(
    scores: Sequence[float], judged: Sequence[float] | None, prompts: Sequence[Prompt], n: int
) -> list[dict[str, Any]]:
    """Return a row for each k from 1 to n: the KL bound, and the expected score of the best of k, also under the judge.

    ``prompts`` has one for each n scores.
    """
    table: list[dict[str, Any]] = [{"k": k, "kl_bound": kl_bound(k)} for k in range(1, n + 1)]
    for prefix, values in (("", scores), ("judge_", judged)):
        if values is None:
            continue
        groups = [slice(start, start + n) for start in range(0, len(scores), n)]
        expected = zip(*(expected_best(scores[group], values[group]) for group in groups), strict=True)
        for row, of_k in zip(table, expected, strict=True):
            interval = mean_interval(by_prompt(of_k, prompts))
            row |= {f"{prefix}score": sum(of_k) / len(of_k), f"{prefix}interval_95": interval}
    return table
