"""Training from Python: models and data in memory, callbacks, and an optional folder.

Objects in memory are first written to ``inputs/`` in the run's folder, with a content hash in their names. So the
readers, checks and hashes of the commands apply to them, and an unfinished run resumes with them.
"""

import atexit
import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.configs.names import answer
from heedful.configs.online import RolloutConfig
from heedful.configs.options import TrainingOptions
from heedful.configs.settings import check_object, named, types_of
from heedful.data.in_memory import Records, write_records
from heedful.display import worded
from heedful.distributed import ranks
from heedful.errors import CheckpointError, ConfigError, reworded
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
OURS = re.compile(r"(model|data|eval-data)-[0-9a-f]{12}(\.jsonl|\.arrow)?|\.heedful-\w+")
"""Names of written inputs; all else in the folder belongs to the user."""


class Objects(TypedDict, total=False):
    """A trainer's arguments besides its settings. The setting of the same name must then be left out."""

    model: AnyModel | str | Path
    """A `Policy`, a transformers model with its ``tokenizer``, or a value of the setting. A copy is trained, available
    as ``result.policy``; the model itself does not change."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of a transformers model in memory; a `Policy` has its own."""
    data: Records | str | Path
    """A `datasets.Dataset` or `IterableDataset`, a DataFrame, or a list of dicts with the columns of a file, of texts or of
    conversations; or a value of the setting."""
    eval_data: Records | str | Path
    """Held-out data, in the same forms."""
    on_step: OnMetrics
    """Called with each step and its metrics, on rank 0. `heedful.STOP` as its result ends the run."""
    on_evaluation: OnMetrics
    """Called with the step of each evaluation and its metrics. `heedful.STOP` as its result ends the run."""
    on_save: OnSave
    """Called with a step and the folder of a written checkpoint or model."""


@contextlib.contextmanager
def spill_to_files(
    config: C,
    *kinds: type,
    model: AnyModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Records | str | Path | None = None,
    eval_data: Records | str | Path | None = None,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_save: OnSave | None = None,
    **unknown: object,
) -> Iterator[tuple[C, Callbacks]]:
    """Settings, of one of these kinds, with paths of the written objects (`Objects`) and of a folder; and the callbacks.

    Messages in this context name objects as they were passed (`as_passed`). On exit, files that no run in the folder uses
    are removed.

    Raises ConfigError, DataError, CheckpointError.
    """
    check_kind(config, *kinds)
    refuse_unknown(config, unknown)
    callbacks = Callbacks(on_step, on_evaluation, on_save)
    given = {"model": model, "data": data, "eval_data": eval_data}
    check_given(config, given)
    files: dict[str, str] = {}
    with as_passed(config, files):
        if config.output is not None and tokenizer is None and all(value is None for value in given.values()):
            yield config, callbacks
            return
        meet(config)
        written = ranks.on_rank_zero(lambda: _write(config, given, tokenizer))
        files |= {name: written[name] for name, value in given.items() if not isinstance(value, str | Path | None)}
        try:
            yield replace(config, **written), callbacks
        finally:
            if ranks.is_first():
                _remove_unused(real_path(Path(written["output"])))


def check_kind(config: object, *kinds: type) -> None:
    """Raises ConfigError for settings of another trainer, or something else in their place."""
    check_object(config, kinds, "config", " or ".join(f"heedful.{kind.__name__}(...)" for kind in kinds))


def refuse_unknown(config: TrainingOptions, names: Iterable[str]) -> None:
    """Raise ConfigError for an argument that trainers do not have, with the probable one, or the setting."""
    kind = type(config).__name__
    known = [*Objects.__annotations__, *(["rewards"] if isinstance(config, RolloutConfig) else [])]
    for name in names:
        advice = answer(name, known, in_python=True)
        if name in types_of(type(config)):
            advice = f"; it is a setting: {kind}({name}=...)"
        elif not advice and (setting := answer(name, types_of(type(config)), in_python=True)):
            advice = f"{setting}, a setting of {kind}"
        raise ConfigError(f"there is no argument {name!r}{advice}")


def check_given(config: TrainingOptions, given: Mapping[str, object]) -> None:
    """Raises ConfigError if an input is missing, or is both in the settings and an argument."""
    for name, value in given.items():
        named = getattr(config, name)
        if named and value is not None:
            raise ConfigError(f"{name} is both in the settings ({named}) and an argument; leave out one of the two")
        if not named and value is None and name != "eval_data":
            raise ConfigError(
                f"{name} is missing: set it in the settings ({type(config).__name__}({name}=...)), or pass it to the "
                f"trainer ({name}=...)"
            )


def temporary_folder() -> Path:
    """A folder that is removed when Python exits."""
    folder = Path(tempfile.mkdtemp(prefix="heedful-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _write(
    config: TrainingOptions, given: Mapping[str, object], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Write the objects in memory. Returns settings with their paths, and the run's folder."""
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
                "tokenizer is only for a model in memory; a model given by name or folder has its own tokenizer"
            )
    except BaseException:
        _remove_unused(real_path(output))
        raise
    return settings


def _write_model(model: object, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Write a model in memory into a folder with a content hash in its name."""
    if not isinstance(model, AnyModel):
        raise ConfigError(
            f"model must be a Policy, a transformers model, or a name or folder, got a {type(model).__name__}; save it "
            "and pass its folder"
        )
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CheckpointError(
            f"a transformers model in memory needs a tokenizer, got {tokenizer!r:.60}; pass it too (tokenizer=...)"
        )
    with tempfile.TemporaryDirectory(prefix=".heedful-", dir=folder) as partial:
        written = Path(partial) / "model"
        save_as_it_is(model, tokenizer, written)
        path = folder / f"model-{content_hashes([str(written)])[1][str(written)][:12]}"
        if not path.exists():
            sync_tree(written)
            written.rename(path)
    return path


@contextlib.contextmanager
def as_passed(config: TrainingOptions, paths: Mapping[str, str]) -> Iterator[None]:
    """Errors, and lines on the screen, name settings and objects as they were passed: ``data[2]`` for line 3 of the file.

    Args:
        config: the settings.
        paths: the written files, by the names of the arguments.
    """

    def words(text: str) -> str:
        return named(as_given(text, paths), type(config))

    with reworded(words), worded(words):
        yield


def as_given(message: str, paths: Mapping[str, str]) -> str:
    """A message with objects as they were passed in place of their files."""
    for name, path in paths.items():
        rows = rf"{re.escape(path)}(?:: row |:)\d+\b"  # of tables, of JSON Lines
        for place in set(re.findall(rows, message)):
            number = int(place.removeprefix(path).strip(": row"))
            message = re.sub(rf"{re.escape(place)}\b", f"{name}[{number - 1}]", message)
        message = message.replace(path, name)
    return message


def _remove_unused(output: Path) -> None:
    """Remove inputs that no run in a folder uses (of refused or replaced runs), and empty folders."""
    settings = [output / "config.yaml", output / REPLACED / "config.yaml"]
    used = "".join(path.read_text(encoding="utf-8") for path in settings if path.is_file())
    for path in (output / IN_MEMORY).iterdir():
        if OURS.fullmatch(path.name) and path.name not in used:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):  # keeps a folder that is not empty
        (output / IN_MEMORY).rmdir()
        output.rmdir()
