"""The sampling loop: one token per row and step, with a key-value cache."""

from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.configs.options import SamplingOptions
from heedful.core import token_logprobs
from heedful.data.batches import AdaptiveMicroBatch, collate, rows_by_length
from heedful.devices import capabilities, upload
from heedful.distributed import ranks
from heedful.engines.decoder import Decoder, SamplingModel
from heedful.engines.draw import draw, draw_from, filter_logits
from heedful.engines.responses import Responses
from heedful.faults import hit
from heedful.kernels.device import HALF
from heedful.models.policy import Policy
from heedful.types import MicroBatch

MICRO_BATCH = MicroBatch(64)
CHECK_EVERY = 16
"""On a GPU, number of steps between checks for ended rows, because a check synchronises with the device."""
ROWS = 8
"""In half precision the number of rows is a multiple of this, because oneDNN compiles and caches a kernel per
number."""


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    num_tokens: int | None = None,
    generator: torch.Generator,
    micro_batch: MicroBatch = MICRO_BATCH,
    adaptive: AdaptiveMicroBatch | None = None,
    longest: int = 0,
    merge_adapters: bool = False,
    most: Sequence[int] | None = None,
) -> Responses:
    """Sample one response to each prompt.

    Every row has its own stream of uniform numbers, drawn from ``generator`` before the loop. So responses depend only
    on the seed and the row, not on the device, the number of ranks (which share the rows) or the micro-batches. A
    micro-batch has prompts of similar length; rows that end make room for others that wait, if the model `takes_slots`.

    Args:
        policy: the model to sample from.
        prompts: token ids of each prompt.
        sampling: temperature, filters and lengths. CUDA graphs only if they are ``on`` (`heedful.engines.sampler.with_graphs`
            decides on ``auto``).
        stop_ids: the tokens that end a response.
        pad_id: the padding token.
        num_tokens: ids from this one on are never sampled: rows of the embeddings beyond the tokenizer, which have no text
            (`heedful.models.shape.rows_with_text`); None allows all.
        generator: source of random numbers, on the CPU.
        micro_batch: maximum rows sampled at a time, and maximum tokens: rows times (longest prompt +
            ``max_new_tokens``).
        adaptive: remembers the micro-batch that fits into memory; None does not remember.
        longest, merge_adapters: of the `SamplingModel`.
        most: maximal number of tokens of each response, at most ``max_new_tokens``; None is that for all.
    """
    rows = len(prompts)
    uniforms = torch.rand(rows, sampling.max_new_tokens, generator=generator, dtype=torch.float64)
    lengths = torch.full((rows,), sampling.max_new_tokens) if most is None else torch.tensor(most)
    stops = stop_ids if sampling.response_length == "stop" else ()
    model = SamplingModel(  # one copy of the weights for all parts
        policy, cuda_graphs=sampling.cuda_graphs == "on", longest=longest, merge_adapters=merge_adapters
    )
    costs = [len(prompt) + length for prompt, length in zip(prompts, lengths.tolist(), strict=True)]

    def decode_all(limit: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Tokens, their log-probs, and log-probs of the kept mass, ``[rows, max_new_tokens]``; and response lengths.

        Only of this rank's rows; other rows are not filled in.
        """
        width = sampling.max_new_tokens
        tokens = torch.full(
            (rows, width + 1), pad_id, device=policy.device
        )  # what ended rows draw goes to the last column
        logprobs = torch.zeros(tokens.shape, device=policy.device)
        kept = torch.zeros_like(logprobs) if sampling.leaves_out else None
        counts = torch.zeros(rows, dtype=torch.long, device=policy.device)
        parts = rows_by_length(costs, limit)
        if model.takes_slots and limit.tokens is None:  # a row begins where another has ended
            parts = [list(chain.from_iterable(parts))] if parts else []
        for part in parts:
            steps = decode(
                model,
                [prompts[row] for row in part],
                sampling,
                uniforms=uniforms[part],
                lengths=lengths[part],
                stop_ids=stops,
                pad_id=pad_id,
                num_tokens=num_tokens,
                at_a_time=limit.rows,
            )
            where = upload(torch.tensor(part), policy.device)
            for step in steps:
                hit("generation")
                places = where[step.rows], torch.where(step.active, step.places, width)
                tokens[places] = step.tokens
                logprobs[places] = step.logprobs.to(logprobs.dtype)
                if kept is not None and step.kept is not None:
                    kept[places] = step.kept.to(kept.dtype)
                counts[places[0]] += step.active
        return tokens[:, :width], logprobs[:, :width], None if kept is None else kept[:, :width], counts

    tokens, logprobs, kept, counts = (adaptive or AdaptiveMicroBatch()).run(decode_all, micro_batch, rows=rows)
    if ranks.size() > 1:
        own = [torch.tensor(ranks.shard_indices(costs), dtype=torch.long, device=policy.device)]
        for numbers in (tokens, logprobs, kept, counts):
            if numbers is not None:
                ranks.all_gather_into(numbers, own)
    responses = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    batch = collate(prompts, responses, pad_id=pad_id).to(policy.device)
    truncated = upload(torch.tensor([response[-1] not in stops for response in responses]), policy.device)

    def inside(numbers: Tensor) -> Tensor:
        """Per-token numbers, cut to the longest response, and 0 outside of responses."""
        return torch.where(batch.response_mask, numbers[:, : batch.response_mask.shape[1]], 0.0)

    return Responses(
        batch=batch,
        truncated=truncated,
        logprobs=inside(logprobs),
        temperature=sampling.temperature,
        kept_logprobs=None if kept is None else inside(kept),
    )


class Step(NamedTuple):
    """Samples of one step of `decode`, an entry per row still in the batch."""

    rows: Tensor
    """Index of the row's prompt."""
    places: Tensor
    """Index of the token in the response."""
    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None
    """Log of the probability mass kept by top-k and top-p; None if all is kept."""
    active: Tensor
    """False = the row had ended before, so its token is meaningless."""


@torch.inference_mode()
def decode(
    model: SamplingModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    *,
    uniforms: Tensor,
    lengths: Tensor,
    stop_ids: Sequence[int],
    pad_id: int,
    num_tokens: int | None = None,
    at_a_time: int | None = None,
) -> Iterator[Step]:
    """Yield the samples of each step, until all rows have ended.

    Once an eighth of the rows have ended, others begin in their place, or they leave the batch; until then they read padding.
    In half precision some stay, so that the number of rows is a multiple of `ROWS`.

    Args:
        model: the copy of the policy for sampling.
        prompts: token ids of each row's prompt.
        sampling: temperature and filters.
        uniforms: ``[rows, steps]`` numbers in [0, 1), one per token.
        lengths: ``[rows]``, maximum number of tokens per response.
        stop_ids: the tokens that end a response.
        pad_id: the padding token.
        num_tokens: ids from this one on are never sampled: rows of the embeddings beyond the tokenizer, which have no text
            (`heedful.models.shape.rows_with_text`); None allows all.
        at_a_time: maximum number of rows at a time, the first prompts first; None is all. Only for a model that
            `takes_slots`.
    """
    device = model.device
    multiple = ROWS if model.compute_dtype in HALF else 1
    held = len(prompts) if at_a_time is None else min(at_a_time, len(prompts))
    longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths.tolist(), strict=True))
    stops = upload(torch.tensor(list(stop_ids), dtype=torch.long), device)
    lengths = upload(lengths, device)
    uniforms = upload(uniforms, device) if capabilities(device).float64 else uniforms
    decoder = Decoder(model, num_rows=held, longest=longest, pad_id=pad_id)
    rows, next_row = torch.arange(held, device=device), held
    places, active = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    logits = decoder.read_prompts(prompts[:held])
    for step in count():
        of_rows = uniforms[rows.to(uniforms.device), places.to(uniforms.device)]
        tokens, logprobs, kept = _next_tokens(logits, sampling, of_rows, num_tokens)
        yield Step(rows, places, tokens, logprobs, kept, active)
        active = active & ~torch.isin(tokens, stops) & (places + 1 < lengths[rows])
        places = places + active
        begun: list[int] = []
        if not capabilities(device).queues or step % CHECK_EVERY == CHECK_EVERY - 1:
            ended = [slot for slot, goes_on in enumerate(active.tolist()) if not goes_on]
            num_held = -(-(held - len(ended)) // multiple) * multiple
            if len(ended) == held and next_row == len(prompts):
                return
            if num_held <= held * 7 // 8 and next_row < len(prompts):
                begun = ended[: len(prompts) - next_row]
            elif num_held <= held * 7 // 8:
                order = _without(ended, held, num_held)
                decoder.keep(order)
                on_device = upload(torch.tensor(order), device)
                rows, places, tokens, active = (x[on_device] for x in (rows, places, tokens, active))
                held = num_held
        if len(begun) < held:
            logits = decoder.read_tokens(torch.where(active, tokens, pad_id))
        if begun:
            slots, new = upload(torch.tensor(begun), device), range(next_row, next_row + len(begun))
            logits[slots] = decoder.read_prompts([prompts[row] for row in new], begun)
            rows, places, active = rows.clone(), places.clone(), active.clone()
            rows[slots], places[slots], active[slots] = upload(torch.tensor(new), device), 0, True
            next_row = new.stop


def _without(ended: list[int], held: int, num_held: int) -> list[int]:
    """Rows to go on with: each in its place, and in the place of those that ended the last ones."""
    gone = ended[: held - num_held]
    last = [row for row in range(num_held, held) if row not in gone]
    return [last.pop() if row in gone else row for row in range(num_held)]


def _next_tokens(
    logits: Tensor, sampling: SamplingOptions, uniforms: Tensor, num_tokens: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample tokens below ``num_tokens``. Returns them, their log-probs under the unfiltered distribution of all rows at the
    sampling temperature, and the log of the mass kept by top-k and top-p (None if all is kept).
    """
    temperature = sampling.temperature or 1.0
    scaled = logits if temperature == 1 else logits / temperature
    if not sampling.leaves_out:  # one softmax for both
        probabilities = scaled.softmax(dim=-1)
        if num_tokens is not None and num_tokens < probabilities.shape[1]:
            probabilities[:, num_tokens:] = 0  # in place: a slice of another size would be copied at each token
        tokens = draw_from(probabilities, uniforms)
        return tokens, probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log(), None
    if sampling.temperature == 0:
        tokens = logits[:, :num_tokens].argmax(dim=-1)
        logprobs = token_logprobs(scaled, tokens)
        return tokens, logprobs, logprobs
    filtered = filter_logits(scaled[:, :num_tokens], top_k=sampling.top_k, top_p=sampling.top_p)
    tokens = draw(filtered, uniforms)
    return tokens, token_logprobs(scaled, tokens), filtered.logsumexp(dim=-1) - scaled.logsumexp(dim=-1)
