"""Lines of results: one JSON object for each run, with its processor and seconds."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Results:
    """A file of lines, which grows."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.file.exists():
            yield from map(json.loads, self.file.read_text(encoding="utf-8").splitlines())

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether a line has these values."""
        return any(all(line.get(name) == value for name, value in key.items()) for line in self)

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        """Append a line; returns it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line


def processor() -> str:
    """The name that Linux gives the processor."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0]}" if names else "unknown"
