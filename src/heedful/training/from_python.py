"""Training from Python: models and data in memory, functions to call, and no folder.

What is in memory is written into ``inputs/`` of the run's folder before anything else, under names that have a sum of the
content: the readers, checks and hashes of a command act on it, and an unfinished run goes on with it.
"""

import atexit
import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.configs.online import RolloutConfig
from heedful.configs.options import TrainingOptions
from heedful.data.in_memory import Records, write_records
from heedful.distributed import ranks
from heedful.errors import CheckpointError, ConfigError, HeedfulError
from heedful.files import in_words, sync_tree
from heedful.models.policy import Policy
from heedful.models.reward_model import RewardModel
from heedful.models.save import save_as_it_is
from heedful.training.callbacks import Callbacks, OnMetrics, OnSave
from heedful.training.output_folder import IN_MEMORY, REPLACED, check_folder, real_path
from heedful.training.provenance import content_hashes
from heedful.training.rank_consistency import meet

C = TypeVar("C", bound=TrainingOptions)
AnyModel: TypeAlias = Policy | RewardModel | PreTrainedModel
OURS = re.compile(r"(model|data|eval-data)-[0-9a-f]{12}(\.jsonl|\.parquet)?|\.heedful-\w+")
"""The names of what is written; whatever else is in the folder is the user's."""


class Objects(TypedDict, total=False):
    """What a trainer takes beside its settings. A setting of the same name is then left out."""

    model: AnyModel | str | Path
    """A `Policy`, a model of transformers with its ``tokenizer``, or what the setting takes. A copy of it is trained: it
    stays as it is, and ``result.policy`` is the trained one."""
    tokenizer: PreTrainedTokenizerBase
    """Of a model in memory; a `Policy` has its own."""
    data: Records | str | Path
    """A `datasets.Dataset`, or a list of dicts with the columns of a file, of texts or of conversations; or what the setting
    takes."""
    eval_data: Records | str | Path
    """Held-out data, likewise."""
    on_step: OnMetrics
    """Called with each step and its metrics, on rank 0."""
    on_evaluation: OnMetrics
    """Called with the step of each evaluation and its metrics."""
    on_save: OnSave
    """Called with a step and the folder of a checkpoint or model that is written."""


@contextlib.contextmanager
def in_files(
    config: C,
    *,
    model: AnyModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Records | str | Path | None = None,
    eval_data: Records | str | Path | None = None,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_save: OnSave | None = None,
) -> Iterator[tuple[C, Callbacks]]:
    """Settings whose paths lead to what is given (`Objects`), and to a folder; and what the run is to call.

    A HeedfulError from inside names what is in memory as it was given: ``data[2]`` for line 3 of its file. At the end, files
    that no run in the folder is made from are removed.

    Raises ConfigError, DataError, CheckpointError.
    """
    callbacks = Callbacks(on_step, on_evaluation, on_save)
    given = {"model": model, "data": data, "eval_data": eval_data}
    check_given(config, given)
    if config.output is not None and tokenizer is None and all(value is None for value in given.values()):
        yield config, callbacks
        return
    meet(config)
    written = ranks.on_rank_zero(lambda: _write(config, given, tokenizer))
    try:
        yield replace(config, **written), callbacks
    except HeedfulError as error:
        files = {name: written[name] for name, value in given.items() if not isinstance(value, str | Path | None)}
        error.args = (as_given(str(error), files),)
        raise
    finally:
        if ranks.is_first():
            _remove_unused(real_path(Path(written["output"])))


def check_given(config: TrainingOptions, given: Mapping[str, object]) -> None:
    """What a trainer needs is named in its settings or given, and nothing is both. Raises ConfigError."""
    for name, value in given.items():
        named = getattr(config, name)
        if named and value is not None:
            raise ConfigError(
                f"{name} is in the settings ({named}) and was given as an argument; leave out one of the two"
            )
        if not named and value is None and name != "eval_data":
            raise ConfigError(
                f"{name} is missing: name it in the settings ({type(config).__name__}({name}=...)), or give it to the "
                f"trainer as an argument ({name}=...)"
            )


def temporary_folder() -> Path:
    """A folder that is removed when Python ends."""
    folder = Path(tempfile.mkdtemp(prefix="heedful-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _write(
    config: TrainingOptions, given: Mapping[str, object], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Write what is in memory. Returns the settings that name it, and the run's folder."""
    output = temporary_folder() / "run" if config.output is None else config.output
    check_folder(output)
    folder = real_path(output) / IN_MEMORY
    settings: dict[str, Any] = {"output": output}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be made: {in_words(error)}") from error
    try:
        for name, value in given.items():
            if isinstance(value, str | Path):
                settings[name] = str(value)
            elif name == "model" and value is not None:
                settings[name] = str(_write_model(value, tokenizer, folder))
            elif value is not None:
                settings[name] = str(write_records(value, folder, name, asks=isinstance(config, RolloutConfig)))
        if tokenizer is not None and not isinstance(given["model"], AnyModel):
            raise ConfigError(
                "tokenizer was given without a model in memory; a model that is named comes with its own tokenizer"
            )
    except BaseException:
        _remove_unused(real_path(output))
        raise
    return settings


def _write_model(model: object, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Write a model in memory into a folder whose name has a sum of its content."""
    if not isinstance(model, AnyModel):
        raise ConfigError(
            f"model must be a Policy, a model of transformers, or the name of one, got a {type(model).__name__}; save it, "
            "and name its folder"
        )
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise CheckpointError("a model in memory comes without its tokenizer; give it too (tokenizer=...)")
    with tempfile.TemporaryDirectory(prefix=".heedful-", dir=folder) as partial:
        written = Path(partial) / "model"
        save_as_it_is(model, tokenizer, written)
        path = folder / f"model-{content_hashes([str(written)])[1][str(written)][:12]}"
        if not path.exists():
            sync_tree(written)
            written.rename(path)
    return path


def as_given(message: str, paths: Mapping[str, str]) -> str:
    """A message that names what was given in memory in the place of its files."""
    for name, path in paths.items():
        rows = rf"{re.escape(path)}(?:: row |:)\d+\b"  # of Parquet, of JSON Lines
        for place in set(re.findall(rows, message)):
            number = int(place.removeprefix(path).strip(": row"))
            message = re.sub(rf"{re.escape(place)}\b", f"{name}[{number - 1}]", message)
        message = message.replace(path, name)
    return message


def _remove_unused(output: Path) -> None:
    """Remove what no run in a folder is made from: of runs that were refused or replaced; and folders that are left empty."""
    settings = [output / "config.yaml", output / REPLACED / "config.yaml"]
    used = "".join(path.read_text(encoding="utf-8") for path in settings if path.is_file())
    for path in (output / IN_MEMORY).iterdir():
        if OURS.fullmatch(path.name) and path.name not in used:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):  # one that is not empty stays
        (output / IN_MEMORY).rmdir()
        output.rmdir()
