"""The pieces of the algorithms for use in a notebook: score responses, compute log-probs and values, build batches.

>>> policy = heedful.Policy.from_pretrained("runs/sft/final", value_head=True)
>>> reference, engine = policy.frozen_copy(), heedful.LocalEngine(policy, max_new_tokens=64)
>>> batch = engine.generate(["What is 2 + 2?"] * 16)
>>> scores = heedful.score([my_function, "rule:repetition"], batch)
>>> old, ref = heedful.logprobs(policy, batch), heedful.logprobs(reference, batch)

Advantages, losses and all other formulas are pure functions in `heedful.core`.
"""

import operator
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful import core
from heedful.algorithms.online.experience import Experience
from heedful.configs.settings import check_object
from heedful.data.batches import collate
from heedful.data.chat import Renderer, stop_ids
from heedful.display import counted
from heedful.engines.engine import AnyPrompt, as_prompts, warn_of_strings
from heedful.engines.responses import Responses
from heedful.engines.teacher_forced import token_outputs, token_values
from heedful.errors import CheckpointError, ConfigError, DataError, RewardError
from heedful.kernels.device import resolve_device
from heedful.models.policy import Policy
from heedful.models.value_model import ValueModel
from heedful.rewards.models import model_rewards
from heedful.rewards.resolve import AnyRewards, listed, named_by, resolve_rewards
from heedful.rewards.scoring import Reward, score_tokens
from heedful.types import MicroBatch

AnyBatch = Responses | Experience
"""What was sampled: by an engine, or in a step of `heedful.ppo_steps`."""


def load_rewards(rewards: AnyRewards, *, device: str | torch.device = "cpu") -> list[Reward]:
    """Rewards for `score`, loaded once.

    Args:
        rewards: functions, `Reward` objects, or strings as in ``--rewards``, such as ``model:PATH`` or ``rule:repetition``.
        device: of reward models: auto, cpu, cuda, mps.

    Raises ConfigError, CheckpointError.
    """
    wanted = listed(rewards)
    if not wanted:
        raise ConfigError('no reward is given; name at least one, such as a function or "model:runs/reward/final"')
    place = resolve_device(device) if isinstance(device, str) else device
    with named_by("rewards"):
        return resolve_rewards(wanted, device=place, compute_dtype=torch.float32)


def score(
    rewards: AnyRewards, batch: AnyBatch, *, per_token: bool = False, raw_prompts: bool = False
) -> Float[Tensor, " batch"] | Float[Tensor, "batch time"]:
    """The score of each response ``[B]``: the weighted sum of the rewards.

    `heedful.rewards.score` does the same for texts: it takes completions and returns lists of numbers.

    Args:
        rewards: as for `load_rewards`. Strings are loaded again at each call; for a loop, load them once.
        batch: responses, or the experience of a step.
        per_token: return scores per token ``[B, T]``: those of a reward that scores tokens are on their tokens, the others
            on the last token of the response. A row sums to the response's score.
        raw_prompts: prompts that are strings are meant as raw text, also for a reward model that learned conversations; False
            warns.

    Raises ConfigError, CheckpointError for rewards that are not there, RewardError for one that fails on a response.
    """
    _check_batch(batch)
    loaded = load_rewards(rewards, device=batch.mask.device)
    for _, reward in model_rewards(loaded) if not raw_prompts else ():
        if reward.inputs.renderer is not None:
            warn_of_strings(reward.inputs.renderer, [one.prompt for one in batch.completions])
    given = score_tokens(loaded, batch.completions)
    if given.failed:
        raise RewardError(f"{len(given.failed)} of {len(batch.completions)} responses have no score: {given.note}")
    totals = torch.tensor(given.totals, dtype=torch.float32, device=batch.mask.device)
    if not per_token:
        return totals
    dense = given.tokens or [[] for _ in given.totals]
    return core.spread_scores(totals, dense, batch.mask)


def logprobs(policy: Policy, batch: AnyBatch, *, micro_batch_size: int = 16) -> Float[Tensor, "batch time"]:
    """Log-probs of the response tokens under a policy ``[B, T]``, without gradients, at the temperature of the batch.

    Zero outside ``batch.mask``. With gradients: ``policy(batch.ids, batch.attention_mask, batch.mask).logprobs``. The batch
    may be the experience of a step, as for `score` and `values`.

    Raises ConfigError if the policy is on another device than the batch.
    """
    _check_pass(policy, batch)
    limit = MicroBatch(micro_batch_size)
    return token_outputs(policy, batch.batch, temperature=batch.temperature, micro_batch=limit).logprobs


def values(model: Policy | ValueModel, batch: AnyBatch, *, micro_batch_size: int = 16) -> Float[Tensor, "batch time"]:
    """Values of the states before each response token ``[B, T]``, by a policy with a value head or a value model.

    Raises ValueError for a policy without a value head, ConfigError for a model on another device than the batch.
    """
    _check_pass(model, batch)
    limit = MicroBatch(micro_batch_size)
    if isinstance(model, ValueModel):
        return token_values(model, batch.batch, micro_batch=limit)
    found = token_outputs(model, batch.batch, temperature=batch.temperature, micro_batch=limit).values
    if found is None:
        raise ValueError(
            "values: the policy has no value head; load it with Policy.from_pretrained(..., value_head=True)"
        )
    return found


