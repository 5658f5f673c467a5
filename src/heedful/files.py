"""Files and folders that are complete or absent, whatever happens while they are written."""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Write into a temporary sibling and rename it at the end, so that ``folder`` is complete or does not exist."""
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def blocking_file(path: Path) -> Path | None:
    """The file that stands where ``path`` needs a folder; None where there is none."""
    return next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)


def to_json(content: Any, *, indent: int | None = None) -> str:
    """JSON text; a number that is not finite becomes null, because JSON has no other word for it."""
    return json.dumps(_finite(content), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented UTF-8 JSON, complete or absent."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
