"""The value head of a policy: a critic that reads the policy's trunk."""

import torch
from torch import Tensor, nn

WIDTH = 128
"""Of the hidden layer."""


class ValueHead(nn.Linear):
    """Values of the states before response tokens, zero at the start.

        V_t = w . h_t + b + u . silu(U x_t + c),   x_t = LayerNorm([h_t, h_1, mean(h_1 ... h_t)])

    h_t is the trunk's state before token t, and h_1 that before the first. What a response is worth depends on the question
    and on everything said so far; a linear map can read little of either from a language model's latest state, so the head
    also reads the state after the prompt and the mean of the states since.

    Args:
        hidden_size: the width of the trunk.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.hidden = nn.Linear(3 * hidden_size, WIDTH)
        self.out = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, states: Tensor, response_mask: Tensor) -> Tensor:  # type: ignore[override]  # a row is read as a whole
        """Values ``[tokens]``, row after row.

        Args:
            states: ``[batch, time, hidden]``, before each response token; zeros elsewhere.
            response_mask: ``[batch, time]``, True at response tokens.
        """
        states = states.to(self.weight.dtype)
        hidden = nn.functional.silu(self.hidden(_read(states, response_mask)))
        return super().forward(states[response_mask]).squeeze(-1) + self.out(hidden).squeeze(-1)


def _read(states: Tensor, response_mask: Tensor) -> Tensor:
    """``[tokens, 3 hidden]``: each state, its row's first, and the mean of its row's so far; normalised."""
    seen = response_mask.cumsum(dim=1).clamp(min=1)
    mean = states.cumsum(dim=1) / seen[..., None]
    start = response_mask.byte().argmax(dim=1)
    first = states[torch.arange(len(states), device=states.device), start]
    row = response_mask.nonzero()[:, 0]
    read = torch.cat([states[response_mask], first[row], mean[response_mask]], dim=-1)
    return nn.functional.layer_norm(read, read.shape[-1:])
