"""Write files and folders so that they are either complete or absent, whatever happens meanwhile."""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``folder`` to write into, and rename it at the end.

    So ``folder`` is complete or does not exist. If it existed before, it is replaced; after an exception it stays as it was.
    """
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
    """Return the file that is in the way because ``path`` needs a folder of that name; None if there is none."""
    return next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Return JSON text. A number that is not finite becomes null, because JSON cannot express it.

    ``indent`` is the number of spaces per level; None writes a single line.
    """
    return json.dumps(_finite(content), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented UTF-8 JSON to a file that is complete or absent."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
