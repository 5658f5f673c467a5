"""Writing networks in Hugging Face format; what other tools must not read lies in folders of its own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from heedful.checkpoints.adapters import has_adapters, save_model
from heedful.checkpoints.score_offset import save_offset
from heedful.checkpoints.source import explained
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.value_model import ValueModel

VALUE_HEAD = Path("value_head") / "value_head.safetensors"
"""Where a saved model's value head lies in its folder."""


def save_policy(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, *, stop_ids: Sequence[int]) -> None:
    """Write a folder that transformers, vLLM and others load; of a policy with adapters, the adapters.

    ``stop_ids`` go into its generation config, so that generation ends elsewhere where it ends here. The value head lies in
    a folder of its own: vLLM reads every safetensors file beside config.json as weights of the language model.
    """
    policy.lm.generation_config.eos_token_id = list(stop_ids)
    save_model(policy.lm, folder)
    if has_adapters(policy.lm):
        policy.lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy.value_head is not None:
        save_tensors(policy.value_head.state_dict(), folder / VALUE_HEAD)


def save_value_model(model: ValueModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the trunk in Hugging Face format with the value head in a folder of its own."""
    save_model(model.trunk, folder)
    tokenizer.save_pretrained(folder)
    save_tensors(model.value_head.state_dict(), folder / VALUE_HEAD)


def save_reward_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, offset: float | None = None
) -> None:
    """Write a folder that ``AutoModelForSequenceClassification`` loads, with its tokenizer; adapters with the head.

    ``offset`` is written beside it (None: the model's own); that class knows nothing of it and gives the raw head.
    """
    save_model(model.classifier, folder)
    tokenizer.save_pretrained(folder)
    save_offset(folder, model.offset if offset is None else offset)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A few named tensors as a safetensors file, with the folder it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a safetensors file. Raises CheckpointError where it cannot be read."""
    with explained(str(path), "safetensors file"):
        return load_file(path)
