"""A critic that starts as a reward model (Stiennon et al. 2020, section 3.4; Ouyang et al. 2022, appendix C.4)."""

import torch
from torch import nn

from heedful.errors import CheckpointError
from heedful.models.heads import check_causal
from heedful.models.reward_model import RewardModel
from heedful.models.value_model import ValueModel


def value_model_from(reward_model: RewardModel, name: str) -> ValueModel:
    """The trunk and head of a decoder reward model as a value model; they share their weights.

        V(state) = head(h) - offset

    h is the hidden state of the state's last token. So after a whole response the value is the response's score: the
    value before a further token would be read there. Before its tokens it is what the reward model says of the text so
    far.

    Raises CheckpointError where the model reads tokens to come or has no single linear head, as encoders do.
    """
    classifier = reward_model.classifier
    trunk, head = classifier.base_model, getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise CheckpointError(
            f"{name}: {type(classifier).__name__} has no linear head named score to start a critic from"
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
    """Make the values those of weighted and normalised scores: ``V <- (reward_weight V - mean) / std``."""
    model.value_head.weight.mul_(reward_weight).div_(std)
    model.value_head.bias.mul_(reward_weight).sub_(mean).div_(std)
