"""Preference pairs as token ids, and how likely a policy finds their responses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heedful.configs.offline import DPOConfig
from heedful.data.batches import AdaptiveMicroBatch, collate_padding_behind
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.fitting import Counts, Refusal, if_equal
from heedful.data.loading import RankingRows, encode_rankings
from heedful.errors import CheckpointError, DataError
from heedful.models.policy import Policy
from heedful.train.offline import read_once
from heedful.types import MicroBatch, Ranking


@dataclass(frozen=True)
class EncodedPair:
    """A preference as token ids, and how likely the reference finds both responses."""

    ranking: Ranking
    prompt: list[int]
    """By itself, as a policy is given it."""
    prompts: tuple[list[int], list[int]]
    """Before the chosen and before the rejected response, without a token that holds the beginning of the response too."""
    chosen: list[int]
    rejected: list[int]
    ref_chosen: float = math.nan
    """Log-probability of the whole response, in nats."""
    ref_rejected: float = math.nan

    @property
    def source(self) -> str:
        return self.ranking.source

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def length(self) -> int:
        return max(len(self.prompts[0]) + len(self.chosen), len(self.prompts[1]) + len(self.rejected))


def encode_preferences(
    rankings: Sequence[Ranking], renderer: Renderer, limit: int, config: DPOConfig, refused: list[Refusal] | None = None
) -> tuple[list[EncodedPair], Counts]:
    """Pairs as token ids, too long and equal ones treated as `encode_rankings` does.

    Raises DataError, also for longer rankings and an empty prompt, and CheckpointError for an encoder's tokenizer.
    """
    for ranking in rankings:
        if len(ranking.responses) != 2:
            raise DataError(
                f"{ranking.source}: a ranking of {len(ranking.responses)} responses; this trainer learns from pairs "
                "(prompt, chosen, rejected). `heedful reward` learns from longer rankings"
            )
    inputs = RewardInputs(renderer.tokenizer, written=True, special_tokens=renderer.special_tokens)
    if inputs.renderer is None:
        raise CheckpointError("the model's tokenizer has CLS and SEP tokens: it reads pairs of texts and writes none")
    rows, counts = encode_rankings(
        rankings, inputs, max_length=limit, action=config.too_long, equal_pairs=if_equal(config), refused=refused
    )
    return [_split(row, renderer) for row in rows], counts


def _split(row: RankingRows, renderer: Renderer) -> EncodedPair:
    prompt = renderer.prompt_ids(row.ranking.prompt)
    if not prompt:
        raise DataError(
            f"{row.ranking.source}: the prompt is empty and the model has no BOS, so a response's first token follows "
            "nothing. DPO needs prompts; `heedful reward` compares whole texts"
        )
    prompts, responses = [], []
    for side, response in zip(row.rows, row.ranking.responses, strict=True):
        ids = side["input_ids"]
        start = len(prompt)
        if ids[:start] != prompt:  # they share a token
            start = len(renderer.written(row.ranking.prompt, response, truncated=row.ranking.truncated)[0])
        prompts.append(ids[:start])
        responses.append(ids[start:])
    return EncodedPair(row.ranking, prompt, (prompts[0], prompts[1]), responses[0], responses[1])


def with_reference(
    reference: Policy,
    pairs: Sequence[EncodedPair],
    pad_id: int,
    micro_batch: MicroBatch,
    adaptive: AdaptiveMicroBatch | None = None,
) -> list[EncodedPair]:
    """The pairs, in their order, with the reference's log-probs."""

    def read(part: list[int]) -> list[tuple[float, float]]:
        chosen, rejected = response_logprobs(reference, [pairs[i] for i in part], pad_id)
        return list(zip(chosen.tolist(), rejected.tolist(), strict=True))

    found = read_once(reference, [pair.length for pair in pairs], read, micro_batch, adaptive, rows=2)
    return [replace(pair, ref_chosen=ref[0], ref_rejected=ref[1]) for pair, ref in zip(pairs, found, strict=True)]


def response_logprobs(policy: Policy, pairs: Sequence[EncodedPair], pad_id: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen and of the rejected responses, summed over their tokens, ``[pairs]``."""
    whole = whole_logprobs(
        policy,
        [pair.prompts[side] for side in range(2) for pair in pairs],
        [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)],
        pad_id,
    )
    return whole[: len(pairs)], whole[len(pairs) :]


def whole_logprobs(policy: Policy, prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_id: int) -> Tensor:
    """Log-probabilities of responses to their prompts, summed over their tokens, ``[responses]``."""
    batch = collate_padding_behind(prompts, responses, pad_id=pad_id).to(policy.device)
    logprobs = policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs
    return torch.where(batch.response_mask, logprobs, 0.0).sum(dim=1)
