"""The sampling loop: prompts in, responses out, one token a step on the key-value cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from heedful.configs.options import SamplingOptions
from heedful.core import token_logprobs
from heedful.core.masking import at_least_float32
from heedful.data.collate import collate
from heedful.models.device import autocast
from heedful.models.heads import positions
from heedful.models.policy import Policy
from heedful.rollout.rollouts import Rollouts
from heedful.rollout.sampling import draw, filter_logits


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator,
    micro_batch_size: int = 64,
) -> Rollouts:
    """Sample one response to each prompt, ``micro_batch_size`` rows at a time.

    Every row draws from its own stream of uniform numbers, taken from ``generator`` (a CPU one) before the loop: the
    responses depend on the seed and the row alone, not on the micro-batch size or the device.
    """
    rows = len(prompts)
    uniforms = torch.rand(rows, sampling.max_new_tokens, generator=generator, dtype=torch.float64)
    lengths = torch.full((rows,), sampling.max_new_tokens)
    if sampling.response_length == "drawn":
        lengths = torch.randint(sampling.min_new_tokens, sampling.max_new_tokens + 1, (rows,), generator=generator)
    stops = stop_ids if sampling.response_length == "stop" else ()
    responses: list[list[int]] = []
    logprobs: list[list[float]] = []
    for start in range(0, rows, micro_batch_size):
        part = slice(start, start + micro_batch_size)
        block_ids: list[list[int]] = [[] for _ in prompts[part]]
        block_logprobs: list[list[float]] = [[] for _ in prompts[part]]
        for step in decode(
            policy,
            prompts[part],
            sampling,
            uniforms=uniforms[part],
            lengths=lengths[part],
            stop_ids=stops,
            pad_id=pad_id,
        ):
            for row, (token, logprob) in step.items():
                block_ids[row].append(token)
                block_logprobs[row].append(logprob)
        responses += block_ids
        logprobs += block_logprobs
    batch = collate(prompts, responses, pad_id=pad_id)
    sampler_logprobs = torch.zeros(batch.response_mask.shape)
    sampler_logprobs[batch.response_mask] = torch.tensor([x for row in logprobs for x in row])
    return Rollouts(
        batch=batch,
        lengths=batch.response_mask.sum(dim=1),
        truncated=torch.tensor([response[-1] not in stops for response in responses]),
        sampler_logprobs=sampler_logprobs,
    ).to(policy.device)


@torch.no_grad()
def decode(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    *,
    uniforms: Tensor,
    lengths: Tensor,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Iterator[dict[int, tuple[int, float]]]:
    """Yield, step by step, the token and log-prob that each unfinished row sampled.

    Row i stops after ``lengths[i]`` tokens or at one of ``stop_ids``; the loop ends when all rows have. Finished rows are fed
    padding that nothing reads.
    """
    device = policy.device
    prompt = collate(prompts, [[]] * len(prompts), pad_id=pad_id).to(device)
    ids, attention_mask = prompt.ids, prompt.attention_mask
    position_ids = positions(attention_mask)
    cache = DynamicCache(config=policy.lm.config)
    lengths = lengths.to(device)
    stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
    active = torch.ones(len(prompts), dtype=torch.bool, device=device)
    was_training = policy.training
    policy.eval()
    try:
        for step in range(int(lengths.max())):
            with autocast(device, policy.compute_dtype):
                output = policy.lm(
                    input_ids=ids,
                    attention_mask=attention_mask.long(),
                    position_ids=position_ids,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            logits = at_least_float32(output.logits[:, -1])
            tokens, logprobs = _next_tokens(logits, sampling, uniforms[:, step])
            yield {
                row: (token, logprob)
                for row, (token, logprob, is_active) in enumerate(
                    zip(tokens.tolist(), logprobs.tolist(), active.tolist(), strict=True)
                )
                if is_active
            }
            active = active & ~torch.isin(tokens, stops) & (step + 1 < lengths)
            if not bool(active.any()):
                return
            ids = torch.where(active, tokens, pad_id).unsqueeze(1)
            position_ids = position_ids[:, -1:] + 1
            attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], dim=1)
    finally:
        policy.train(was_training)


def _next_tokens(logits: Tensor, sampling: SamplingOptions, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled tokens and their log-probs under the unfiltered distribution at the sampling temperature."""
    temperature = sampling.temperature or 1.0
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = draw(filter_logits(logits / temperature, top_k=sampling.top_k, top_p=sampling.top_p), uniforms)
    return tokens, token_logprobs(logits, tokens, temperature=temperature)
