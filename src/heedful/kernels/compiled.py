"""torch.compile of a model's repeated layers: they share one compiled code, which serves any batch size and length."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful.errors import ConfigError
from heedful.kernels.attention import ATTENTION, attention


def check_compiler(device: torch.device) -> None:
    """Compile one addition.

    Raises ConfigError if torch cannot compile for the device, for example without a C++ compiler.
    """

    def add_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    try:
        torch.compile(add_one)(torch.zeros(2, device=device))
    except Exception as error:  # of every kind: a compiler, its headers or Triton may be missing or too old
        first_line = str(error).partition("\n")[0]
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler (g++ or clang++)"
        raise ConfigError(
            f"--compile: torch.compile does not work: {first_line}; it needs {needed}: install it, or leave out --compile"
        ) from error


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each repeated layer of a model, in place. Names of parameters and saved files stay the same.

    A layer is compiled at its first pass. `heedful.kernels.attention` stays uncompiled. So do copies of the model, such
    as the one that samples: torch leaves compiled code out of a copy.

    Raises ConfigError if the model has no repeated layers.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attention))
    for layer in repeated_layers(model):
        layer.compile(dynamic=True)


def repeated_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of layers of one class that holds most of a model's weights. Raises ConfigError if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    if not alike:
        raise ConfigError(f"--compile: {type(model).__name__} has no list of repeated layers; leave out --compile")
    return max(alike, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))
