"""Measure the agreement of a reward model's scores with people's preferences."""

from typing import Any

from heedful.configs.evaluate import AccuracyConfig
from heedful.core.agreement import ordered_pairs
from heedful.core.intervals import share_interval
from heedful.data.chat import RewardInputs
from heedful.data.fitting import Refusal, added, check_dropped, settle
from heedful.data.learned import ask
from heedful.data.loading import encode_rankings
from heedful.data.schemas import read_rankings
from heedful.errors import DataError
from heedful.evaluate.measuring import by_prompt, held_out, left_out
from heedful.kernels.device import frozen_place, resolve_device
from heedful.models.load import load_reward_model
from heedful.models.policy import freeze
from heedful.models.shape import check_rows
from heedful.models.source import resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.rewards.models import agreement_with, score_rows


def evaluate_accuracy(config: AccuracyConfig) -> dict[str, Any]:
    """Measure accuracy: the share of pairs whose better response scores strictly higher.

    The result has ``accuracy`` with its 95 % interval, the numbers of `heedful.core.agreement.agreement`, and counts. A
    ranking of more than two responses counts all its pairs; responses of equal rank make no pair. Pairs of one prompt are
    not independent, so the interval treats them as a group (`heedful.core.intervals.share_interval`).

    ``config.too_long`` decides on responses that are too long for the model. Rankings that prefer a response to an equal one
    are left out and counted.

    Raises DataError, CheckpointError and RewardError.
    """
    device = resolve_device(config.device)
    rankings, counts = held_out(read_rankings, config)
    source = resolve(config.reward_model, config)
    tokenizer = load_chat_tokenizer(source, config)
    model = load_reward_model(source, tokenizer, **frozen_place(device, config.dtype))
    freeze(model)
    inputs = RewardInputs(tokenizer, model.reads, special_tokens=config.special_tokens)
    if not config.raw_prompts and inputs.renderer is not None:
        ask(config.reward_model, inputs.renderer, rankings, columns=config.columns)
    refused: list[Refusal] = []
    encoded, left = encode_rankings(
        rankings,
        inputs,
        max_length=model.max_length,
        action=config.too_long,
        equal_pairs="drop",
        refused=refused,
    )
    counts = added(counts, left, settle(refused, len(rankings) - len(refused), config))
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    rankings = [one.ranking for one in encoded if one.has_pairs]
    if not rankings:
        raise DataError(f"{config.data}: nothing is left to rank: {left_out(counts)}")
    texts = ((one.ranking.source, row["input_ids"]) for one in encoded for row in one.rows)
    check_rows(model.classifier, tokenizer, texts)
    rows = [row for one in encoded if one.has_pairs for row in one.rows]
    scores = iter(score_rows(model, rows, micro_batch=config.micro_batch))
    by_ranking = [[next(scores) for _ in ranking.responses] for ranking in rankings]
    measured = agreement_with(rankings, by_ranking)
    accuracy, pairs = measured.pop("accuracy"), measured.pop("pairs")
    margins = [
        (ranking, better - worse)
        for ranking, own in zip(rankings, by_ranking, strict=True)
        for better, worse in ordered_pairs(ranking.ranks, own)
    ]
    right = by_prompt([float(margin > 0) for _, margin in margins], [ranking for ranking, _ in margins])
    all_scores = [score for own in by_ranking for score in own]
    return {
        "accuracy": accuracy,
        "interval_95": share_interval(right),
        "margin_mean": sum(margin for _, margin in margins) / pairs,
        "score_mean": sum(all_scores) / len(all_scores),
        **measured,
        "pairs": pairs,
        "prompts": len(right),
        **left_out(counts),
    }
