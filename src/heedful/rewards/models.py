"""Reward models as reward functions. They take text, so any tokenizer and any architecture work."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NotRequired, TypedDict

import torch

from heedful.core.agreement import agreement
from heedful.data.batches import AdaptiveMicroBatch, own_micro_batches
from heedful.data.chat import Renderer, RewardInputs, plain_text
from heedful.data.learned import ask
from heedful.data.messages import from_dict
from heedful.data.schemas import reply_of
from heedful.data.splits import HasPrompt
from heedful.distributed import ranks
from heedful.distributed.sharding import lockstep_forwards
from heedful.errors import ConfigError, RewardError
from heedful.kernels.device import frozen_dtype
from heedful.kernels.weights import halve_frozen
from heedful.models.load import load_reward_model
from heedful.models.policy import freeze
from heedful.models.reward_model import RewardModel, score_head
from heedful.models.shape import check_rows
from heedful.models.source import Source
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards.results import Distributed, Truncated
from heedful.rewards.scoring import Reward
from heedful.types import MicroBatch, Prompt, Ranking, Response, SpecialTokens, plain_response


class Machine(TypedDict):
    """Device, precision and limits of reward models."""

    device: torch.device
    compute_dtype: torch.dtype
    """The precision of matrix products."""
    micro_batch: NotRequired[MicroBatch]
    """Maximal rows and tokens per forward pass; rows also limit an HTTP request."""
    stored: NotRequired[torch.dtype]
    """Dtype of stored matrices; the default depends on the device."""
    special_tokens: NotRequired[SpecialTokens]
    """How special tokens in raw text are encoded."""


MICRO_BATCH = MicroBatch(32)
MEASURED = 1000
"""Maximal number of prompts to compare two tokenizers on."""


@torch.no_grad()
def score_rows(
    model: RewardModel,
    rows: Sequence[dict[str, list[int]]],
    *,
    micro_batch: MicroBatch,
    adaptive: AdaptiveMicroBatch | None = None,
) -> list[float]:
    """Score encoded rows in batches of similar length. Returns one score per row, in the order given.

    ``adaptive`` keeps the micro-batch that fits into memory for later calls; None does not.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    found: dict[int, float] = {}

    def read(limit: MicroBatch) -> None:
        for chosen in own_micro_batches(
            order, limit, lambda i: (1, lengths[i]), lockstep_forwards((model, model.dummy_loss))
        ):
            found.update(zip(chosen, model([rows[i] for i in chosen]).tolist(), strict=True))

    (adaptive or AdaptiveMicroBatch()).run(read, micro_batch, rows=len(rows))
    scores = ranks.merged(found)
    return [scores[i] for i in range(len(rows))]


class ModelReward(Distributed):
    """A frozen reward model as a reward function.

    A response longer than the model's limit is a RewardError. With ``reads_beginnings`` its beginning is scored instead, as a
    truncated response, and the score is marked as `Truncated`.

    Args:
        model: the reward model.
        inputs: encodes a prompt with a response.
        micro_batch: maximal rows and tokens at a time.

    A call raises DataError if a text has a token without a row of embeddings in the model.
    """

    def __init__(self, model: RewardModel, inputs: RewardInputs, *, micro_batch: MicroBatch = MICRO_BATCH) -> None:
        self.model = model
        self.inputs = inputs
        self.micro_batch = micro_batch
        self.adaptive = AdaptiveMicroBatch()
        """The micro-batch that fits into memory."""
        self.reads_beginnings = False

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], truncated: Sequence[bool], **_: Any
    ) -> list[float]:
        texts = [
            prompt if isinstance(prompt, str) else tuple(from_dict(message) for message in prompt) for prompt in prompts
        ]
        responses, limit = [_response(completion) for completion in completions], self.model.max_length
        rows = [
            self.inputs.encode(prompt, response, truncated=cut)
            for prompt, response, cut in zip(texts, responses, truncated, strict=True)
        ]
        too_long = [i for i, row in enumerate(rows) if len(row["input_ids"]) > limit]
        if too_long and not self.reads_beginnings:
            longest, first = max(len(row["input_ids"]) for row in rows), plain_response(responses[too_long[0]])
            raise RewardError(
                f"{len(too_long)} of {len(rows)} prompts with their responses are longer than the {limit} tokens that the "
                f"reward model reads (longest {longest}; first response {first!r:.80}); use shorter prompts "
                "and responses, or a reward model that reads more"
            )
        for i in too_long:
            rows[i] = self.inputs.encode_beginning(texts[i], responses[i], max_length=limit)
        check_rows(
            self.model.classifier, self.inputs.tokenizer, (("a response to score", row["input_ids"]) for row in rows)
        )
        scores = score_rows(self.model, rows, micro_batch=self.micro_batch, adaptive=self.adaptive)
        for i in too_long:
            scores[i] = Truncated(scores[i])
        return scores


