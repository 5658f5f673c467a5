"""What a measure gives back, shown and saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from heedful.configs.evaluate import EvaluationOptions
from heedful.display import print_table
from heedful.errors import ConfigError
from heedful.files import blocking_file, write_json


def mean_and_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean of values and the half-width of its 95 % interval (normal approximation, sample variance); None for one value."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return {"mean": mean, "interval_95": None}
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return {"mean": mean, "interval_95": 1.96 * (variance / n) ** 0.5}


def clustered_interval(groups: Sequence[Sequence[float]]) -> float:
    """Half-width of the 95 % interval of the mean over all values of all groups, each value alike.

        1.96 / n sqrt(sum_g (sum_{i in g} (x_i - mean))^2)

    Values of one group are not independent, groups are. For groups of one value it is ``1.96 sqrt(variance / n)`` with the
    population variance: of a share p, ``1.96 sqrt(p (1 - p) / n)``.
    """
    n = sum(len(group) for group in groups)
    mean = sum(sum(group) for group in groups) / n
    return 1.96 / n * sum(sum(value - mean for value in group) ** 2 for group in groups) ** 0.5


def prompt_means(values: Sequence[float], samples_per_prompt: int) -> list[float]:
    """Mean of each prompt's consecutive values.

    Responses to one prompt are not independent, prompts are: an interval is taken over these means, which for prompts with
    equally many responses is the standard error clustered by prompt (Miller 2024, "Adding Error Bars to Evals").
    """
    assert len(values) % samples_per_prompt == 0
    return [
        sum(values[start : start + samples_per_prompt]) / samples_per_prompt
        for start in range(0, len(values), samples_per_prompt)
    ]


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
