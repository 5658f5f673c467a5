"""A reward model as a reward function. It takes text, so any tokenizer and any architecture will do."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from heedful.core.agreement import agreement
from heedful.data.chat import RewardInputs
from heedful.data.messages import from_dict
from heedful.data.micro_batches import own_micro_batches
from heedful.data.out_of_memory import Room
from heedful.errors import RewardError
from heedful.models.reward_model import RewardModel
from heedful.models.rows import check_rows
from heedful.parallel import ranks
from heedful.parallel.sharding import passes
from heedful.rewards.returned import OfBeginning, OfRanks
from heedful.rewards.rules import response_text
from heedful.types import MicroBatch, Ranking, Text, plain_response

MICRO_BATCH = MicroBatch(32)


def score_texts(
    model: RewardModel,
    inputs: RewardInputs,
    prompts: Sequence[Text],
    responses: Sequence[str],
    truncated: Sequence[bool],
    *,
    micro_batch: MicroBatch = MICRO_BATCH,
    room: Room | None = None,
) -> list[float]:
    """Score responses in batches of similar length. Returns one score per response, in the order given.

    Args:
        model: the reward model.
        inputs: how it reads a prompt with a response.
        prompts: one prompt per response.
        responses: the responses' texts.
        truncated: for each response, whether it was cut off before the model ended it.
        micro_batch: the most rows and tokens at a time.
        room: remembers what memory has room for; None forgets it.

    Raises RewardError if a prompt with its response is longer than the reward model can read, and DataError if it has a token
    that the model has no row of embeddings for.
    """
    rows = [
        inputs.encode(prompt, response, truncated=cut)
        for prompt, response, cut in zip(prompts, responses, truncated, strict=True)
    ]
    lengths = [len(row["input_ids"]) for row in rows]
    if max(lengths) > model.max_length:
        too_long = [i for i, length in enumerate(lengths) if length > model.max_length]
        raise RewardError(
            f"{len(too_long)} of {len(rows)} prompts with their responses are longer than the {model.max_length} tokens "
            f"that the reward model reads (longest {max(lengths)}; first response {responses[too_long[0]]!r:.80}); "
            "use shorter prompts and responses, or a reward model that reads more"
        )
    check_rows(model.classifier, inputs.tokenizer, (("a response to score", row["input_ids"]) for row in rows))
    return score_rows(model, rows, micro_batch=micro_batch, room=room)


@torch.no_grad()
def score_rows(
    model: RewardModel, rows: Sequence[dict[str, list[int]]], *, micro_batch: MicroBatch, room: Room | None = None
) -> list[float]:
    """Score rows that are already encoded, as `score_texts` does."""
    lengths = [len(row["input_ids"]) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    found: dict[int, float] = {}

    def read(limit: MicroBatch) -> None:
        for chosen in own_micro_batches(order, limit, lambda i: (1, lengths[i]), passes((model, model.zero))):
            found.update(zip(chosen, model([rows[i] for i in chosen]).tolist(), strict=True))

    (room or Room()).run(read, micro_batch, rows=len(rows))
    scores = ranks.merged(found)
    return [scores[i] for i in range(len(rows))]


class ModelReward(OfRanks):
    """A frozen reward model as a reward function; the arguments are those of `score_texts`.

    With ``reads_beginnings``, of a response that is longer than the model reads its beginning is scored, as of one that was
    cut by length, and the score is marked as `OfBeginning`; without it, such a response is an error.
    """

    def __init__(self, model: RewardModel, inputs: RewardInputs, *, micro_batch: MicroBatch = MICRO_BATCH) -> None:
        self.model = model
        self.inputs = inputs
        self.micro_batch = micro_batch
        self.room = Room()
        """What memory has room for."""
        self.reads_beginnings = False

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], truncated: Sequence[bool], **_: Any
    ) -> list[float]:
        texts = [
            prompt if isinstance(prompt, str) else tuple(from_dict(message) for message in prompt) for prompt in prompts
        ]
        responses = [response_text(c) for c in completions]
        if not self.reads_beginnings:
            return score_texts(
                self.model, self.inputs, texts, responses, truncated, micro_batch=self.micro_batch, room=self.room
            )
        rows, of_beginnings, limit = [], list[bool](), self.model.max_length
        for prompt, response, cut in zip(texts, responses, truncated, strict=True):
            row = self.inputs.encode(prompt, response, truncated=cut)
            of_beginnings.append(len(row["input_ids"]) > limit)
            if of_beginnings[-1]:
                row = self.inputs.encode_beginning(prompt, response, max_length=limit)
            rows.append(row)
        scores = score_rows(self.model, rows, micro_batch=self.micro_batch, room=self.room)
        return [OfBeginning(one) if marked else one for one, marked in zip(scores, of_beginnings, strict=True)]


def agreement_with(rankings: Sequence[Ranking], scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Measure how well scores agree with people's rankings (`heedful.core.agreement.agreement`).

    Args:
        rankings: the rankings, for their ranks and the lengths of their responses.
        scores: for each ranking the scores of its responses, in the same order.

    Raises RewardError if a score is not finite.
    """
    for ranking, own in zip(rankings, scores, strict=True):
        if not all(math.isfinite(one) for one in own):
            raise RewardError(
                f"{ranking.source}: the reward model gives {own}; scores must be finite. The cause is its weights or "
                "the precision: try --dtype float32, or train it with a lower --learning-rate"
            )
    lengths = [[len(plain_response(response)) for response in ranking.responses] for ranking in rankings]
    return agreement([ranking.ranks for ranking in rankings], scores, lengths)
