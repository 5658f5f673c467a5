"""--compile: whether a run's layers are compiled by torch.compile, and compiling them before its first step."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
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
from heedful.files import read_object
from heedful.kernels.attention import ATTENTION, attention
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel, padding_id
from heedful.models.shape import context_length
from heedful.models.value_model import ValueModel
from heedful.training.fsdp import divides, is_mixture
from heedful.training.output_folder import real_path
from heedful.training.provenance import RESTART_HINT

Trained = Policy | ValueModel | RewardModel

PAYS = 2**32
"""Minimum `work` of a run that ``--compile auto`` compiles: about three times the work after which compiling had paid
with nothing compiled before (docs/speed.md)."""
SLOWEST = 600.0
"""Seconds after which ``--compile auto`` gives up compiling."""
EQUAL, UNEQUAL = (61,) * 7, (131, 67, 131, 67, 131, 67, 97)
"""Lengths of the texts that layers are compiled for: padded rows, and packed ones. The code is for all sizes, but torch
takes two sizes that happen to be equal for one and the same, so none may be a width of a model."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable with torch's folder of compiled code."""
LONGEST = 200
"""Maximal length of torch's message in ours."""


def compile_layers(config: TrainingOptions, models: Sequence[Trained], tokens: int) -> None:
    """Compile the repeated layers of the models in training, in place, if ``--compile`` says so.

    Only passes with gradients run compiled. Names of parameters and saved files do not change. Copies of a model, such
    as the sampler's, are not compiled. If compiling fails, ``auto`` reports one line on standard error, and the run has the
    numbers of one without compiling. Layers that an earlier run of this process compiled run eagerly from then on.

    Args:
        config: the settings.
        models: all models in training, ready for it.
        tokens: planned number of tokens to learn from, in the whole run.

    Raises ConfigError if ``--compile on`` fails.
    """
    if not ranks.on_rank_zero(lambda: is_wanted(config, models, tokens)):
        return
    _keep_code()
    failures = [one for one in ranks.gather(_try_compiling(config, models)) if one]
    if not failures:
        return
    for model in models:
        _undo(model)
    said = f"torch.compile does not work: {failures[0]}"
    if config.compile == "on":
        raise ConfigError(f"--compile on: {said}; --compile off trains without it")
    if ranks.is_first():
        print(f"heedful: --compile auto: {said}; the run trains without it", file=sys.stderr, flush=True)


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether layers of a model are compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def repeated_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of equal layers with most of a model's weights. Raises ConfigError if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    if not alike:
        raise ConfigError(f"{type(model).__name__} has no list of repeated layers")
    return max(alike, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def work(models: Sequence[Trained], tokens: int) -> int:
    """How much the layers of all models compute: tokens x layers x width."""
    shapes = [transformer(model).config.get_text_config() for model in models]
    return tokens * sum(shape.num_hidden_layers * shape.hidden_size for shape in shapes)


def is_wanted(config: TrainingOptions, models: Sequence[Trained], tokens: int) -> bool:
    """Whether to compile. It depends only on settings, data and the processor, so that the same command takes the same
    path; a resumed run takes the path of its beginning."""
    if config.compile != "auto":
        return config.compile == "on"
    before = _before(config)
    if before is not None:
        return before
    fits = not (config.gradient_checkpointing or config.lora_rank or divides(config))
    gains = torch.cpu._is_amx_tile_supported() and all(  # elsewhere products take so long that the rest hardly matters
        lm.device.type == "cpu" and model.compute_dtype == torch.bfloat16 and not is_mixture(lm)
        for model, lm in zip(models, map(transformer, models), strict=True)
    )
    return fits and gains and work(models, tokens) >= PAYS


def _before(config: TrainingOptions) -> bool | None:
    """Whether the layers of the unfinished run in the output folder were compiled; None without one."""
    if config.output is None or config.overwrite:
        return None
    path = real_path(config.output) / "environment.json"
    if not path.exists():
        return None
    return bool(read_object(path, RESTART_HINT, error=ConfigError).get("compiled"))


def _try_compiling(config: TrainingOptions, models: Sequence[Trained]) -> str | None:
    """Compile all layers. Returns what failed and why, in one line; None if nothing did.

    Everything is compiled here, before the first step, and from then on nothing is: passes for which there is no code
    run as written. So what a run computes does not depend on the texts that it happens to read first.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attention))
    torch._dynamo.reset()  # code of an earlier run in this process may be made for other sizes
    ends, random = time.monotonic() + SLOWEST, dropout_state()
    try:
        for model in models:
            was_training = model.training
            try:
                model.train(was_training or config.has_dropout)  # others learn in the mode they are in
                for _ in _compiling(model):
                    if config.compile == "auto" and time.monotonic() > ends:
                        return f"it takes longer than {SLOWEST:.0f} s, for which only --compile on waits"
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


def _compiling(model: Trained) -> Iterator[None]:
    """Compile a model's layers by passes that need code of their own. Yields before each, and at the end."""
    layers = repeated_layers(transformer(model))
    with torch.no_grad():
        _outputs(model, UNEQUAL)  # as written, since it tries packing once per model, in other passes than in training
    for layer in layers:
        layer.compile(dynamic=True)
    for lengths in (EQUAL, UNEQUAL):
        yield
        _outputs(model, lengths).sum().backward()
    yield
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
