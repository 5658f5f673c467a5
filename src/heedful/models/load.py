"""Load networks from checkpoints in Hugging Face format: language models, policies, value models, reward models."""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from heedful.configs.options import MemoryOptions
from heedful.devices import capabilities
from heedful.display import counted
from heedful.errors import CheckpointError, ConfigError
from heedful.kernels.attention import use_attention
from heedful.kernels.cpu.layers import use_lean_layers
from heedful.kernels.cpu.products import use_fast_products
from heedful.kernels.weights import computing_in_float32, store_matrices
from heedful.models.adapters import (
    attach_adapter,
    expert_parameters,
    experts_but,
    merge_adapters,
    read_adapter_config,
    whole_weights,
)
from heedful.models.heads import check_causal, refuse_not_finite
from heedful.models.origins import OriginHead, origin_head, refuse_openrlhf
from heedful.models.policy import Policy
from heedful.models.reward_model import HEADS, RewardModel, load_facts, padding_id, score_head
from heedful.models.save import VALUE_HEAD, load_tensors
from heedful.models.shape import rows_of
from heedful.models.source import Source, check_generation, explained, half_of_file, leave_code, load_config, resolve
from heedful.models.tokenizer import PLAIN_TEMPLATE
from heedful.models.value_model import ValueModel
from heedful.types import Reading

transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class FourBit:
    """Loads a model's linear layers in 4 bits: NF4, with quantised scales (Dettmers et al. 2023)."""

    device: torch.device
    compute_dtype: torch.dtype

    def arguments(self, *, keep: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of ``from_pretrained``. Layers in ``keep`` are not quantised, by default the output head."""
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            llm_int8_skip_modules=list(keep) or None,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.compute_dtype,
        )
        return {"quantization_config": quantization, "device_map": {"": self.device}}


def say_unquantized(model: PreTrainedModel, name: str, how: FourBit | None) -> None:
    """Warn that the experts of a mixture were not quantised, if 4 bits were requested."""
    experts = sum(model.get_parameter(parameter).numel() for parameter in expert_parameters(model)) if how else 0
    if experts:
        warnings.warn(
            f"--quantize 4bit: {name} is a mixture whose experts ({experts:,} weights) are not linear layers, so they are "
            "not quantised: experts with adapters take 4 bytes per weight, others 2; --lora-targets with only linear layers, "
            "such as q_proj,k_proj,v_proj,o_proj, adds no adapters to experts",
            stacklevel=3,
        )


def four_bit(options: MemoryOptions, device: torch.device, compute_dtype: torch.dtype) -> FourBit | None:
    """Quantisation for the base of adapters; None if off."""
    return FourBit(device, compute_dtype) if options.quantize == "4bit" else None


def check_bitsandbytes(options: MemoryOptions, models: Sequence[str], device: torch.device) -> None:
    """Check settings that need bitsandbytes, before any of these models is loaded in 4 bits.

    Raises ConfigError if they do not work on this device, and CheckpointError for a missing model.
    """
    if options.quantize == "4bit":
        _check(f"--quantize {options.quantize}", device)
        for model in models:
            if resolve(model).adapters:
                raise ConfigError(
                    f"--quantize 4bit: {model} has adapters, which cannot be merged into 4-bit weights without loss; write "
                    f"a plain model first: heedful merge --adapter {model} --output FOLDER"
                )
    if options.optimizer == "adamw-8bit":
        _check(f"--optimizer {options.optimizer}", device)


def _check(flag: str, device: torch.device) -> None:
    if not capabilities(device).bitsandbytes:
        raise ConfigError(f"{flag} needs a CUDA device, but this run is on {device.type}; leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f'{flag} needs bitsandbytes, which is not installed: pip install "heedful[gpu]"')


class LoadOptions(TypedDict, total=False):
    """Device and precision of a loaded model."""

    device: Required[torch.device]
    compute_dtype: Required[torch.dtype]
    """Dtype of its matrix products."""
    stored: torch.dtype | None
    """Storage dtype of its matrices, float32 by default; heads stay in float32. None is the dtype of the file."""
    four_bit: FourBit | None
    """Load linear layers in 4 bits."""
    float32_experts: str
    """Experts of a mixture that stay in float32, in the form of ``--lora-targets``."""


def load_causal_lm(
    model: str | Source, four_bit: FourBit | None = None, *, as_in_file: bool = False
) -> PreTrainedModel:
    """Load a causal language model, with float32 weights (or linear layers in 4 bits) and merged adapters.

    With ``as_in_file``, matrices that its files have in half precision stay so (`read_weights`). ``model`` is a folder, an
    adapter folder, a name on the Hub, or a `Source`. Raises CheckpointError if weights are missing, or for a classifier such
    as a reward model, which with tied embeddings has all weights.
    """
    source = resolve(model)
    _refuse_classifier(source.folder, next(iter(load_config(source).architectures or ()), ""))
    _refuse_critic(source)
    refuse_openrlhf(source)
    with explained(source.folder, "causal language model"):
        lm, missing = _read_merged(AutoModelForCausalLM, source, four_bit, as_in_file=as_in_file)
        for folder in source.adapters:
            if (folder / "generation_config.json").is_file():
                lm.generation_config = GenerationConfig.from_pretrained(folder)
    if missing:
        raise CheckpointError(
            f"{source.folder}: incomplete causal language model: it lacks {counted(len(missing), 'weight')}, first "
            f"{missing[0]}; download it again"
        )
    with explained(source.folder, "generation_config.json"):
        if source.adapters or not Path(source.base).is_dir():  # files of a plain local model are already checked
            check_generation(Path(source.folder, "generation_config.json"), lm.generation_config.to_dict(), rows_of(lm))
        make_generation_config_savable(lm, source.folder)
    return use_attention(learn_every_embedding(lm))


def _refuse_classifier(name: str, kind: str) -> None:
    if kind.endswith("ForSequenceClassification"):
        raise CheckpointError(
            f"{name} is a reward model ({kind}), which cannot generate; use a causal language model, such as the "
            "final/ of heedful sft"
        )


def _refuse_critic(source: Source) -> None:
    """A critic of its own is a trunk with a value head. It has a language model's weights if embeddings are its output, or if
    it is adapters of one."""
    kind = next(iter(load_config(source).architectures or ()), "")
    is_trunk = kind.endswith("Model") and not kind.endswith("LMHeadModel")
    is_trunk |= any(read_adapter_config(one).get("task_type") == "FEATURE_EXTRACTION" for one in source.adapters)
    if is_trunk and (Path(source.folder) / VALUE_HEAD).is_file():
        raise CheckpointError(
            f"{source.folder} is a critic (of heedful critic, or the value_model/ of a run), which cannot generate; use a "
            "causal language model, such as the final/ of heedful sft; --critic separate --value-model names a critic"
        )


def check_causal_lm(lm: object) -> None:
    """Raises CheckpointError for an object in memory that `load_causal_lm` refuses from a folder, or loads in part."""
    kind = type(lm).__name__
    if not isinstance(lm, PreTrainedModel):
        raise CheckpointError(
            f"the model in memory is a {kind}, not a causal language model of transformers; of PEFT's models pass "
            "model.merge_and_unload(), or the folder of their adapters"
        )
    _refuse_classifier("the model in memory", kind)
    name = f"the model in memory ({kind})"
    if getattr(lm, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"{name} has adapters: pass their folder, or merge them with PEFT's merge_and_unload()")
    text = text_part(lm.config, name, "causal language model")
    if text is not None:
        raise CheckpointError(
            f"{name}: only the text part ({text.model_type}) of a {lm.config.model_type} model is trained; save the model, "
            "and pass its folder"
        )
    if type(lm.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        expected = MODEL_FOR_CAUSAL_LM_MAPPING[type(lm.config)]
        if not isinstance(lm, expected) and not _has_own_code(lm):
            raise CheckpointError(
                f"{name} is no causal language model, which of this kind is a {expected.__name__}: load it with "
                "AutoModelForCausalLM"
            )
    elif not _has_own_code(lm):
        raise CheckpointError(
            f"{name}: transformers has no causal language model for {lm.config.model_type}; use one of those in "
            "docs/architectures.md"
        )


def _has_own_code(lm: PreTrainedModel) -> bool:
    """Whether its class is not one of transformers. Such a class is judged by what it computes."""
    return not type(lm).__module__.startswith("transformers.models.")


def load_trunk(model: str | Source, four_bit: FourBit | None = None, *, as_in_file: bool = False) -> PreTrainedModel:
    """Load the trunk of a model, without its head; otherwise like `load_causal_lm`."""
    source = resolve(model)
    with explained(source.folder, "model"):
        trunk, missing = _read_merged(AutoModel, source, four_bit, as_in_file=as_in_file)
    if missing:
        raise CheckpointError(f"{source.folder}: its trunk lacks weights, first {missing[0]}")
    return use_attention(learn_every_embedding(trunk))


def _read_merged(
    auto: Any, source: Source, four_bit: FourBit | None, *, as_in_file: bool
) -> tuple[PreTrainedModel, list[str]]:
    """A model with merged adapters, and the names of weights missing in its files."""
    quantization = four_bit.arguments() if four_bit else {}
    model, report = read_weights(auto, source, as_in_file=as_in_file, **quantization)
    _refuse_hub_adapters(model, source.folder)
    say_unquantized(model, source.folder, four_bit)
    model = merge_adapters(model, source.adapters)
    refuse_not_finite(model, source.folder)
    return model, sorted(report["missing_keys"])


def _refuse_hub_adapters(model: PreTrainedModel, name: str) -> None:
    """Raises CheckpointError for adapters on the Hub, which transformers would load without merging."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"{name} has adapters but is not a local folder: download it, and pass the folder")


def learn_every_embedding(model: PreTrainedModel) -> PreTrainedModel:
    """Make the padding token's embedding trainable, in place.

    transformers freezes it, but it is often also the end-of-sequence token. (For untrained rows see
    `heedful.kernels.weights.hold_untrained_rows`.)
    """
    model.get_input_embeddings().padding_idx = None
    return model


def load_policy(model: str | Source, *, with_value_head: bool = False, **options: Unpack[LoadOptions]) -> Policy:
    """Load a policy. ``with_value_head`` adds a value head: the saved one, also of other libraries
    (`heedful.models.origins`), or else zero-initialised.

    Raises CheckpointError if the model is missing, incomplete or unsupported.
    """
    source = resolve(model)
    lm = load_causal_lm(source, options.get("four_bit"), as_in_file=_as_in_file(options))
    with explained(source.folder, "policy"), computing_in_float32(lm):  # runs the model once
        policy = Policy(lm, with_value_head=with_value_head, compute_dtype=options["compute_dtype"])
    if policy.value_head is not None:
        load_saved_head(policy.value_head, source)
    _use_kernels(policy.lm, **options)
    return policy.to(options["device"])


def load_value_model(
    model: str | Source, *, trunk: PreTrainedModel | None = None, **options: Unpack[LoadOptions]
) -> ValueModel:
    """Load a value model on the trunk of any causal model, with its saved value head, if any, also of other libraries.

    ``trunk`` is that of ``model`` if already in memory; it is not changed. Raises CheckpointError if the model is
    missing, incomplete or not causal.
    """
    source = resolve(model)
    is_new = trunk is None
    trunk = load_trunk(source, options.get("four_bit"), as_in_file=_as_in_file(options)) if trunk is None else trunk
    with explained(source.folder, "value model"):
        check_causal(trunk, source.name)
    hidden_size = trunk.config.get_text_config(decoder=True).hidden_size
    value_model = ValueModel(trunk, hidden_size, compute_dtype=options["compute_dtype"])
    load_saved_head(value_model.value_head, source)
    if is_new:
        _use_kernels(trunk, **options)
    return value_model.to(options["device"])


def load_reward_model(
    model: str | Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int | None = None,
    merged: bool = False,
    **options: Unpack[LoadOptions],
) -> RewardModel:
    """Load a reward model, or start one from a language model.

    Args:
        model: a folder, an adapter folder, a name on the Hub, or a `Source`.
        tokenizer: the model's; a padding token may be added to it.
        seed: None to score; the checkpoint must then have a trained head. A number to train, from any language model.
        merged: merge all adapters; always done with a seed. Otherwise the last ones stay separate, so that scores are
            bit for bit those of the run that trained them.
        options: device and precision.

    With a seed, a missing head gets weights N(0, 1/(d+1)), a standard deviation of 1/sqrt(d+1) (Stiennon et al. 2020),
    and a padding token is added if the tokenizer has no separate one, because the score is read at the last token that
    is not padding. A trained model keeps its padding token, so its scores are read at the same token as before.

    The end of the text it reads of a conversation (``reads``) is set in its `heedful.json`. A model without one comes
    from another tool and reads the full output of its chat template; a new head is trained on texts that end with the
    turn. LLaMA-Factory and OpenRLHF (`heedful.models.origins`) score a policy's own tokens, which end with the turn.

    Raises CheckpointError if the model has more than one output, no head, or no padding token.
    """
    source = resolve(model)
    origin = _origin_reward_head(source, trains=seed is not None)
    name, adapters, four_bit = source.folder, source.adapters, options.get("four_bit")
    with explained(name, "sequence classifier"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)  # for missing layers below the head, such as a pooler
        classifier, info = read_weights(
            AutoModelForSequenceClassification,
            source,
            "sequence classifier",
            as_in_file=_as_in_file(options),
            num_labels=1,
            ignore_mismatched_sizes=True,
            **(four_bit.arguments(keep=[*HEADS, "pooler"]) if four_bit else {}),
        )
        _refuse_hub_adapters(classifier, name)
        say_unquantized(classifier, name, four_bit)
        beside = [] if merged or seed is not None else adapters[-1:]
        classifier = merge_adapters(classifier, adapters[: len(adapters) - len(beside)])
        for folder in beside:
            attach_adapter(classifier, folder)
    refuse_not_finite(classifier, name)
    if info["mismatched_keys"]:
        raise CheckpointError(f"{name}: its classification head has more than one output; a reward model has one score")
    head_missing = _lacks_head(classifier, set(info["missing_keys"]) - set(whole_weights(adapters)), name)
    facts = load_facts(name)
    offset = facts.offset
    if origin is not None:
        origin.copy_to(score_head(classifier))
        if score_head(classifier).bias is None:
            offset -= origin.bias
        head_missing = False
    if head_missing:
        if seed is None:
            raise CheckpointError(
                f"{name} has no reward head, so it is not a reward model; train one with: heedful reward"
            )
        _init_head(classifier, seed)
    # Adapters have no config.json for it. The other libraries read the last token, whatever it is.
    if head_missing or origin is not None or (adapters and tokenizer.pad_token_id is not None):
        ensure_distinct_pad(tokenizer, classifier)
    elif padding_id(classifier) is None:
        # transformers then reads the score at the very last token, so EOS must not count as padding.
        if tokenizer.pad_token_id is None and seed is None:
            raise CheckpointError(
                f"{name}: neither config.json nor the tokenizer has a padding token (pad_token_id); set one"
            )
        ensure_distinct_pad(tokenizer, classifier)
    use_attention(learn_every_embedding(classifier))
    # A model of another tool reads its own template, but not heedful's default, on which it was not trained.
    of_turn = origin is not None or PLAIN_TEMPLATE in (tokenizer.chat_template or PLAIN_TEMPLATE)
    theirs: Reading = "turn-end" if of_turn else "template"
    reads = "turn-end" if head_missing else facts.reads or theirs
    loaded = RewardModel(
        classifier,
        compute_dtype=options["compute_dtype"],
        offset=offset,
        reads=reads if hasattr(classifier, "score") else None,  # the others are encoders
    )
    _use_kernels(classifier, but=score_head(classifier), **options)
    return loaded.to(options["device"])


def _origin_reward_head(source: Source, *, trains: bool) -> OriginHead | None:
    """The head of a reward model of LLaMA-Factory or OpenRLHF; None for other models.

    Raises CheckpointError for another library's critic. A policy with TRL's head may be trained: its head is then new.
    """
    origin = origin_head(source)
    if origin is None or origin.can_score:
        return origin
    if origin.origin == "TRL" and trains:
        return None
    if origin.origin == "TRL":
        raise CheckpointError(
            f"{origin.place} has a value head of TRL: it is the critic of a policy, not a reward model; --value-model reads "
            "it as a critic. If it is a reward model all the same, move v_head.summary.weight and v_head.summary.bias to a "
            "file value_head.safetensors in the folder, as LLaMA-Factory has them"
        )
    raise CheckpointError(
        f"{origin.place} is a critic of OpenRLHF (CriticModel), not a reward model; --critic separate --value-model reads it"
    )


def _lacks_head(classifier: PreTrainedModel, missing: set[str], name: str) -> bool:
    """Whether the head is among the missing weights. Raises CheckpointError if others are missing.

    With a new head a pooler may also be missing, since language models have none.
    """
    head_missing = any(key.split(".")[0] in HEADS for key in missing)
    trunk = f"{classifier.base_model_prefix}."
    lacking = sorted(
        key for key in missing if not head_missing or (key.startswith(trunk) and "pooler" not in key.split("."))
    )
    if lacking:
        raise CheckpointError(
            f"{name}: incomplete model: it lacks {counted(len(lacking), 'weight')}, first {lacking[0]}; download it again"
        )
    return head_missing


def _init_head(classifier: PreTrainedModel, seed: int) -> None:
    head = score_head(classifier)
    head.float()
    drawn = torch.empty(head.weight.shape)  # on the CPU, whatever the head's device: each draws other numbers
    drawn.normal_(0.0, (head.in_features + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.weight.copy_(drawn)
        if head.bias is not None:
            head.bias.zero_()


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase, classifier: PreTrainedModel) -> None:
    """Give tokenizer and classifier a padding token that differs from the end-of-sequence token."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    if tokenizer.pad_token_id >= classifier.get_input_embeddings().weight.shape[0]:
        classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for config in (classifier.config, classifier.config.get_text_config()):  # transformers reads the text part's
        config.pad_token_id = tokenizer.pad_token_id


# Shared functions --------------------------------------------------------------------------------------------------


def load_saved_head(head: nn.Linear, source: Source) -> None:
    """Load the value head saved with a model, heedful's or another library's (`heedful.models.origins`), if there is one.

    Raises CheckpointError if it does not fit.
    """
    own = Path(source.folder) / VALUE_HEAD
    if own.is_file():
        load_head(head, own)
        return
    theirs = origin_head(source)
    if theirs is not None:
        theirs.copy_to(head)


def load_head(head: nn.Linear, path: Path) -> None:
    """Load the weights of a scalar head. Raises CheckpointError if they do not fit."""
    tensors = load_tensors(path)
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    linear = {name: wanted[name] for name in ("weight", "bias")}
    if found not in (wanted, linear):  # older value heads are only linear; the rest is then zero
        hint = (
            "the head of a shared critic, which a separate critic cannot use" if "out.weight" in found else str(found)
        )
        raise CheckpointError(f"{path}: has {hint}, but the model needs {wanted}: it belongs to another model")
    head.load_state_dict(tensors, strict=False)
    refuse_not_finite(head, str(path))


def _as_in_file(options: LoadOptions) -> bool:
    """Whether matrices are read in the dtype of their file: where they need not all be in float32 in main memory."""
    return options["device"].type != "cpu" or options.get("stored", torch.float32) != torch.float32


def _use_kernels(model: PreTrainedModel, *, but: nn.Module | None = None, **options: Unpack[LoadOptions]) -> None:
    """Move a model to its device, its matrices in their storage dtype, and replace layers by equal ones that need less time
    or memory."""
    device, compute_dtype, stored = options["device"], options["compute_dtype"], options.get("stored", torch.float32)
    float32_experts = options.get("float32_experts", "")
    store_matrices(model, stored, device, but=but, experts=experts_but(model, float32_experts))
    use_fast_products(model, device, compute_dtype)
    if not options.get("four_bit"):
        use_lean_layers(model, device)
        return
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            state.dtype = compute_dtype  # of the matrix that is made for each product; transformers sets float32


NAMES = {r"^(model\.)?language_model\.lm_head\.": "lm_head.", r"^(model\.)?language_model\.(model\.)?": "model."}
"""Parameter names in such a checkpoint, and in its text model."""
Kind = Literal["causal language model", "sequence classifier"]
LOADS = {
    "causal language model": MODEL_FOR_CAUSAL_LM_MAPPING,
    "sequence classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}


def text_part(config: Any, name: str, kind: Kind) -> Any:
    """The configuration of a multimodal model's text part if only that is loaded; None if the whole model is.

    Raises CheckpointError if transformers has a class of this kind for neither.
    """
    text = getattr(config, "text_config", None)
    if text is None or type(config) in LOADS[kind]:
        return None
    if type(text) not in LOADS[kind]:
        raise CheckpointError(
            f"{name} is a multimodal {config.model_type} model, and transformers has no {kind} for "
            f"its text part ({text.model_type}); heedful trains text models: use one of those in docs/architectures.md"
        )
    return text


def read_weights(
    auto: Any, source: Source, kind: Kind = "causal language model", *, as_in_file: bool = False, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in float32 without its adapters, and transformers' report of missing weights.

    Args:
        auto: class whose ``from_pretrained`` is called.
        source: the checkpoint.
        kind: the kind of model that the run needs. For some multimodal models transformers has a class of this kind,
            which loads the text model or the full model; both train and sample. For others only the text model is
            loaded.
        as_in_file: leave matrices in the half precision of their files, if they are in one: on a CPU they are then parts of
            the files, which processes share, and need no memory of their own. A model with adapters to merge is in float32.
        options: further arguments.

    A loaded text model is saved as such, with a warning. Raises CheckpointError if transformers has no class for it.
    """
    options |= {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": source.runs_code}
    config = load_config(source)
    if not source.runs_code:
        leave_code(config, source.folder)
    text = text_part(config, source.folder, kind)
    half = half_of_file(source) if as_in_file and not source.adapters else None
    if text is None:
        with _made_in(half):
            model, report = auto.from_pretrained(source.base, **options)
        return _with_float32_vectors(model, half), report
    warnings.warn(
        f"{source.folder}: only the text part ({text.model_type}) of this {config.model_type} model is loaded, and saved "
        "after training",
        stacklevel=3,
    )
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    text.num_labels = options.pop("num_labels", text.num_labels)
    with _made_in(half):
        model, report = auto.from_pretrained(source.base, config=text, key_mapping=NAMES, **options)
    model._weight_conversions = None  # else saving would convert the names back
    return _with_float32_vectors(model, half), report


@contextlib.contextmanager
def _made_in(dtype: torch.dtype | None) -> Iterator[None]:
    """In this context, transformers reads parameters in ``dtype``: each gets the dtype that it has when the model is made,
    without numbers. Buffers, which it computes, stay in float32. None has no effect.
    """

    def convert(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if type(parameter) is nn.Parameter and parameter.is_meta and parameter.dtype == torch.float32:
            return nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
        return None

    hook = register_module_parameter_registration_hook(convert) if dtype is not None else None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def _with_float32_vectors(model: PreTrainedModel, half: torch.dtype | None) -> PreTrainedModel:
    """A model read in half precision with everything but its matrices in float32."""
    if half is not None:
        store_matrices(model, None, experts=expert_parameters(model))
    return model


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def make_generation_config_savable(lm: PreTrainedModel, name: str) -> None:
    """Repair a generation config that transformers refuses to save, in place, with a warning.

    transformers loads a temperature without ``do_sample`` and ignores it, but refuses to save it, which would fail only
    after training. ``do_sample`` is then set to true. If the config is still refused, only its special tokens are kept.
    """
    config = lm.generation_config
    reason = _refused(config)
    if reason is None:
        return
    done = "do_sample is set to true"
    config.do_sample = True
    if _refused(config) is not None:
        done = f"only {', '.join(TOKENS)} are kept"
        lm.generation_config = GenerationConfig(**{token: getattr(config, token) for token in TOKENS})
    warnings.warn(f"{name}: transformers refuses to save its generation_config.json ({reason}); {done}", stacklevel=2)


def _refused(config: GenerationConfig) -> str | None:
    """The reason why transformers refuses to save a config, or None."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if not line.startswith("GenerationConfig is invalid")]
        return lines[0].removeprefix("- ") if lines else str(error)
    return None
