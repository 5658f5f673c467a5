"""What a measure gives back, shown and saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from heedful.display import print_table
from heedful.files import write_json


def mean_and_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean of values and the half-width of its 95 % interval (normal approximation, sample variance)."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else float("nan")
    return {"mean": mean, "interval_95": 1.96 * (variance / n) ** 0.5}


def report(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], output: Path | None) -> None:
    """Print a table of samples and the numbers; write them as JSON where a file is wanted."""
    console = Console(soft_wrap=True)
    if rows:
        print_table(console, "samples", rows)
    for name, value in result.items():
        console.print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}", highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
        console.print(f"written to {output}", highlight=False)
