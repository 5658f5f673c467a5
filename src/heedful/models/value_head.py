"""The value head of a policy: a critic that reads the policy's trunk."""

import torch
from torch import Tensor, nn

from heedful.kernels.layout import scatter

WIDTH = 256
"""Of the hidden layer."""


class ValueHead(nn.Linear):
    """Values of the states before response tokens, zero at the start.

        V_t = w . h_t + b + u . gelu(U x_t + c),   x_t = LayerNorm([h_t, h_1, mean(h_1 ... h_t)])

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

    def forward(self, before: Tensor, response_mask: Tensor) -> Tensor:  # type: ignore[override]  # a row is read as a whole
        """Values ``[tokens]``.

        Args:
            before: states ``[tokens, hidden]`` before each response token, row after row.
            response_mask: ``[batch, time]``, True at response tokens.
        """
        before = before.to(self.weight.dtype)
        hidden = nn.functional.gelu(self.hidden(_read(before, response_mask)))
        return super().forward(before).squeeze(-1) + self.out(hidden).squeeze(-1)


def _read(before: Tensor, response_mask: Tensor) -> Tensor:
    """``[tokens, 3 hidden]``: each state, its row's first, and the mean of its row's so far; normalised."""
    width = before.shape[-1]
    in_place = scatter(before, response_mask[..., None].expand(*response_mask.shape, width))
    seen = response_mask.cumsum(dim=1).clamp(min=1)
    mean = in_place.cumsum(dim=1) / seen[..., None]
    start = response_mask.byte().argmax(dim=1)
    first = in_place[torch.arange(len(in_place), device=before.device), start][:, None].expand_as(in_place)
    read = torch.cat([before, first[response_mask], mean[response_mask]], dim=-1)
    return nn.functional.layer_norm(read, read.shape[-1:])
