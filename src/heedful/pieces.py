"""The pieces of the algorithms, to hold in a notebook: score responses, and read them with a model.

>>> policy = heedful.Policy.from_pretrained("runs/sft/final", value_head=True)
>>> reference, engine = policy.frozen_copy(), heedful.LocalEngine(policy, max_new_tokens=64)
>>> batch = engine.generate(["What is 2 + 2?"] * 16)
>>> scores = heedful.score([my_function, "rule:repetition"], batch)
>>> old, ref = heedful.logprobs(policy, batch), heedful.logprobs(reference, batch)

What is learned from these is pure functions: `heedful.core`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.engines.engine import Responses
from heedful.engines.teacher_forced import token_outputs, token_values
from heedful.errors import RewardError
from heedful.models.policy import Policy
from heedful.models.value_model import ValueModel
from heedful.rewards.resolve import AnyReward, resolve_rewards
from heedful.rewards.scoring import Ensemble, Reward
from heedful.rewards.scoring import score_tokens as score_completions
from heedful.types import MicroBatch


def load_rewards(rewards: Sequence[AnyReward] | AnyReward, *, device: str | torch.device = "cpu") -> list[Reward]:
    """Rewards for `score`, loaded once.

    Args:
        rewards: functions, `Reward` objects, or strings as in ``--rewards``, such as ``model:PATH`` or ``rule:repetition``.
        device: of reward models.

    Raises ConfigError, CheckpointError.
    """
    wanted = [rewards] if isinstance(rewards, str | Reward) or callable(rewards) else list(rewards)
    return resolve_rewards(wanted, device=torch.device(device), compute_dtype=torch.float32)


def score(rewards: Sequence[AnyReward] | AnyReward, batch: Responses) -> Float[Tensor, " batch"]:
    """The score of each response ``[B]``: the weighted sum of the rewards.

    Args:
        rewards: as `load_rewards` takes them. Those that are strings are loaded at each call: load them once for a loop.
        batch: responses.

    Raises ConfigError, CheckpointError for rewards that are not there, RewardError for one that fails on a response.
    """
    found = score_completions(Ensemble(tuple(load_rewards(rewards, device=batch.ids.device))), batch.completions)
    if found.failed:
        raise RewardError(f"{len(found.failed)} of {len(batch)} responses have no score: {found.note}")
    return torch.tensor(found.totals, dtype=torch.float32, device=batch.ids.device)


def logprobs(policy: Policy, batch: Responses, *, micro_batch_size: int = 16) -> Float[Tensor, "batch time"]:
    """Log-probs of the response tokens under a policy ``[B, T]``, without gradients, at the temperature of the batch.

    Zero outside ``batch.mask``. With gradients: ``policy(batch.ids, batch.attention_mask, batch.mask).logprobs``.
    """
    limit = MicroBatch(micro_batch_size)
    return token_outputs(policy, batch.rollouts.batch, temperature=batch.temperature, micro_batch=limit).logprobs


def values(model: Policy | ValueModel, batch: Responses, *, micro_batch_size: int = 16) -> Float[Tensor, "batch time"]:
    """Values of the states before each response token ``[B, T]``, by a policy with a value head or a value model.

    Raises ValueError for a policy without a value head.
    """
    limit = MicroBatch(micro_batch_size)
    if isinstance(model, ValueModel):
        return token_values(model, batch.rollouts.batch, micro_batch=limit)
    found = token_outputs(model, batch.rollouts.batch, temperature=batch.temperature, micro_batch=limit).values
    if found is None:
        raise ValueError(
            "values: the policy has no value head; load it with Policy.from_pretrained(..., value_head=True)"
        )
    return found
