"""What every measured process counts and prints, in one form for all sides. Standard library alone, to weigh nothing."""

import argparse
import json
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any


def iteration_arguments(
    description: str | None, dtypes: Sequence[str] = ("auto", "float32")
) -> argparse.ArgumentParser:
    """A parser with the settings that all sides of a comparison of iterations share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="folder made by workload.py")
    parser.add_argument("--batch", type=int, default=64, help="responses an iteration")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="iterations left out of the medians")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument(
        "--natural-eos", action="store_true", help="responses end at EOS; otherwise all have full length"
    )
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="what matrix products are computed in; auto: as each side chooses",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def policy_folder(options: argparse.Namespace) -> str:
    return f"{options.workload}/{'policy-natural' if options.natural_eos else 'policy'}"


def peak_memory() -> int:
    """Most bytes that this process has held so far.

    A process starts with its parent's memory as its peak, so whatever starts a measured one must be small itself.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def iteration_report(
    options: argparse.Namespace,
    *,
    side: str,
    seconds: Sequence[float],
    phases: dict[str, Sequence[float]],
    lengths: Sequence[float],
    import_memory: int,
    device_memory: int | None,
) -> dict[str, Any]:
    """One run as a JSON object. ``lengths`` are each iteration's mean response tokens, EOS included.

    ``import_memory`` is what the process held after its imports alone. On a GPU ``device_memory`` is the peak there, which
    imports take nothing of.
    """
    timed = slice(options.warmup, None)
    median = statistics.median(seconds[timed])
    mean_length = statistics.fmean(lengths[timed])
    return {
        "side": side,
        "natural_eos": options.natural_eos,
        "dtype": options.dtype,
        "seconds_median": round(median, 4),
        "seconds": [round(duration, 4) for duration in seconds],
        "phase_seconds": {name: round(statistics.median(each[timed]), 4) for name, each in phases.items()},
        "mean_response_tokens": round(mean_length, 2),
        "response_tokens_per_second": round(options.batch * mean_length / median, 1),
        "import_memory_bytes": import_memory if device_memory is None else 0,
        "peak_memory_bytes": peak_memory() if device_memory is None else device_memory,
        "threads": options.threads,
    }


def print_report(report: dict[str, Any]) -> None:
    """As the last line of the output, which may hold a library's own lines before it."""
    print(json.dumps(report), flush=True)
