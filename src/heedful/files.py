"""Write files and folders that are either complete or absent, even after kill -9 or a power cut."""

import contextlib
import errno
import functools
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from heedful.errors import CheckpointError, ConfigError, HeedfulError
from heedful.faults import hit

T = TypeVar("T")
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""The system's error number, such as that of a full disk, in the message of safetensors' own exception."""
MODELS_AND_DATA = ("model", "reference", "value_model", "data", "eval_data", "ptx_data", "offset_data")
FORMS: Mapping[str, Mapping[str, type]] = {
    "config.yaml": dict.fromkeys((*MODELS_AND_DATA, "loss"), str),
    "environment.json": {
        "command": str,
        **dict.fromkeys(("versions", "hidden", "data", "models", "revisions", "cpu"), dict),
        "gpus": list,
    },
    "run.json": {"run": str, "algorithm": str, "objective": str, "total_steps": int},
    "summary.json": {
        "algorithm": str,
        "steps": int,
        **dict.fromkeys(("data", "first_evaluation", "last_evaluation"), dict),
    },
    "adapter_config.json": {"peft_type": str, "base_model_name_or_path": str},
    "round.json": {"round": int, "settings": dict, "before": str, "steps": dict},
    "numbers.json": {"events": int},
}
"""The files of runs and rounds, with the types of the values that are read from them."""
KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
"""The types of JSON in words."""
PLAIN = {
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "no permission: the file system is read-only",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left: the quota on this disk is used up",
}
"""System errors in plain words."""
LARGEST_YAML = 262_144
"""Maximal length of a YAML file of settings, in characters."""
DEEPEST_YAML = 20
"""Most levels of a YAML file of settings, which has three at most (a list of mappings with a list)."""


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``folder`` to write into; at the end it is synchronised with the disk and renamed.

    So ``folder`` is complete or does not exist. If it existed before, it is replaced; after an exception it stays as it was.
    If the process is killed between the two renames of a replacement, `recover` finds the former folder under its temporary
    name. safetensors' error for a full disk becomes an OSError.
    """
    recover(folder)
    temporary, old = _temporary(folder), _old(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        hit("save.files")
        _let_others_read(temporary)
        sync_tree(temporary)
        hit("save.synced")
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        number = OS_ERROR.search(str(error)) if type(error).__name__ == "SafetensorError" else None
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, HeedfulError):
            error.filename = str(folder)  # a full disk has no name
        raise
    if folder.exists():
        folder.replace(old)
        hit("save.aside")
    temporary.replace(folder)
    sync(folder.parent)
    hit("save.renamed")
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Restore a folder whose replacement was interrupted, and remove half-written leftovers."""
    old = _old(folder)
    if old.is_dir() and not folder.exists():
        old.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(_temporary(folder), ignore_errors=True)


def _temporary(path: Path) -> Path:
    """The temporary path while ``path`` is written. The name marks it as heedful's, because leftovers are deleted unasked."""
    return path.with_name(f".{path.name}.heedful-partial")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.heedful-replaced")


