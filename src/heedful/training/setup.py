"""Loading and preparing the models of a run, with the options that save memory or time."""

import torch

from heedful.configs.options import ReferenceOptions, TrainingOptions
from heedful.distributed import ranks
from heedful.distributed.ranks import local_device
from heedful.errors import ConfigError
from heedful.kernels.device import HALF, frozen_dtype, resolve_device, resolve_dtype
from heedful.kernels.waiting import wait_on_host
from heedful.kernels.weights import halve_frozen, hold_untrained_rows, same_weights
from heedful.models.adapters import add_adapters
from heedful.models.heads import checkpoint_layers
from heedful.models.load import check_bitsandbytes, four_bit, load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.reward_model import RewardModel
from heedful.models.source import Source, resolve
from heedful.models.value_model import ValueModel
from heedful.tracking.trackers import check_trackers
from heedful.training.compilation import transformer
from heedful.training.fsdp import divides, loading_device
from heedful.training.output_folder import FolderPlan, check_output
from heedful.training.rank_consistency import join_ranks


def check_start(config: TrainingOptions) -> FolderPlan:
    """Join the ranks, then check output folder and trackers, before anything is loaded.

    Returns the decision on a run already in the output folder. Raises ConfigError; see also `join_ranks`.
    """
    join_ranks(config)

    def check() -> FolderPlan:
        plan = check_output(config)
        check_trackers(config)
        return plan

    return ranks.on_rank_zero(check)


def resolve_machine(config: TrainingOptions) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype of a run. Raises ConfigError if the machine does not support the settings."""
    device = local_device(resolve_device(config.device, graphs=getattr(config, "cuda_graphs", "off") == "on"))
    check_bitsandbytes(config, quantized(config), device)
    if config.optimizer_device == "cpu" and device.type == "cpu":
        raise ConfigError("--optimizer-device cpu has no effect: the run is on the CPU; leave it out")
    dtype = resolve_dtype(config.dtype, device)
    if config.weights_dtype == "bfloat16" and dtype != torch.bfloat16:
        how = "add --dtype bfloat16, or leave it out" if config.dtype == "auto" else "leave out one of the two"
        raise ConfigError(
            f"--weights-dtype bfloat16 needs matrix products in bfloat16, but here they are in "
            f"{str(dtype).removeprefix('torch.')} (--dtype {config.dtype} on {device.type}); {how}"
        )
    return device, dtype


def stored_dtype(config: TrainingOptions, device: torch.device, compute_dtype: torch.dtype) -> torch.dtype | None:
    """Storage dtype of a run's matrices. Under adapters they are frozen, and on a GPU stored in the compute dtype. Trained
    ones that will be sharded stay as in their file (None) until then (`divide`), if products are in half precision."""
    if config.lora_rank:
        return frozen_dtype(device, compute_dtype)
    if config.weights_dtype == "bfloat16":
        return torch.bfloat16
    return None if divides(config) and compute_dtype in HALF else torch.float32


def float32_experts(config: TrainingOptions) -> str:
    """``--lora-targets`` whose experts stay in float32.

    PEFT adds an expert's adapters to its matrix in the matrix's dtype; half precision would round small steps away.
    Without adapters experts are stored like all matrices.
    """
    return config.lora_targets if config.lora_rank else ""


def quantized(config: TrainingOptions) -> list[str]:
    """The models that a run with ``quantize`` loads in 4 bits. A reference in main memory is not quantized."""
    names = ["model", "value_model"]
    if getattr(config, "reference_device", "cpu") == "same":
        names.append("reference")
    return [name for name in (getattr(config, field, None) for field in names) if name]


def load_trained(
    config: TrainingOptions, source: Source, device: torch.device, dtype: torch.dtype, *, with_value_head: bool = False
) -> Policy:
    """Load the policy to train, in 4 bits if the settings say so. Raises CheckpointError."""
    return load_policy(
        source,
        device=loading_device(config, device),
        compute_dtype=dtype,
        with_value_head=with_value_head,
        four_bit=four_bit(config, device, dtype),
        stored=stored_dtype(config, device, dtype) if config.trains_policy else frozen_dtype(device, dtype),
        float32_experts=float32_experts(config),
    )


def prepare(
    module: Policy | ValueModel | RewardModel, config: TrainingOptions, *, base: str, dropout: float = 0.0
) -> None:
    """Prepare a model for training: untrained embedding rows (`hold_untrained_rows`) and, by the settings, adapters,
    gradient checkpointing, gradient scaler.

    ``base`` is its source. Puts the module into training mode, since transformers checkpoints gradients only there.
    Raises ConfigError.
    """
    model = transformer(module)
    hold_untrained_rows(model, base)
    if config.lora_rank:
        add_adapters(model, config, base=base, seed=config.seed, dropout=dropout)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
        module.train()
    if module.compute_dtype == torch.float16:  # small gradients would underflow
        module.grad_scaler = torch.amp.GradScaler(model.device.type)


def load_reference(
    config: TrainingOptions, source: Source, policy: Policy, device: torch.device | None = None
) -> Policy:
    """The frozen reference: another model, a second copy of the policy's model, or, with LoRA, the policy's own
    weights.

    In the last case the policy must not have its adapters yet. A policy to be sharded cannot share weights, so its
    model is loaded again. A second copy is rounded like the policy (``weights_dtype``, frozen matrices under adapters),
    so its log-probs equal the initial policy's.

    With ``reference_device`` cpu it waits in main memory and is on the run's device only while it is read
    (`heedful.kernels.waiting`).

    ``device`` is the run's device; None is the policy's, which differs for a policy to be sharded.
    """
    assert isinstance(config, ReferenceOptions)
    if config.reference is None and config.lora_rank and not divides(config):
        reference = same_weights(policy)
        reference.value_head = None
    else:
        device = device or policy.device
        dtype = policy.compute_dtype  # so that the KL before the first update is 0
        is_rounded = config.reference is None and config.weights_dtype == "bfloat16"
        experts = float32_experts(config) if config.lora_rank or is_rounded else "all-linear"  # like the policy's
        smaller = four_bit(config, device, dtype) if config.reference_device == "same" else None
        reference = load_policy(
            resolve(config.reference, config) if config.reference else source,
            device=loading_device(config, device),
            compute_dtype=dtype,
            four_bit=smaller,
            stored=torch.bfloat16 if is_rounded else frozen_dtype(device, dtype),
            float32_experts="" if config.reference else experts,
        )
        if device.type == "cpu":
            halve_reference(reference)
        else:
            _let_wait(reference, config)
    freeze(reference)
    return reference


def copy_reference(config: ReferenceOptions, policy: Policy) -> Policy:
    """The frozen reference of a policy in memory: a copy of its current state."""
    reference = policy.frozen_copy()
    reference.value_head = None
    _let_wait(reference, config)
    return reference


def _let_wait(reference: Policy, config: ReferenceOptions) -> None:
    """Move a reference to main memory until it is read, if the settings say so and its device is another."""
    if config.reference_device == "cpu" and reference.device.type != "cpu":
        wait_on_host(reference, reference.device)


def halve_reference(reference: Policy) -> Policy:
    """Convert a frozen policy's matrices to the compute dtype, in place, if that saves memory."""
    head, embeddings = reference.lm.get_output_embeddings(), reference.lm.get_input_embeddings()
    # A tied head in half precision would be an extra copy of the embeddings: more memory, not less.
    halve_frozen(reference.lm, reference.compute_dtype, but=[head] if head.weight is embeddings.weight else [])
    return reference