def encode_prompts(
    policy: Policy, prompts: Iterable[AnyPrompt], *, raw_prompts: bool = False
) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Token ids of prompts, padded on the left, and a mask that is True at tokens: for your own engine.

    Args:
        policy: its tokenizer and chat template are used.
        prompts: as for `LocalEngine.generate`.
        raw_prompts: as for `LocalEngine`.

    Raises CheckpointError if the policy has no tokenizer, DataError for an invalid prompt.
    """
    renderer, asked = _renderer(policy), as_prompts(prompts)
    if not raw_prompts:
        warn_of_strings(renderer, asked, policy)
    ids = [renderer.prompt_ids(prompt.prompt, prompt.prefill) for prompt in asked]
    batch = collate(ids, [[]] * len(ids), pad_id=renderer.pad_id).to(policy.device)
    return batch.ids, batch.attention_mask


def as_responses(
    policy: Policy,
    prompts: Iterable[AnyPrompt],
    responses: Sequence[str | Sequence[int]],
    *,
    masks: Sequence[Sequence[bool]] | None = None,
    temperature: float = 1.0,
    micro_batch_size: int = 16,
    raw_prompts: bool = False,
) -> Responses:
    """A batch of given responses: from your own engine, from people, or from a file.

    >>> asked, said = ["2 + 2 =", "3 + 3 ="], [[17, 9, 9, 23, 2], [31, 2]]
    >>> batch = heedful.as_responses(policy, asked, said, masks=[[True, False, False, True, True], [True, True]])

    Args:
        policy: its tokenizer is used. The batch's ``logprobs`` are computed with its current weights.
        prompts: as for `LocalEngine.generate`.
        responses: one per prompt. To a text the end token is added. Sampled token ids are cut after their first end token;
            without one the response counts as truncated.
        masks: True for each token id that the policy wrote; others, such as the result of a tool, are read only. None: it
            wrote all. Such responses are not cut.
        temperature: the sampling temperature of the ids.
        micro_batch_size: rows per forward pass.
        raw_prompts: as for `LocalEngine`.

    Raises CheckpointError if the policy has no tokenizer, DataError for an invalid prompt, or if the numbers of prompts,
    responses and masks, or of a response's ids and its mask, differ.
    """
    renderer, asked = _renderer(policy), as_prompts(prompts)
    if isinstance(responses, str):
        raise DataError(f"as_responses: expected a list of responses, got {responses!r:.60}")
    if len(responses) != len(asked):
        raise DataError(
            f"as_responses: {counted(len(asked), 'prompt')} and {counted(len(responses), 'response')}; give one for each"
        )
    if masks is not None and len(masks) != len(responses):
        raise DataError(
            f"as_responses: {counted(len(responses), 'response')} and {counted(len(masks), 'mask')}; give one for each"
        )
    if not raw_prompts:
        warn_of_strings(renderer, asked, policy)
    stops = stop_ids(renderer, policy.lm.generation_config.eos_token_id)
    rows: list[tuple[list[int], list[int]]] = []
    for place, (one, written) in enumerate(zip(asked, responses, strict=True)):
        if isinstance(written, str):
            asked_ids, said, _ = renderer.written(one.prompt, one.prefill + written, prefill=one.prefill)
            rows.append((asked_ids, said))
        else:
            try:
                ids = list(map(operator.index, written))
            except TypeError as error:
                kind = type(written).__name__
                raise DataError(
                    f"as_responses: response {place} is a {kind}; give a text, or whole token ids"
                ) from error
            ids = _up_to_stop(ids, stops) if masks is None else ids
            rows.append((renderer.prompt_ids(one.prompt, one.prefill), ids))
        if masks is not None and len(masks[place]) != len(rows[-1][1]):
            raise DataError(
                f"as_responses: response {place} has {counted(len(rows[-1][1]), 'token')} and a mask of {len(masks[place])}; "
                "give one value for each token, of token ids"
            )
    own = [[True] * len(ids) for _, ids in rows] if masks is None else [list(map(bool, mask)) for mask in masks]
    batch = collate([ids for ids, _ in rows], [ids for _, ids in rows], pad_id=renderer.pad_id, own=own)
    batch = batch.to(policy.device)
    cut = [not ids or ids[-1] not in stops for _, ids in rows]
    read = token_outputs(policy, batch, temperature=temperature, micro_batch=MicroBatch(micro_batch_size)).logprobs
    completions = [
        renderer.completion(one, ids, truncated=is_cut, own=mask)
        for one, (_, ids), is_cut, mask in zip(asked, rows, cut, own, strict=True)
    ]
    return Responses(batch, torch.tensor(cut, device=batch.ids.device), read, completions, temperature)


def _check_batch(batch: AnyBatch) -> None:
    how = "engine.generate(prompts) or heedful.as_responses(policy, prompts, responses)"
    check_object(batch, (Responses, Experience), "batch", how)
    if not len(batch.mask):
        raise DataError("the batch has no responses")


def _renderer(policy: Policy) -> Renderer:
    check_object(policy, Policy, "policy", "heedful.Policy.from_pretrained(model, tokenizer)")
    if policy.tokenizer is None:
        raise CheckpointError("the policy has no tokenizer; load it with Policy.from_pretrained")
    return Renderer(policy.tokenizer)


def _up_to_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


def _check_pass(model: Policy | ValueModel, batch: AnyBatch) -> None:
    """Raises ConfigError if a model or a batch is something else, or if they are on two devices."""
    check_object(model, (Policy, ValueModel), "model", "heedful.Policy.from_pretrained(model, tokenizer)")
    _check_batch(batch)
    here, there = next(model.parameters()).device, batch.mask.device
    if here != there:
        raise ConfigError(
            f"the {'policy' if isinstance(model, Policy) else 'value model'} is on {here}, and the responses are on {there}; "
            f"move it there: .to({str(there)!r})"
        )
