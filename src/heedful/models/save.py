"""Save networks in Hugging Face format. Files that other tools must not read go into subfolders."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.errors import CheckpointError
from heedful.files import read_object, write_json
from heedful.kernels.device import HALF
from heedful.models.adapters import ADAPTER_CONFIG, has_adapters, save_adapter_config, save_model
from heedful.models.heads import not_finite
from heedful.models.policy import Policy
from heedful.models.reward_model import HEADS, RewardFacts, RewardModel, save_facts
from heedful.models.source import Source, explained, load_config
from heedful.models.value_model import ValueModel

VALUE_HEAD = Path("value_head") / "value_head.safetensors"
"""Path of the value head in a saved model's folder."""


def save_policy(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, *, stop_ids: Sequence[int]) -> None:
    """Save a policy (with adapters, only those) as a folder that transformers, vLLM and others load.

    ``stop_ids`` go into the generation config, so that other tools end responses at the same tokens. The value head
    goes into a subfolder, because vLLM reads every safetensors file beside config.json as weights of the language
    model.
    """
    check_finite(policy)
    policy.lm.generation_config.eos_token_id = list(stop_ids)
    save_model(policy.lm, folder)
    if has_adapters(policy.lm):
        policy.lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy.value_head is not None:
        save_tensors(policy.value_head.state_dict(), folder / VALUE_HEAD)


def save_value_model(model: ValueModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a value model: the trunk in Hugging Face format, the value head in a subfolder."""
    check_finite(model)
    save_model(model.trunk, folder)
    tokenizer.save_pretrained(folder)
    save_tensors(model.value_head.state_dict(), folder / VALUE_HEAD)


def save_reward_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, offset: float | None = None
) -> None:
    """Save a reward model (with adapters, only those and the head) for ``AutoModelForSequenceClassification``.

    ``offset`` is saved in a separate file; None is the model's own. Other tools ignore it and return the raw head's
    output.
    """
    check_finite(model)
    save_model(model.classifier, folder)
    tokenizer.save_pretrained(folder)
    save_facts(folder, RewardFacts(model.offset if offset is None else offset, model.reads))


def half_dtype_of(model: str | Source) -> torch.dtype | None:
    """The dtype of a model's files by its configuration, if that is half precision; else None. Raises CheckpointError."""
    dtype = load_config(model).dtype
    return dtype if dtype in HALF else None


def round_saved(folder: Path, dtype: torch.dtype) -> None:
    """Round the float32 weights of saved models, also in subfolders, to a half precision.

    Adapters and heads stay as they are, and so does a matrix with a number that float16 does not have.
    """
    for settings in folder.rglob("config.json"):
        for file in settings.parent.glob("model*.safetensors"):
            save_file(
                {name: _rounded(name, x, dtype) for name, x in load_tensors(file).items()}, file, {"format": "pt"}
            )
        for index in settings.parent.glob("model*.safetensors.index.json"):
            content = read_object(index, "save the model again")
            files = {settings.parent / name for name in content["weight_map"].values()}
            content["metadata"]["total_size"] = sum(x.nbytes for file in files for x in load_tensors(file).values())
            write_json(index, content)
        write_json(
            settings, read_object(settings, "save the model again") | {"dtype": str(dtype).removeprefix("torch.")}
        )


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != torch.float32 or name.split(".", maxsplit=1)[0] in HEADS:
        return tensor
    rounded = tensor.to(dtype)
    return rounded if bool(rounded.isfinite().all()) else tensor


def save_as_it_is(
    model: Policy | RewardModel | PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save a model in memory unchanged, with its tokenizer and value head.

    Raises CheckpointError if it cannot be saved.
    """
    pretrained = model if isinstance(model, PreTrainedModel) else _pretrained(model)
    if any(parameter.is_meta for parameter in pretrained.parameters()):
        raise CheckpointError("the model's weights are on the meta device, without values; load them first")
    check_saving([pretrained], tokenizer)
    if isinstance(model, RewardModel):
        save_reward_model(model, tokenizer, folder)
        return
    save_model(pretrained, folder)
    tokenizer.save_pretrained(folder)
    if isinstance(model, Policy) and model.value_head is not None:
        save_tensors(model.value_head.state_dict(), folder / VALUE_HEAD)


def save_all_but_weights(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a policy in memory without weights: configurations, tokenizer, value head. Raises CheckpointError."""
    check_saving([policy.lm], tokenizer)
    policy.lm.config.save_pretrained(folder)
    policy.lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy.value_head is not None:
        save_tensors(policy.value_head.state_dict(), folder / VALUE_HEAD)


def _pretrained(model: Policy | RewardModel) -> PreTrainedModel:
    return model.lm if isinstance(model, Policy) else model.classifier


def check_saving(models: Iterable[PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
    """Save models without weights to a temporary folder, to find errors before training.

    transformers loads some settings that it refuses to save. Raises CheckpointError with the file.
    """
    with tempfile.TemporaryDirectory(prefix="heedful-") as folder:
        for model in models:
            name = model.config._name_or_path
            with _writing(name, "config.json"):
                model.config.save_pretrained(folder)
            if model.can_generate():
                with _writing(name, "generation_config.json"):
                    model.generation_config.save_pretrained(folder)
            if has_adapters(model):
                with _writing(name, ADAPTER_CONFIG):
                    save_adapter_config(model, Path(folder))
        with _writing(tokenizer.name_or_path, "tokenizer_config.json or tokenizer.json"):
            tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _writing(name: str, file: str) -> Iterator[None]:
    """Converts errors to a CheckpointError with file and reason, except errors of the disk."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if not line.startswith("GenerationConfig is inv")]
        raise CheckpointError(
            f"{name}: its {file} cannot be saved again ({lines[0] if lines else type(error).__name__}), so a model "
            "trained from it could not be saved; correct that file"
        ) from error


def check_finite(module: nn.Module) -> None:
    """Raises CheckpointError if a trainable weight is not finite: such a model is never saved."""
    trainable = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    broken = not_finite(trainable.items())
    if broken:
        raise CheckpointError(
            f"{len(broken)} of {len(trainable)} trainable weights are not finite (first: {broken[0]}), so the "
            "model is not saved; start again from the last checkpoint with a lower --learning-rate, or with --dtype float32"
        )


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write named tensors to a safetensors file; creates its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the named tensors of a safetensors file. Raises CheckpointError if it cannot be read."""
    with explained(str(path), "safetensors file"):
        return load_file(path)
