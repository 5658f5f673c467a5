"""Several tokens as one action: the turns of a policy in a conversation, whose other tokens are somebody else's.

No gradient flows through anything here: the losses take rewards, advantages and returns as constants.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.core.masking import at_least_float32, same_shape

__all__ = ["action_rewards", "spread_over_actions", "turn_starts"]


@torch.no_grad()
def turn_starts(response_mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """True at the first token of each turn: where the policy's tokens begin, or begin again after those of somebody else.

        start_t = m_t (1 - m_{t-1})                m_{-1} = 0

    Args:
        response_mask: True at the policy's own tokens.

    As its mask, `gae` has one step per turn: gamma and lambda are per turn.
    """
    same_shape(2, response_mask=response_mask)
    return response_mask & ~nn.functional.pad(response_mask[:, :-1], (1, 0))


@torch.no_grad()
def action_rewards(
    rewards: Float[Tensor, "batch time"],
    response_mask: Bool[Tensor, "batch time"],
    starts: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The reward of each action at its first token: the sum over its tokens, zeros elsewhere.

        R_a = sum_{t in a} r_t                     in score units

    Args:
        rewards: per-token rewards, for example from `kl_shaped_rewards`.
        response_mask: True at the policy's own tokens.
        starts: True at the first token of each action, such as `turn_starts`. An action ends where the next one starts.

    Returns zeros where no action starts. A token before the first start belongs to no action.
    """
    same_shape(2, rewards=rewards, response_mask=response_mask, starts=starts)
    counted = torch.where(response_mask, at_least_float32(rewards), 0.0)
    action = starts.cumsum(dim=1)  # 0: before the first
    sums = torch.zeros_like(nn.functional.pad(counted, (1, 0))).scatter_add(1, action, counted)
    return torch.where(starts, sums.gather(1, action), 0.0)


@torch.no_grad()
def spread_over_actions(
    x: Float[Tensor, "batch time"], response_mask: Bool[Tensor, "batch time"], starts: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Each action's number at all of its tokens.

        y_t = x_{s(t)}                             s(t) the start of t's action

    Args:
        x: a number for each action at its first token, such as its advantage.
        response_mask: True at the policy's own tokens.
        starts: as in `action_rewards`.

    Returns zeros outside of the mask, and at tokens before the first start.
    """
    same_shape(2, x=x, response_mask=response_mask, starts=starts)
    place = torch.arange(starts.shape[1], device=starts.device)
    start = torch.where(starts, place, -1).cummax(dim=1).values
    return torch.where(response_mask & (start >= 0), at_least_float32(x).gather(1, start.clamp(min=0)), 0.0)
