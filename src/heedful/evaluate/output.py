"""Show and save the result of a measurement."""

import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from heedful.configs.evaluate import EvaluationOptions, TasksConfig
from heedful.configs.parse import plain_value
from heedful.display import Screen, harmless, print_table
from heedful.errors import ConfigError
from heedful.files import PLAIN, blocking_file, read_record, to_json, write_text
from heedful.redact import redact, without_secrets_of

RUN_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json")
"""Names of a run's own files."""
LARGEST_RESULT = 2**26
"""Maximal size of a result in bytes; a larger file is something else."""


def check_output(config: EvaluationOptions | TasksConfig) -> None:
    """Check, before any work, that the result can be written and would overwrite nothing but an earlier result.

    Raises ConfigError.
    """
    output = config.output
    if output is None:
        return
    check_result_file(output)
    file = output.resolve()  # works even if a folder of the path does not exist yet, as in data/new/../a.jsonl
    if file.name in RUN_FILES and (file.parent / "environment.json").is_file():
        raise ConfigError(f"--output {output} is a file of the run in {file.parent}; choose another name")
    if file.exists() and not _is_result(file):
        raise ConfigError(
            f"--output {output} exists and is not a result of heedful evaluate, so it is left alone; choose another name"
        )
    if file.exists() and not config.overwrite:
        raise ConfigError(f"--output {output} exists; choose another name, or add --overwrite to replace it")


def _is_result(path: Path) -> bool:
    """Whether a file was written by `report`: a JSON object with the settings of a measurement."""
    if not path.is_file() or path.stat().st_size > LARGEST_RESULT:
        return False
    settings = (read_record(path.read_bytes()) or {}).get("settings")
    return isinstance(settings, dict) and "output" in settings


def check_result_file(output: Path, what: str = "a JSON file") -> None:
    """Check that a file of the kind ``what`` can be written to ``output``. Nothing is left there. Raises ConfigError."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name {what}")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be written: {blocking} is a file")
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = PLAIN.get(error.errno or 0, error.strerror)
        raise ConfigError(f"--output {output} cannot be written: {folder}: {reason}; choose another folder") from error


def report(result: Mapping[str, Any], config: EvaluationOptions | TasksConfig) -> None:
    """Print a result, and write it as JSON if the settings name a file.

    Args:
        result: numbers by their names, and tables (lists of rows), such as samples.
        config: the settings of the measurement; they are written with the result.
    """
    console, output = Screen(soft_wrap=True), config.output
    tables = {name: rows for name, rows in result.items() if isinstance(rows, list)}
    for name, rows in tables.items():
        if rows:
            print_table(console, name, rows)
    for name, value in result.items():
        if name not in tables:
            console.print(harmless(f"{name}: {_in_words(value)}"), highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = redact({field.name: plain_value(getattr(config, field.name)) for field in fields(config)})
        write_text(output, without_secrets_of(config)(to_json({**result, "settings": settings}, indent=2)) + "\n")
        console.print(f"written to {output}", highlight=False, markup=False)


def _in_words(value: Any) -> str:
    """A number, or the two ends of an interval, as text."""
    if isinstance(value, tuple):
        return " to ".join(map(_in_words, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
