"""Critics: a value head on the policy's trunk, or a value model with its own trunk, possibly initialised from a reward
model."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.devices import on_host, upload
from heedful.errors import CheckpointError
from heedful.kernels.device import autocast, scale_gradient
from heedful.kernels.packing import before_each, marked, response_tokens, scatter, token_states
from heedful.models.heads import check_causal, scalar_head
from heedful.models.reward_model import RewardModel


class ValueModel(nn.Module):
    """A trunk with a scalar head: values of the states before each response token.

    Args:
        trunk: a causal model without its head.
        hidden_size: width of the trunk's hidden states.
        compute_dtype: as in `heedful.models.policy.Policy`.

    The head is zero-initialised, so all values are 0 at the start.
    """

    def __init__(self, trunk: PreTrainedModel, hidden_size: int, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.compute_dtype = compute_dtype
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.value_head = scalar_head(hidden_size, std=0.0).to(torch.promote_types(trunk.dtype, torch.float32))

    def forward(self, ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> Tensor:
        """Values ``[batch, time]``, zero outside the mask. Arguments as in `Policy.forward`."""
        responses = response_tokens(attention_mask, response_mask)
        with autocast(ids.device, self.compute_dtype):
            before = token_states(self.trunk, ids, attention_mask, before_each(responses))
        values = self.value_head(before.to(self.value_head.weight.dtype)).squeeze(-1)
        return scale_gradient(scatter(values, response_mask), self.grad_scaler)

    def dummy_loss(self) -> Tensor:
        """Zero loss that touches every weight, so that an idle rank joins the collective."""
        ids = torch.tensor([[1, 2]], device=self.trunk.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return 0.0 * self(ids, mask, mask[:, 1:]).sum()


WIDTH = 128
"""Width of the hidden layer."""


class ValueHead(nn.Linear):
    """Values of the states before response tokens, zero-initialised.

        V_t = w . h_t + b + u . silu(U x_t + c),   x_t = LayerNorm([h_t, h_1, mean(h_1 ... h_t)])

    h_t is the trunk's hidden state before token t, and h_1 that before the first. A response's value depends on the
    prompt and on all tokens so far, but the latest hidden state of a language model has little of either that a linear
    map can read. So the head also reads the state after the prompt and the mean of the states since.

    Args:
        hidden_size: width of the trunk's hidden states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.hidden = nn.Linear(3 * hidden_size, WIDTH)
        self.out = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, states: Tensor, response_mask: Tensor) -> Tensor:  # type: ignore[override]  # needs whole rows
        """Values ``[tokens]``, row after row.

        Args:
            states: ``[tokens, hidden]``, before each response token, row after row.
            response_mask: ``[batch, time]``, True at response tokens.
        """
        states = states.to(self.weight.dtype)
        hidden = nn.functional.silu(self.hidden(_read(states, response_mask)))
        return super().forward(states).squeeze(-1) + self.out(hidden).squeeze(-1)


def _read(states: Tensor, response_mask: Tensor) -> Tensor:
    """``[tokens, 3 hidden]``: each state, the first of its row, and the running mean of its row; normalised."""
    mask = on_host(response_mask)
    counts = mask.sum(dim=1)
    first = (counts.cumsum(dim=0) - counts)[mask.nonzero()[:, 0]]
    read = torch.cat([states, states[upload(first, states.device)], _running_mean(states, response_mask)], dim=-1)
    return nn.functional.layer_norm(read, read.shape[-1:])


def _running_mean(states: Tensor, response_mask: Tensor) -> Tensor:
    seen = response_mask.cumsum(dim=1).clamp(min=1)
    return marked(scatter(states, response_mask).cumsum(dim=1) / seen[..., None], response_mask)


def value_model_from(reward_model: RewardModel, name: str) -> ValueModel:
    """A value model from the trunk and head of a decoder reward model. Both share the trunk's weights.

        V(state) = head(h) - offset

    h is the hidden state at the state's last token. So the value after a complete response is the response's score, and
    before its end the reward model's score of the text so far (Stiennon et al. 2020, section 3.4; Ouyang et al. 2022,
    appendix C.4).

    Raises CheckpointError if the model is not causal, or has no single linear head named ``score`` (encoders).
    """
    classifier = reward_model.classifier
    trunk, head = classifier.base_model, getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise CheckpointError(
            f"{name}: {type(classifier).__name__} has no linear head named score to start a critic from; "
            "use --critic separate"
        )
    check_causal(trunk, name)
    model = ValueModel(trunk, head.in_features, compute_dtype=reward_model.compute_dtype)
    offset = reward_model.offset
    with torch.no_grad():
        model.value_head.weight.copy_(head.weight)
        model.value_head.bias.fill_((0.0 if head.bias is None else float(head.bias)) - offset)
    return model.to(trunk.device)


@torch.no_grad()
def normalise_values(model: ValueModel, *, mean: float, std: float, reward_weight: float = 1.0) -> None:
    """Rescale a value model of raw scores to weighted and normalised scores, in place.

        V <- (reward_weight V - mean) / std

    ``mean`` and ``std`` are those of the score normalisation; ``reward_weight`` is this reward model's weight.
    """
    model.value_head.weight.mul_(reward_weight).div_(std)
    model.value_head.bias.mul_(reward_weight).sub_(mean).div_(std)
