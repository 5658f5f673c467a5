"""Load networks from checkpoints in Hugging Face format: language models, policies, value models."""

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from heedful.errors import CheckpointError
from heedful.kernels.attention import use_attention
from heedful.kernels.gated_mlp import use_lean_mlps
from heedful.kernels.norms import use_lean_norms
from heedful.kernels.products import use_fast_products
from heedful.kernels.rotary import use_lean_rotations
from heedful.kernels.stored import store_matrices
from heedful.models.adapters import merge_adapters
from heedful.models.generation import mend_generation_config
from heedful.models.heads import check_causal
from heedful.models.lora import experts_but
from heedful.models.policy import Policy
from heedful.models.quantize import FourBit, say_unquantized
from heedful.models.rows import rows_of
from heedful.models.save import VALUE_HEAD, load_tensors
from heedful.models.settings_files import check_generation
from heedful.models.source import Source, explained, resolve
from heedful.models.text_part import read_weights
from heedful.models.value_model import ValueModel

transformers.utils.logging.disable_progress_bar()


def load_causal_lm(model: str | Source, four_bit: FourBit | None = None) -> PreTrainedModel:
    """Load a causal language model, with float32 weights and its adapters merged into it.

    Args:
        model: a folder, an adapter folder, a name on the Hub, or a `Source`.
        four_bit: load linear layers in 4 bits; None keeps float32.

    Raises CheckpointError if weights are missing.
    """
    source = resolve(model)
    with explained(source.folder, "causal language model"):
        lm, info = read_weights(AutoModelForCausalLM, source, **(four_bit.arguments() if four_bit else {}))
        refuse_hub_adapters(lm, source.folder)
        say_unquantized(lm, source.folder, four_bit)
        lm = merge_adapters(lm, source.adapters)
        for folder in source.adapters:
            if (folder / "generation_config.json").is_file():
                lm.generation_config = GenerationConfig.from_pretrained(folder)
    if info["missing_keys"]:
        raise CheckpointError(
            f"{source.folder}: not a complete causal language model; it lacks {len(info['missing_keys'])} weights, "
            f"first {sorted(info['missing_keys'])[0]}"
        )
    with explained(source.folder, "generation_config.json"):
        if source.adapters or not Path(source.base).is_dir():  # files of a plain local model were checked by themselves
            check_generation(Path(source.folder, "generation_config.json"), lm.generation_config.to_dict(), rows_of(lm))
        mend_generation_config(lm, source.folder)
    return use_attention(learn_every_embedding(lm))


def load_trunk(model: str | Source, four_bit: FourBit | None = None) -> PreTrainedModel:
    """Load the trunk of a model, without its head; otherwise as `load_causal_lm`.

    Raises CheckpointError if weights are missing.
    """
    source = resolve(model)
    with explained(source.folder, "model"):
        trunk, info = read_weights(AutoModel, source, **(four_bit.arguments() if four_bit else {}))
        refuse_hub_adapters(trunk, source.folder)
        say_unquantized(trunk, source.folder, four_bit)
        trunk = merge_adapters(trunk, source.adapters)
    if info["missing_keys"]:
        raise CheckpointError(f"{source.folder}: its trunk lacks weights, first {sorted(info['missing_keys'])[0]}")
    return use_attention(learn_every_embedding(trunk))


def refuse_hub_adapters(model: PreTrainedModel, name: str) -> None:
    """Refuse adapters on the Hub: transformers loads their base and leaves the adapters unmerged.

    Raises CheckpointError.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"{name} holds adapters, and is not a local folder: download it, and give the folder")


def learn_every_embedding(model: PreTrainedModel) -> PreTrainedModel:
    """Let the padding token's embedding learn, in place.

    transformers freezes it, and it is often also the end-of-sequence token. (A row that nobody trained is another matter:
    `heedful.kernels.untrained_rows`.)
    """
    model.get_input_embeddings().padding_idx = None
    return model


def load_policy(
    model: str | Source,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    with_value_head: bool = False,
    four_bit: FourBit | None = None,
    stored: torch.dtype = torch.float32,
    float32_experts: str = "",
) -> Policy:
    """Load a policy, with its saved value head if it has one and ``with_value_head`` asks for it.

    Args:
        model: a folder, an adapter folder, a name on the Hub, or a `Source`.
        device: where to put it.
        compute_dtype: dtype of its matrix products.
        with_value_head: add a value head, zero unless one was saved.
        four_bit: load linear layers in 4 bits; None keeps float32.
        stored: dtype of the matrices in memory, which is also how they arrive on the device.
        float32_experts: the experts of a mixture that stay in float32, named as by ``--lora-targets``.

    Raises CheckpointError if the model is missing, incomplete or of an unsupported kind.
    """
    source = resolve(model)
    lm = load_causal_lm(source, four_bit)
    with explained(source.folder, "policy"):  # which runs the model once
        policy = Policy(lm, with_value_head=with_value_head, compute_dtype=compute_dtype)
    head_file = Path(source.folder) / VALUE_HEAD
    if policy.value_head is not None and head_file.is_file():
        load_head(policy.value_head, head_file)
    store_matrices(policy.lm, stored, experts=experts_but(policy.lm, float32_experts))
    use_fast_products(policy.lm, device, compute_dtype)
    use_lean_norms(policy.lm, device)
    use_lean_mlps(policy.lm, device)
    use_lean_rotations(policy.lm, device)
    return policy.to(device)


def load_value_model(
    model: str | Source,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    trunk: PreTrainedModel | None = None,
    four_bit: FourBit | None = None,
    stored: torch.dtype = torch.float32,
    float32_experts: str = "",
) -> ValueModel:
    """Load a value model on the trunk of any causal model, with its saved value head if it has one.

    Args:
        model: a folder, an adapter folder, a name on the Hub, or a `Source`.
        device: where to put it.
        compute_dtype: dtype of its matrix products.
        trunk: the trunk of ``model``, if it is already in memory; it stays as it is.
        four_bit: load linear layers in 4 bits; None keeps float32.
        stored: dtype of the matrices of a trunk that is loaded.
        float32_experts: the experts of a mixture that stay in float32, named as by ``--lora-targets``.

    Raises CheckpointError if the model is missing, incomplete or looks ahead.
    """
    source = resolve(model)
    is_new = trunk is None
    trunk = load_trunk(source, four_bit) if trunk is None else trunk
    with explained(source.folder, "value model"):
        check_causal(trunk, source.name)
    value_model = ValueModel(trunk, trunk.config.get_text_config(decoder=True).hidden_size, compute_dtype=compute_dtype)
    head_file = Path(source.folder) / VALUE_HEAD
    if head_file.is_file():
        load_head(value_model.value_head, head_file)
    if is_new:
        store_matrices(trunk, stored, experts=experts_but(trunk, float32_experts))
        use_fast_products(trunk, device, compute_dtype)
        use_lean_norms(trunk, device)
        use_lean_mlps(trunk, device)
        use_lean_rotations(trunk, device)
    return value_model.to(device)


def load_head(head: nn.Linear, path: Path) -> None:
    """Load the weights of a scalar head. Raises CheckpointError if they do not fit."""
    tensors = load_tensors(path)
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    linear = {name: wanted[name] for name in ("weight", "bias")}
    if found not in (wanted, linear):  # heads were only linear once; the rest of a value head is zero then
        hint = (
            "the head of a shared critic, which a critic of its own cannot use" if "out.weight" in found else str(found)
        )
        raise CheckpointError(f"{path}: holds {hint}; the model needs {wanted}: it belongs to another model")
    head.load_state_dict(tensors, strict=False)
