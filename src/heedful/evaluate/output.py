"""Show and save the result of a measurement."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from heedful.configs.evaluate import EvaluationOptions
from heedful.configs.parse import plain_value
from heedful.display import Screen, harmless, print_table
from heedful.errors import ConfigError
from heedful.files import LARGEST_OUTPUT, check_output_file, read_record, to_json, write_text
from heedful.redact import redact, without_secrets_of

RUN_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json")
"""Names of a run's own files."""


def check_output(config: EvaluationOptions) -> None:
    """Check, before any work, that the result can be written and would overwrite nothing but an earlier result.

    Raises ConfigError.
    """
    output = config.output
    if output is None:
        return
    file = output.resolve()  # works even if a folder of the path does not exist yet, as in data/new/../a.jsonl
    if file.name in RUN_FILES and (file.parent / "environment.json").is_file():
        raise ConfigError(f"--output {output} is a file of the run in {file.parent}; choose another name")
    command = "heedful evaluate"
    check_output_file(output, command, overwrite=config.overwrite, what="a JSON file", is_ours=lambda: _is_result(file))


def _is_result(path: Path) -> bool:
    """Whether a file was written by `report`: a JSON object with the settings of a measurement."""
    if not path.is_file() or path.stat().st_size > LARGEST_OUTPUT:
        return False
    settings = (read_record(path.read_bytes()) or {}).get("settings")
    return isinstance(settings, dict) and "output" in settings


def report(result: Mapping[str, Any], config: EvaluationOptions) -> None:
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
