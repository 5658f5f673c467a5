"""Show and save the result of a measurement."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from heedful.configs.evaluate import EvaluationOptions, TasksConfig
from heedful.configs.parse import plain_value
from heedful.display import Screen, harmless, print_table
from heedful.errors import ConfigError
from heedful.files import blocking_file, to_json, write_text
from heedful.redact import redact, without_secrets_of

RUN_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json")
"""What a run writes into its folder."""
LARGEST_RESULT = 2**26
"""In bytes; a larger file is not a result."""


def check_output(config: EvaluationOptions | TasksConfig) -> None:
    """Check, before any work is done, that the result can be written, and that no file but an earlier result is lost.

    Raises ConfigError.
    """
    output = config.output
    if output is None:
        return
    check_result_file(output)
    file = output.resolve()  # also if a folder of its path is made only later, as in data/new/../a.jsonl
    if file.name in RUN_FILES and (file.parent / "environment.json").is_file():
        raise ConfigError(f"--output {output} is a file of the run in {file.parent}; choose another name")
    if not file.exists():
        return
    if not _is_result(file):
        raise ConfigError(
            f"--output {output} exists and is not a result of heedful evaluate, so it is left alone; choose another name"
        )
    if not config.overwrite:
        raise ConfigError(f"--output {output} exists; choose another name, or add --overwrite to replace it")


def _is_result(path: Path) -> bool:
    """Whether a file is what `report` writes: a JSON object with the settings of a measurement."""
    if not path.is_file() or path.stat().st_size > LARGEST_RESULT:
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    settings = content.get("settings") if isinstance(content, dict) else None
    return isinstance(settings, dict) and "output" in settings


def check_result_file(output: Path, what: str = "a JSON file") -> None:
    """Check that a file can be written to ``output``. Raises ConfigError.

    ``what`` names the kind of file in messages.
    """
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name {what}")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be written: {blocking} is a file")


def report(result: Mapping[str, Any], config: EvaluationOptions | TasksConfig) -> None:
    """Print a result, and write it as JSON if the settings name a file.

    Args:
        result: numbers by their names, and tables (lists of rows), such as samples.
        config: the settings of the measurement; they are written with the result.
    """
    console, output = Screen(soft_wrap=True), config.output
    tables = {name: value for name, value in result.items() if isinstance(value, list)}
    for name, rows in tables.items():
        if rows:
            print_table(console, name, rows)
    for name, value in result.items():
        if name in tables:
            continue
        console.print(harmless(f"{name}: {_written(value)}"), highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {field.name: plain_value(getattr(config, field.name)) for field in fields(config)}
        write_text(
            output, without_secrets_of(config)(to_json({**result, "settings": redact(settings)}, indent=2)) + "\n"
        )
        console.print(f"written to {output}", highlight=False, markup=False)


def _written(value: Any) -> str:
    """A number, or the two of an interval."""
    if isinstance(value, tuple):
        return " to ".join(map(_written, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
