"""--compile on: compiling a run's layers by torch.compile before its first step."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful.configs.options import TrainingOptions
from heedful.devices import capabilities, dropout_state, set_dropout_state
from heedful.distributed import ranks
from heedful.errors import ConfigError, is_out_of_memory
from heedful.kernels.attention import ATTENTION, attention
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel, padding_id
from heedful.models.shape import context_length
from heedful.models.value_model import ValueModel

Trained = Policy | ValueModel | RewardModel

EQUAL, UNEQUAL = (61,) * 7, (131, 67, 131, 67, 131, 67, 97)
"""Lengths of the texts that layers are compiled for: padded rows, and packed ones. The code is for all sizes, but torch
takes two sizes that happen to be equal for one and the same, so none may be a width of a model."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable with torch's folder of compiled code."""
LONGEST = 200
"""Maximal length of torch's message in ours."""


def compile_layers(config: TrainingOptions, models: Sequence[Trained]) -> None:
    """Compile the repeated layers of the models in training, in place, if ``--compile`` is on.

    Everything is compiled here, before the first step, and from then on nothing is: passes for which there is no code run as
    written. So what a run computes does not depend on the texts that it happens to read first. Only passes with gradients
    run compiled. Names of parameters and saved files do not change. Copies of a model, such as the sampler's, are not
    compiled. Layers that an earlier run of this process compiled run as written from then on.

    Raises ConfigError if compiling fails.
    """
    if config.compile == "off":
        return
    _keep_code()
    failures = [one for one in ranks.gather(_failure(config, models)) if one]
    if failures:
        for model in models:
            _undo(model)
        raise ConfigError(f"--compile on: torch.compile does not work: {failures[0]}; --compile off trains without it")


def repeated_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of equal layers with most of a model's weights. Raises ConfigError if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    if not alike:
        raise ConfigError(f"{type(model).__name__} has no list of repeated layers")
    return max(alike, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def _failure(config: TrainingOptions, models: Sequence[Trained]) -> str | None:
    """Compile all layers. Returns what failed and why, in one line; None if nothing did."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attention))
    torch._dynamo.reset()  # code of an earlier run in this process may be made for other sizes
    random = dropout_state()
    try:
        for model in models:
            was_training = model.training
            try:
                model.train(was_training or config.has_dropout)  # others learn in the mode they are in
                _compile(model)
            finally:
                model.train(was_training)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # any kind: a compiler, its headers or Triton may be missing or too old, a disk full
        why = " ".join(str(error).split())[:LONGEST] or type(error).__name__
        if is_out_of_memory(error):
            return f"{why}; compiling runs passes over {len(EQUAL)} texts of up to {max(UNEQUAL)} tokens"
        compiler = capabilities(transformer(models[0]).device).compiler
        return f"{why}; it needs {compiler} and space in {CACHE} ({os.environ[CACHE]})"
    finally:
        set_dropout_state(random)
    return None


def _keep_code() -> None:
    """Keep compiled code where it outlives a restart of the machine, unless the user names a folder.

    Otherwise torch takes a folder for temporary files, and sets the variable to it when it is imported.
    """
    if os.environ.get(CACHE) in (None, str(Path(default_cache_dir()).absolute())):
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        os.environ[CACHE] = str(Path(caches, "heedful", f"torch-{torch.__version__}").expanduser())


def _compile(model: Trained) -> None:
    """Compile a model's layers by passes that need code of their own."""
    layers = repeated_layers(transformer(model))
    with torch.no_grad():
        _outputs(model, UNEQUAL)  # as written, since it tries packing once per model, in other passes than in training
    for layer in layers:
        layer.compile(dynamic=True)
    for lengths in (EQUAL, UNEQUAL):
        _outputs(model, lengths).sum().backward()
    model.zero_grad(set_to_none=True)
    for layer in layers:
        compiled = layer._compiled_call_impl
        layer._compiled_call_impl = torch.compiler.set_stance("eager_on_recompile")(compiled)


def _outputs(model: Trained, lengths: Sequence[int]) -> Tensor:
    """What a model computes for texts of these lengths (at most its context), as in training."""
    lengths = [min(length, context_length(transformer(model).config)) for length in lengths]
    token = 2 if isinstance(model, RewardModel) and padding_id(model.classifier) == 1 else 1
    if isinstance(model, RewardModel):
        return model([{"input_ids": [token] * length} for length in lengths])
    ids = torch.full((len(lengths), max(lengths)), token, device=transformer(model).device)
    mask = torch.arange(max(lengths), device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
    outputs = model(ids, mask, mask[:, 1:])
    return outputs if isinstance(outputs, Tensor) else outputs.logprobs


def _undo(model: Trained) -> None:
    """Run a model's layers as written again."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    for module in transformer(model).modules():
        module._compiled_call_impl = None
    model.zero_grad(set_to_none=True)


def transformer(module: Trained) -> PreTrainedModel:
    """The pretrained model in a module."""
    if isinstance(module, Policy):
        return module.lm
    return module.trunk if isinstance(module, ValueModel) else module.classifier