def _let_others_read(folder: Path) -> None:
    """Give files the permissions that new files have here: safetensors makes its own readable for their owner only."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def make_private(folder: Path) -> list[Path]:
    """Make a folder and its content accessible to the owner only. Symbolic links are not followed.

    Returns the paths that cannot be changed, because they belong to another user.
    """
    refused = []
    for parent, _, names in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in names)):
            try:
                mode = path.lstat().st_mode
                if stat.S_IMODE(mode) & 0o077 and (path == folder or not stat.S_ISLNK(mode)):
                    path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)
            except FileNotFoundError:  # another program has just removed it
                pass
            except OSError:
                refused.append(path)
    return refused


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` for `open`: a new file is readable by its owner only."""
    return os.open(path, flags, 0o600)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` every file and folder below a folder, and the folder."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def blocking_file(path: Path) -> Path | None:
    """Return the file that stands where ``path`` needs a folder; None if there is none."""
    return next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)


MARKS = (
    '<meta name="generator" content="{}">',
    '"made by": "{}"',
    "tEXtSoftware\0{}",
    "<dc:title>{}</dc:title>",
    "/Creator ({})",
)
"""How a page, JSON, PNG, SVG and PDF say what wrote them."""
LARGEST_OUTPUT = 2**26
"""Bytes; a larger file is no page, picture or result of heedful."""


def is_made_by(path: Path, program: str) -> bool:
    """Whether a page, picture or JSON file says that a program, such as ``heedful report``, wrote it."""
    if not path.is_file() or path.stat().st_size > LARGEST_OUTPUT:
        return False
    content = path.read_bytes()
    return any(mark.format(program).encode() in content for mark in MARKS)


def check_output_file(
    output: Path,
    command: str,
    *,
    overwrite: bool | None,
    what: str = "a file",
    is_ours: Callable[[], bool] | None = None,
) -> None:
    """Check, before any work, that a command can write a file and overwrites nothing but what it wrote itself.

    Args:
        output: the file.
        command: the command, such as ``heedful report``.
        overwrite: the setting ``--overwrite``; None for a command without it, which replaces its own file.
        what: what to name, in the message for a folder.
        is_ours: whether the command wrote the file that is there; None looks for its mark (`is_made_by`).

    Raises ConfigError. Nothing is left in the folder.
    """
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name {what}")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be written: {blocking} is a file")
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written: {folder}: {in_words(error)}; choose another folder"
        ) from error
    file = output.resolve()  # the file of data/new/../a.jsonl is there, though the folder data/new is not yet
    if not file.exists():
        return
    if not (is_made_by(file, command) if is_ours is None else is_ours()):
        raise ConfigError(
            f"--output {output} exists and was not written by {command}, so it is left alone; choose another name"
        )
    if overwrite is False:
        raise ConfigError(f"--output {output} exists; choose another name, or add --overwrite to replace it")


def check_output_folder(output: Path, command: str, *, overwrite: bool, ours: Callable[[], Collection[str]]) -> None:
    """Check, before any work, that a command can make a folder and replaces nothing but one that it could have made.

    Args:
        output: the folder.
        command: the command, such as ``heedful merge``.
        overwrite: the setting ``--overwrite``.
        ours: returns the names in that folder that the command could have written.

    Raises ConfigError.
    """
    folder = output.resolve()
    blocking = output if folder.is_file() else blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be made: {blocking} is a file")
    if not folder.exists():
        return
    if not overwrite:
        raise ConfigError(f"--output {output} exists; choose another folder, or add --overwrite to replace it")
    foreign = sorted({path.name for path in folder.iterdir()} - set(ours()))
    if foreign:
        raise ConfigError(
            f"--output {output} holds {', '.join(foreign[:3])}, which {command} does not write and --overwrite would delete; "
            "move it away, or choose another folder"
        )


MODEL_NAMES = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "additional_chat_templates", "heedful.json",
    "value_head",
)  # fmt: skip
"""Names in the folder of a model that transformers and heedful save."""


def model_names(folder: Path) -> list[str]:
    """Names in a folder that belong to a saved model; none without its config.json."""
    if not (folder / "config.json").is_file():
        return []
    return [path.name for path in folder.iterdir() if any(fnmatch(path.name, one) for one in MODEL_NAMES)]


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Return JSON text. A number that is not finite becomes null, because JSON cannot express it.

    ``indent`` is the number of spaces per level; None writes a single line.
    """
    try:
        return json.dumps(content, ensure_ascii=False, indent=indent, allow_nan=False)
    except (TypeError, ValueError):  # a mapping that is no dict; a number that is not finite
        return json.dumps(_finite(content), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_object(
    path: Path, remedy: str, *, needs: Iterable[str] = (), error: type[HeedfulError] = CheckpointError
) -> dict[str, Any]:
    """Return the object in a JSON file, or the ``key: value`` lines of a ``.yaml`` file.

    Args:
        path: the file. Values listed in `FORMS` for this file name must have their types, or be null.
        remedy: advice for a file that cannot be used; the end of the message.
        needs: keys that must be there, with a value.
        error: the error to raise for a file that is missing, is a folder, or has other content.
    """
    import yaml

    is_yaml = path.suffix == ".yaml"
    try:
        text = path.read_text(encoding="utf-8")
        if is_yaml and len(text) > LARGEST_YAML:
            raise ValueError(f"it has more than {LARGEST_YAML:,} characters, so it cannot be a settings file")
        content = yaml.load(text, Loader=shallow(yaml.SafeLoader)) if is_yaml else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as caught:
        empty = isinstance(caught, json.JSONDecodeError) and not caught.doc.strip()
        raise error(f"{path}: {'it is empty' if empty else _why_unread(caught)}; {remedy}") from caught
    if not isinstance(content, dict):
        found = "it is empty" if not text.strip() else f"it holds {_kind(content)}"
        raise error(f"{path}: {found}, and must hold {'key: value lines' if is_yaml else 'a JSON object'}; {remedy}")
    for name in needs:
        if content.get(name) is None:
            raise error(f"{path}: it has no {name}; {remedy}")
    for name, kind in FORMS.get(path.name, {}).items():
        if content.get(name) is not None and not isinstance(content[name], kind):
            raise error(f"{path}: {name} must be {KINDS[kind]}, and is {_kind(content[name])}; {remedy}")
    return content


class _Shallow:
    """Counts levels where PyYAML's scanner opens them: its time grows with their square, and composing recurses."""

    def fetch_flow_collection_start(self: Any, token: Any) -> None:
        if self.flow_level + len(self.indents) >= DEEPEST_YAML:
            raise RecursionError(f"more than {DEEPEST_YAML} levels of YAML")
        super().fetch_flow_collection_start(token)  # type: ignore[misc]

    def add_indent(self: Any, column: int) -> bool:
        if self.flow_level + len(self.indents) >= DEEPEST_YAML:
            raise RecursionError(f"more than {DEEPEST_YAML} levels of YAML")
        return bool(super().add_indent(column))  # type: ignore[misc]


@functools.cache
def shallow(loader: type[T]) -> type[T]:
    """A loader of PyYAML that raises RecursionError above `DEEPEST_YAML` levels, soon and whatever Python's limit is."""
    return type("ShallowLoader", (_Shallow, loader), {})


def _why_unread(error: Exception) -> str:
    """Why a file cannot be read, on one line."""
    match error:
        case FileNotFoundError() | NotADirectoryError():
            why = "there is no such file"
        case IsADirectoryError():
            why = "it is a folder, not a file"
        case OSError():
            why = f"it cannot be read ({in_words(error)})"
        case UnicodeDecodeError():
            why = f"it is not UTF-8 text (byte {error.start})"
        case RecursionError():
            why = "it is nested too deeply"
        case json.JSONDecodeError():
            why = f"line {error.lineno} is not valid JSON ({error.msg.removesuffix(' starting at')})"
        case _:
            mark = getattr(error, "problem_mark", None)  # YAML's
            problem = " ".join(str(getattr(error, "problem", None) or error).split())
            why = problem if mark is None else f"line {mark.line + 1} is not valid YAML ({problem})"
    return why


def in_words(error: OSError) -> str:
    """Describe a system error in plain words, without the path."""
    return PLAIN.get(error.errno or 0, error.strerror or str(error))


def _kind(value: Any) -> str:
    return "null" if value is None else KINDS.get(type(value), type(value).__name__)


def read_record(line: bytes | str) -> dict[str, Any] | None:
    """Return the object in a line of JSON Lines; None if there is none, as in a line half-written at a kill."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented UTF-8 JSON to a file that is complete or absent."""
    write_text(path, to_json(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file that is complete or absent. Bytes of a path that are not UTF-8 become escapes."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent."""
    temporary = _temporary(path)
    with naming(path):
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError without one: the system names no file when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, HeedfulError):
            error.filename = str(path)
        raise
