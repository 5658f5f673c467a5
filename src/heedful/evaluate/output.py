"""Show and save the result of a measurement."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from heedful.configs.evaluate import EvaluationOptions
from heedful.configs.scoring import redacted
from heedful.display import print_table
from heedful.errors import ConfigError
from heedful.files import blocking_file, write_json


def check_result_file(output: Path | None, what: str = "a JSON file") -> None:
    """Check, before any work is done, that a result can be written to ``output``. Raises ConfigError.

    ``what`` names the kind of file in messages.
    """
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name {what}")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be written: {blocking} is a file")


def report(result: Mapping[str, Any], config: EvaluationOptions) -> None:
    """Print a result, and write it as JSON if the settings name a file.

    Args:
        result: numbers by their names, and tables (lists of rows), such as samples.
        config: the settings of the measurement; they are written with the result.
    """
    console, output = Console(soft_wrap=True), config.output
    tables = {name: value for name, value in result.items() if isinstance(value, list)}
    for name, rows in tables.items():
        if rows:
            print_table(console, name, rows)
    for name, value in result.items():
        if name in tables:
            continue
        console.print(f"{name}: {_written(value)}", highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: _setting(value) for name, value in vars(config).items()}
        write_json(output, {**result, "settings": settings})
        console.print(f"written to {output}", highlight=False, markup=False)


def _setting(value: Any) -> Any:
    """A setting as it is written down: addresses of servers without their queries, which may hold passwords."""
    if isinstance(value, tuple):
        return [_setting(one) for one in value]
    if isinstance(value, str) and value.startswith(("http:", "https:")):
        return redacted(value)
    return str(value) if isinstance(value, Path) else value


def _written(value: Any) -> str:
    """A number, or the two of an interval."""
    if isinstance(value, tuple):
        return " to ".join(map(_written, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
