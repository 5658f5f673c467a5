"""A critic that starts as a reward model (Stiennon et al. 2020, section 3.4; Ouyang et al. 2022, appendix C.4)."""

import torch
from torch import nn

from heedful.errors import CheckpointError
from heedful.models.heads import check_causal
from heedful.models.reward_model import RewardModel
from heedful.models.value_model import ValueModel


def value_model_from(reward_model: RewardModel, name: str) -> ValueModel:
    """A value model made of the trunk and head of a decoder reward model. They share the trunk's weights.

        V(state) = head(h) - offset

    h is the hidden state of the state's last token. So after a whole response the value is the response's score, and
    before the response ends it is the reward model's score of the text so far.

    Args:
        reward_model: a decoder with a linear head named ``score``.
        name: what error messages call it.

    Raises CheckpointError if the model looks ahead, or has no single linear head, as with encoders.
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
    """Turn values of raw scores into values of weighted and normalised scores, in place.

        V <- (reward_weight V - mean) / std

    Args:
        model: the value model.
        mean, std: of the normalisation of scores.
        reward_weight: weight of this reward model among the rewards.
    """
    model.value_head.weight.mul_(reward_weight).div_(std)
    model.value_head.bias.mul_(reward_weight).sub_(mean).div_(std)
