"""The first minutes on a GPU: rows that each prove something, most important first, each in a process with a time limit.

benchmarks/gpu_day/run.sh numbers | speed | ROW ...      (run.sh installs the wheels, then starts this script)
benchmarks/gpu_day/run.sh --dry numbers speed            small sizes on the CPU: does the kit run?

README.md beside this file has the table of rows. Each result is a line of JSON, printed and appended to results.jsonl in
--out at once; a row that hangs or fails does not stop the others. ``speed`` is refused unless all of ``numbers`` was right.
The exit status is 1 if a row failed, 2 if ``speed`` was refused.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORK = Path(tempfile.gettempdir()) / "gpu_day"
"""Where models lie from one call to the next, and what ``numbers`` found."""
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
BF16_HOST = {"weights_dtype": "bfloat16", "optimizer_device": "cpu"}
LARGE = {"lora_rank": 16, "batch_size": 4, "micro_batch_size": 1, "gradient_checkpointing": True}
MINUTES = {"numbers": 5.0, "speed": 7.0}
INSTALL = 30
"""Seconds of a call that installing takes at the most."""


@dataclass(frozen=True)
class Row:
    """A measurement in a process of its own."""

    name: str
    call: str
    """numbers, speed, or extra: after the rows of speed, while its whole limit is left."""
    limit: float
    """Seconds."""
    function: str
    """MODULE.NAME of a file here; called with a `common.Day`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


ROWS = (
    Row("versions", "numbers", 30, "truth.versions"),
    Row("truth", "numbers", 80, "truth.truth"),
    Row("memory", "numbers", 40, "truth.memory"),
    Row("doctor", "numbers", 120, "truth.doctor"),
    Row("decode", "speed", 135, "speed.decode"),
    Row("ppo", "speed", 90, "speed.ppo", {"side": "heedful"}),
    Row("ppo-trl", "speed", 100, "speed.ppo", {"side": "trl"}),
    Row("fit", "speed", 50, "speed.fit"),
    Row("attention", "extra", 30, "speed.attention"),
    Row("norms", "extra", 40, "speed.norms"),
    Row("profile", "extra", 90, "speed.profile"),
    Row("ppo-eager", "extra", 75, "speed.ppo", {"side": "heedful, graphs off", "graphs": "off"}),
    Row("8b-lora", "extra", 110, "speed.fit", {"model": "8B", **LARGE}),
    Row("8b-decode", "extra", 70, "speed.decode", {"model": "8B", "cases": ("graphs, 64 rows",)}),
    Row("8b-4bit", "extra", 110, "speed.fit", {"model": "8B", "quantize": "4bit", **LARGE}),
    Row("fit-moments-on-host", "extra", 60, "speed.fit", BF16_HOST),
    Row("fit-adamw-8bit", "extra", 40, "speed.fit", {"optimizer": "adamw-8bit"}),
    Row("fit-compiled", "extra", 60, "speed.fit", {"compile": "on"}),
    Row("fit-expandable", "extra", 40, "speed.fit", environment=EXPANDABLE),
)
"""In the order in which they run."""
NAMES = {row.name: row for row in ROWS}


