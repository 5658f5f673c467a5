"""What a measure gives back, shown and saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from heedful.configs.evaluate import EvaluationOptions
from heedful.display import print_table
from heedful.errors import ConfigError
from heedful.files import blocking_file, write_json


def check_result_file(output: Path | None, what: str = "a JSON file") -> None:
    """Refuse a file that could not be written, before any work is done. Raises ConfigError."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name {what}")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be written: {blocking} is a file")


def report(result: Mapping[str, Any], config: EvaluationOptions) -> None:
    """Print the tables (samples among them) and the numbers; write all as JSON, with the settings, where a file is wanted."""
    console, output = Console(soft_wrap=True), config.output
    tables = {name: value for name, value in result.items() if isinstance(value, list)}
    for name, rows in tables.items():
        if rows:
            print_table(console, name, rows)
    for name, value in result.items():
        if name in tables:
            continue
        console.print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}", highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(config).items()}
        write_json(output, {**result, "settings": settings})
        console.print(f"written to {output}", highlight=False, markup=False)