def _response(completion: Any) -> Response:
    """The response in a completion, which is a string or a list of messages: all that was said, or the only answer."""
    if isinstance(completion, str):
        return completion
    turns = tuple(map(from_dict, completion))
    return turns if len(turns) > 1 else reply_of(turns[0])


def load_model_reward(
    model: str | Source,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    micro_batch: MicroBatch = MICRO_BATCH,
    stored: torch.dtype | None = None,
    special_tokens: SpecialTokens = "literal",
) -> ModelReward:
    """Load a reward model, frozen, with its own tokenizer.

    Args:
        model: a folder, a name on the Hub or ModelScope, or a `Source`.

    The other arguments are those of `Machine`. Raises CheckpointError.
    """
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:  # conversations are then read as plain text with role names
        tokenizer = load_tokenizer(model, chat_template="plain")
    stored = frozen_dtype(device, compute_dtype) if stored is None else stored
    scorer = load_reward_model(model, tokenizer, device=device, compute_dtype=compute_dtype, stored=stored)
    freeze(scorer)
    if device.type == "cpu":
        halve_frozen(scorer.classifier, compute_dtype, but=[score_head(scorer.classifier)])
    inputs = RewardInputs(tokenizer, scorer.reads, special_tokens=special_tokens)
    return ModelReward(scorer, inputs, micro_batch=micro_batch)


def model_rewards(rewards: Sequence[Reward]) -> Iterator[tuple[str, ModelReward]]:
    """The reward models among rewards, with their names."""
    for reward in rewards:
        if isinstance(reward.function, ModelReward):
            yield reward.name, reward.function


def ask_reward_models(rewards: Sequence[Reward], records: Sequence[HasPrompt], *, columns: str = "") -> None:
    """Print a warning for each reward model that learned conversations and is to read strings (`heedful.data.learned`)."""
    for name, reward in model_rewards(rewards):
        if reward.inputs.renderer is not None:
            ask(name, reward.inputs.renderer, records, columns=columns)


def check_context(
    rewards: Sequence[Reward],
    prompts: Sequence[Prompt],
    renderer: Renderer,
    *,
    max_new_tokens: int,
    can_leave_out: bool = False,
) -> None:
    """Raise ConfigError if a reward model cannot read the longest prompt with the longest response.

    A response's length in the reward model's tokens is estimated as ``max_new_tokens`` times the ratio of its tokens to the
    policy's on the prompts, which is exactly 1 for the same tokenizer. A text may need more if it differs from the prompts
    or if the policy splits it in another way than its tokenizer.

    Args:
        rewards: any rewards; only reward models are checked.
        prompts: every prompt that may be answered.
        renderer: of the policy's tokenizer.
        max_new_tokens: the longest response, in the policy's tokens.
        can_leave_out: the command has ``--max-prompt-tokens``, so ``--too-long drop`` can drop prompts. Truncating them would
            not help: rewards see the whole prompt.

    Raises ConfigError with the setting that would fit, and CheckpointError for a prompt that a chat template refuses.
    """
    for name, reward in model_rewards(rewards):
        inputs, limit = reward.inputs, reward.model.max_length
        lengths = [len(inputs.encode(prompt.prompt, prompt.prefill, truncated=True)["input_ids"]) for prompt in prompts]
        longest = max(lengths)
        ratio = _tokens_for_one(inputs, renderer, prompts[:MEASURED])
        response = math.ceil(ratio * max_new_tokens)
        if longest + response <= limit:
            continue
        fitting = int((limit - longest) / ratio)
        ways = [f"lower --max-new-tokens to {fitting}"] if fitting > 0 else []
        beyond = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length + response > limit]
        kept = min(len(renderer.prompt_ids(prompt.prompt, prompt.prefill)) for prompt in beyond) - 1
        if can_leave_out and kept > 0:
            drop = f"--max-prompt-tokens {kept} --too-long drop"
            ways.append(
                f"leave out the longest prompts with {drop} (truncate does not help, as rewards see whole prompts)"
            )
        ways.append("shorten the longest prompts")
        about = "" if ratio == 1 else f", {ratio:.2f} of its tokens for one of the policy's,"
        raise ConfigError(
            f"{name} reads {limit} tokens, but the prompt at {prompts[lengths.index(longest)].source} has {longest} there "
            f"and a response of --max-new-tokens {max_new_tokens}{about} {response}: {', '.join(ways)}, or use a "
            "reward model that reads more"
        )


def _tokens_for_one(inputs: RewardInputs, renderer: Renderer, prompts: Sequence[Prompt]) -> float:
    """Ratio of a reward model's number of tokens to the policy's, over the prompts."""
    texts = [plain_text(prompt.prompt) for prompt in prompts]
    theirs, ours = (
        sum(len(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids) for text in texts)
        for tokenizer in (inputs.tokenizer, renderer.tokenizer)
    )
    return theirs / ours if ours else 1.0


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