@dataclass
class Results:
    """Lines of JSON, one a result, on the screen and in a file."""

    file: Path

    def add(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(text + "\n")


def run_row(row: Row, seconds: float, options: argparse.Namespace) -> bool:
    """Run a row for so long at the most. Returns whether it ended well, with all of its numbers right."""
    results, log = Results(options.out / "results.jsonl"), options.out / "log.txt"
    before = size(results.file)
    command = [sys.executable, __file__, "--row", row.name, "--device", options.device, "--out", str(options.out)]
    started, ended = time.monotonic(), "in time"
    with log.open("ab") as err:
        err.write(f"\n== {row.name}\n".encode())
        err.flush()
        logged = size(log)
        process = subprocess.Popen(
            command + ["--dry"] * options.dry, stderr=err, env=os.environ | row.environment, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            ended = "in time" if status == 0 else f"with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s"
        finally:  # what it started goes with it; a process that waits for a broken driver cannot even be killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    right = ended == "in time" and not wrong_rows(read(results.file, before))
    line = {"row": row.name, "ended": ended, "right": right, "seconds": round(time.monotonic() - started, 1)}
    if ended != "in time":
        line["said"] = log.read_bytes()[logged:].decode(errors="replace").strip().splitlines()[-5:]
    results.add(line)
    return right


def size(file: Path) -> int:
    """Bytes of a file, 0 if there is none."""
    return file.stat().st_size if file.exists() else 0


def read(file: Path, start: int = 0) -> list[dict[str, Any]]:
    """Lines of a results file from this byte on."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_bytes()[start:].splitlines()]


def wrong_rows(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Rows with a number that is wrong, or that did not end well."""
    return list(dict.fromkeys(line["row"] for line in lines if not line.get("right", True)))


def refusal(numbers: Path) -> str | None:
    """Why speed is not measured, by what ``numbers`` found; None if all was right."""
    lines = read(numbers)
    ended = {line["row"] for line in lines if "ended" in line}
    missing = [row.name for row in ROWS if row.call == "numbers" and row.name not in ended]
    if missing:
        return f"{numbers} has no result of {', '.join(missing)}; first: run.sh numbers"
    wrong = wrong_rows(lines)
    return f"{numbers} has wrong numbers in {', '.join(wrong)}; mend them, or name single rows" if wrong else None


def run_call(call: str, options: argparse.Namespace) -> int:
    """Run the rows of a call while its minutes last. Returns the exit status."""
    results, numbers = Results(options.out / "results.jsonl"), options.numbers or WORK / "numbers.jsonl"
    why = refusal(numbers) if call == "speed" else None
    if why:
        print(f"speed is not measured: {why}", file=sys.stderr)
        return 2
    before = size(results.file)
    end = options.started + 60 * MINUTES[call]
    good = True
    for row in ROWS:
        if row.call not in (call, "extra" if call == "speed" else call):
            continue
        left = row.limit if options.dry else end - time.time()
        if row.call == "extra" and left < row.limit:
            results.add({"row": row.name, "left_out": f"{left:.0f} s are left, it may take {row.limit:g}"})
            continue
        good = run_row(row, 3 * row.limit if options.dry else min(row.limit, max(1.0, left)), options) and good
    if call == "numbers":
        WORK.mkdir(parents=True, exist_ok=True)
        numbers.write_bytes(results.file.read_bytes()[before:])
    return 0 if good else 1


def run_inside(row: Row, options: argparse.Namespace) -> None:
    """What the process of a row does."""
    sys.path.append(str(HERE.parent))
    if options.device == "pretend":
        sys.path.append(str(HERE.parents[1] / "tests" / "accelerator"))
        importlib.import_module("pretend_device").install()
    common = importlib.import_module("common")
    module, _, name = row.function.partition(".")
    day = common.day(row.name, options.device, Results(options.out / "results.jsonl"), WORK, dry=options.dry)
    getattr(importlib.import_module(module), name)(day, **row.arguments)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"numbers, speed, or rows: {', '.join(NAMES)}")
    parser.add_argument(
        "--dry", action="store_true", help="small sizes, by default on the CPU; the figures mean nothing"
    )
    parser.add_argument("--device", default="", help="cuda by default; pretend is that of tests/accelerator")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu_day")), help="folder of results"
    )
    parser.add_argument("--numbers", type=Path, help="results.jsonl of the call numbers, from another machine")
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--row", choices=NAMES, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.device = options.device or ("cpu" if options.dry else "cuda")
    unknown = [one for one in options.what if one not in MINUTES and one not in NAMES]
    if unknown or not (options.what or options.row):
        parser().error(f"got {unknown or 'nothing'}; choose from numbers, speed, {', '.join(NAMES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.row:
        run_inside(NAMES[options.row], options)
        return 0
    status = 0
    for what in options.what:
        row = NAMES.get(what)
        status = max(status, run_call(what, options) if row is None else not run_row(row, row.limit, options))
        options.started = time.time()
    return status


if __name__ == "__main__":
    sys.exit(main())
