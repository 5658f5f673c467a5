"""What bitsandbytes does, only on GPUs: frozen weights in 4 bits, and Adam's moments in 8."""

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from heedful.configs.options import MemoryOptions
from heedful.errors import ConfigError
from heedful.models.lora import expert_parameters
from heedful.models.source import resolve


@dataclass(frozen=True)
class FourBit:
    """Loads a model's linear layers in 4 bits: NF4, with quantised scales (Dettmers et al. 2023)."""

    device: torch.device
    compute_dtype: torch.dtype

    def arguments(self, *, keep: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of ``from_pretrained``.

        Args:
            keep: names of layers to leave as they are; by default the output head.
        """
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            llm_int8_skip_modules=list(keep) or None,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.compute_dtype,
        )
        return {"quantization_config": quantization, "device_map": {"": self.device}}


def say_unquantized(model: PreTrainedModel, name: str, how: FourBit | None) -> None:
    """Warn that the experts of a mixture have not become smaller, if the model was to be in 4 bits."""
    experts = sum(model.get_parameter(parameter).numel() for parameter in expert_parameters(model)) if how else 0
    if experts:
        warnings.warn(
            f"--quantize 4bit: {name} is a mixture whose experts ({experts:,} weights) are no linear layers, and are not "
            "quantised: those that get adapters take 4 bytes per weight, the others 2; --lora-targets with linear layers "
            "only, such as q_proj,k_proj,v_proj,o_proj, puts none on experts",
            stacklevel=3,
        )


def four_bit(options: MemoryOptions, device: torch.device, compute_dtype: torch.dtype) -> FourBit | None:
    """How to load the base of adapters; None means that weights stay as they are."""
    return FourBit(device, compute_dtype) if options.quantize == "4bit" else None


def check_bitsandbytes(options: MemoryOptions, models: Sequence[str], device: torch.device) -> None:
    """Refuse options that cannot work on this machine, before anything is loaded.

    Args:
        options: the flags.
        models: names of the models to load in 4 bits.
        device: where the run is.

    Raises ConfigError, and CheckpointError for a model that is not there.
    """
    if options.quantize == "4bit":
        _check(f"--quantize {options.quantize}", device)
        for model in models:
            if resolve(model).adapters:
                raise ConfigError(
                    f"--quantize 4bit: {model} holds adapters, which cannot be merged into 4-bit weights without loss; write "
                    f"a plain model first: heedful merge --adapter {model} --output FOLDER"
                )
    if options.optimizer == "adamw-8bit":
        _check(f"--optimizer {options.optimizer}", device)


def _check(flag: str, device: torch.device) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f'{flag} needs bitsandbytes, which is not installed: pip install "heedful[gpu]"')
    if device.type != "cuda":
        raise ConfigError(f"{flag} needs a CUDA device, and this run is on {device.type}; leave it out")
