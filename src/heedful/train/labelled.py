"""Labelled responses as token ids, each beside a response to another prompt, and how likely a policy finds both."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heedful.configs.offline import KTOConfig
from heedful.data.batches import AdaptiveMicroBatch
from heedful.data.chat import Renderer
from heedful.data.fitting import Counts, Refusal
from heedful.data.loading import encode_responses
from heedful.errors import DataError
from heedful.models.policy import Policy
from heedful.train.offline import read_once
from heedful.train.pairs import whole_logprobs
from heedful.types import Labelled, MicroBatch


@dataclass(frozen=True)
class LabelledRow:
    """A labelled response as token ids, and how likely the reference finds it."""

    record: Labelled
    asked: list[int]
    """The prompt by itself, as a policy is given it."""
    prompt: list[int]
    """The prompt before the response, without a token that holds the beginning of the response too."""
    response: list[int]
    other: list[int]
    """A response to another prompt: on such, KTO estimates how far the policy is from the reference."""
    ref: float = math.nan
    """Log-probability of the whole response, in nats."""
    ref_other: float = math.nan
    """The same of the other one, after this prompt by itself."""

    @property
    def source(self) -> str:
        return self.record.source

    @property
    def num_tokens(self) -> int:
        return len(self.response)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def other_length(self) -> int:
        return len(self.asked) + len(self.other)


def encode_labelled(
    records: Sequence[Labelled], renderer: Renderer, limit: int, config: KTOConfig, refused: list[Refusal] | None = None
) -> tuple[list[LabelledRow], Counts]:
    """Labelled responses as token ids, too long ones treated as `encode_responses` does. None has an other one yet.

    Raises DataError and CheckpointError.
    """
    kept, counts = encode_responses(
        records, renderer, max_length=limit, action=config.too_long, what="labelled responses", refused=refused
    )
    rows = (
        LabelledRow(record, renderer.prompt_ids(record.prompt), example.prompt, example.response, [])
        for record, example in kept
    )
    return list(rows), counts


def check_labels(labelled: Sequence[LabelledRow], path: str) -> None:
    """Refuse records of which nothing can be learned. Raises DataError if all have one label, or all have one prompt."""
    labels = {one.record.label for one in labelled}
    if len(labels) == 1:
        found, missing = ("true", "bad") if labels == {True} else ("false", "good")
        instead = "; `heedful sft` learns from good ones alone" if labels == {True} else ""
        raise DataError(
            f"{path}: `label` is {found} in all {len(labelled)} records to train on, and KTO learns from both: add "
            f"{missing} responses{instead}"
        )
    if len({tuple(one.asked) for one in labelled}) == 1:
        raise DataError(
            f"{path}: all {len(labelled)} records to train on have the same prompt, and KTO estimates the KL to the "
            "reference on responses to other prompts; add records of other prompts"
        )


def with_others(
    labelled: Sequence[LabelledRow], pool: Sequence[LabelledRow], limit: int, seed: int
) -> tuple[list[LabelledRow], int]:
    """Give each record a response of ``pool`` to another prompt, and count those that were cut to fit ``limit`` tokens.

    They are drawn once, so that the reference has to read them only once. ``pool`` has at least two prompts.
    """
    draws, done = random.Random(f"{seed}: responses to other prompts"), []
    by_prompt = sorted(pool, key=lambda other: other.asked)
    sizes, first = Counter(tuple(other.asked) for other in by_prompt), dict[tuple[int, ...], int]()
    for place, other in enumerate(by_prompt):
        first.setdefault(tuple(other.asked), place)
    for one in labelled:
        own = sizes[tuple(one.asked)]
        place = draws.randrange(len(pool) - own)
        drawn = by_prompt[place + own if own and place >= first[tuple(one.asked)] else place]
        done.append((one, drawn.response))
    cut = sum(len(one.asked) + len(response) > limit for one, response in done)
    return [replace(one, other=response[: limit - len(one.asked)]) for one, response in done], cut


def with_reference(
    reference: Policy, labelled: Sequence[LabelledRow], pad_id: int, limit: MicroBatch, adaptive: AdaptiveMicroBatch
) -> list[LabelledRow]:
    """The records, in their order, with the reference's log-probs."""
    prompts = [ids for one in labelled for ids in (one.prompt, one.asked)]
    responses = [ids for one in labelled for ids in (one.response, one.other)]
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]

    def read(part: list[int]) -> list[float]:
        return whole_logprobs(reference, [prompts[i] for i in part], [responses[i] for i in part], pad_id).tolist()

    found = read_once(reference, lengths, read, limit, adaptive)
    return [replace(one, ref=found[2 * i], ref_other=found[2 * i + 1]) for i, one in enumerate(labelled)]
