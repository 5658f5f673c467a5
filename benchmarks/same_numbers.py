"""Ten steps of every kind of training at two revisions: are weights and metrics the same, bit for bit?

PYTHONPATH=REVISION/src python benchmarks/same_numbers.py run --output FOLDER
python benchmarks/same_numbers.py compare FOLDER_BEFORE FOLDER_AFTER

Give the first command once for each revision, on the same machine and with the same copy of this file and of
same_numbers_cases.py. It trains tiny models in float32 on one CPU thread, which takes two to four minutes, and leaves
a numbers.json in the folder of each run: every metric at every step except times, the SHA-256 of every tensor and every
other file of the models that the run saved, and that of its samples. The second command prints what differs, run by
run and metric by metric, and exits with 1 if anything does, or if a run failed.

The runs named start-* make the models that most others start from. `run --start FOLDER` takes these models from an
earlier output, so that a difference in them does not spread to the other runs. `compare --redefined METRIC ...` names
metrics that are meant to differ: they are shown but do not count.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from same_numbers_cases import cases, make_inputs

import heedful

TIMES = ("time/", "perf/")
SAVED = ("best", "final")
SHOWN = 4
"""How many of a run's tensors, and of its files, are named where they differ."""
FAILED: dict[str, Any] = {"metrics": {}, "tensors": {}, "files": {}}

Numbers = Mapping[str, Any]
Points = Sequence[tuple[int, float | None]]
Difference = float | str


def run(options: argparse.Namespace) -> None:
    """Train every case and write its numbers. A case that fails is told, and does not end the others."""
    if options.output.exists() and any(options.output.iterdir()):
        sys.exit(f"{options.output} is not empty; name another folder")
    start = options.start and options.start.resolve()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    os.chdir(options.output)
    facts = {**origin(), "seconds": {}}
    print(f"heedful {facts['revision']} in {facts['heedful']}", flush=True)
    terminal, num_failed = sys.stdout, 0
    with Path("log.txt").open("w", encoding="utf-8") as log, contextlib.ExitStack() as redirected:
        redirected.enter_context(contextlib.redirect_stdout(log))
        redirected.enter_context(contextlib.redirect_stderr(log))
        make_inputs()
        for case in cases():
            folder, began = Path("runs", case.name), time.perf_counter()
            print(f"\n=== {case.name}", flush=True)
            try:
                if start and case.name.startswith("start-"):
                    shutil.copytree(start / folder, folder)
                else:
                    case.train()
                numbers = numbers_of(folder)
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                num_failed += 1
                numbers = FAILED | {"failed": f"{type(error).__name__}: {error}"}
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "numbers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
            facts["seconds"][case.name] = seconds = round(time.perf_counter() - began, 1)
            print(f"{case.name:28} {seconds:5.1f} s  {numbers.get('failed', '')}", file=terminal, flush=True)
    Path("facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"{len(facts['seconds'])} runs in {sum(facts['seconds'].values()):.0f} s, {num_failed} failed (see log.txt)")


def origin() -> dict[str, Any]:
    """The revision, and what else the numbers depend on. Processors with other instructions may round otherwise."""
    home = Path(heedful.__file__).parent
    git = ["git", "-C", str(home), "describe", "--always", "--dirty"]
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    return {
        "heedful": str(home),
        "revision": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{name}, {torch.backends.cpu.get_cpu_capability()}",
    }


def numbers_of(folder: Path) -> dict[str, Any]:
    """Metrics as ``{name: [[step, value], ...]}``, which JSON keeps exactly; hashes of tensors and of other files."""
    metrics = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            if not name.startswith(TIMES):
                metrics[name].append([step, value])
    tensors, files = {}, {}
    for path in sorted(path for part in SAVED for path in (folder / part).rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            tensors |= {f"{name} {key}": tensor_hash(tensor) for key, tensor in load_file(path).items()}
        else:
            content = path.read_bytes().replace(
                str(Path.cwd()).encode(), b"."
            )  # adapters name their base by its full path
            files[name] = hashlib.sha256(content).hexdigest()
    files["samples.jsonl"] = hashlib.sha256((folder / "samples.jsonl").read_bytes()).hexdigest()
    return {"metrics": metrics, "tensors": tensors, "files": files}


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    kind = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(kind + tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def compare(options: argparse.Namespace) -> bool:
    """Print what differs. Returns whether anything that counts does."""
    folders = (options.before, options.after)
    facts = [json.loads((folder / "facts.json").read_text(encoding="utf-8")) for folder in folders]
    for which, fact in zip(("before", "after"), facts, strict=True):
        print(f"{which:6}  heedful {fact['revision']} in {fact['heedful']}; torch {fact['torch']}, {fact['cpu']}")
    if any(facts[0][name] != facts[1][name] for name in ("cpu", "torch", "transformers")):
        print("Processor or libraries are not the same, and that alone may change every number.")
    print(f"\n{'run':28} {'weights':34} {'metrics':34} other files")
    by_metric: dict[str, list[Difference]] = defaultdict(list)
    differing = []
    for name in dict.fromkeys([*facts[0]["seconds"], *facts[1]["seconds"]]):
        metrics, is_rest_equal = compare_run(name, [folder / "runs" / name for folder in folders])
        for metric, what in metrics.items():
            by_metric[metric].append(what)
        if not is_rest_equal or set(metrics) - set(options.redefined):
            differing.append(name)
    if by_metric:
        print(f"\n{'metric':34} {'runs':>5}  difference")
    for metric, found in sorted(by_metric.items()):
        sizes = [what for what in found if isinstance(what, float)]
        told = sorted({what for what in found if isinstance(what, str)}) + ([said(max(sizes))] if sizes else [])
        note = " (redefined)" if metric in options.redefined else ""
        print(f"{metric:34} {len(found):5}  {', '.join(told)}{note}")
    print(f"\n{len(differing)} runs differ: {', '.join(differing)}" if differing else "\nAll that counts is equal.")
    return bool(differing)


def compare_run(name: str, folders: Sequence[Path]) -> tuple[dict[str, Difference], bool]:
    """Print one run's line, and a line for each metric that differs. Returns these, and whether all else is equal."""
    before, after = map(read_numbers, folders)
    metrics = differences(before["metrics"], after["metrics"], metric_difference)
    tensors = differences(before["tensors"], after["tensors"], partial(tensor_difference, folders))
    files = differences(before["files"], after["files"], lambda *_: "differs")
    cells = [cell(tensors, before["tensors"]), cell(metrics, before["metrics"]), cell(files, before["files"])]
    print(f"{name:28} {cells[0]:34} {cells[1]:34} {cells[2]}")
    failures = {which: run["failed"] for which, run in (("before", before), ("after", after)) if "failed" in run}
    for which, error in failures.items():
        print(f"    failed {which}: {error}")
    for key, what in [*metrics.items(), *list(tensors.items())[:SHOWN], *list(files.items())[:SHOWN]]:
        print(f"    {key}: {said(what)}")
    return metrics, not (tensors or files or failures)


def read_numbers(folder: Path) -> dict[str, Any]:
    """The numbers of a run, or that there are none."""
    file = folder / "numbers.json"
    if not file.is_file():
        return FAILED | {"failed": "there is no such run"}
    return json.loads(file.read_text(encoding="utf-8"))


def differences(before: Numbers, after: Numbers, size: Callable[..., Difference]) -> dict[str, Difference]:
    """What is not equal, by name: "missing" or "new" afterwards, or the ``size`` of the difference."""
    found: dict[str, Difference] = {}
    for name in dict.fromkeys([*before, *after]):
        if name not in after or name not in before:
            found[name] = "missing" if name in before else "new"
        elif repr(before[name]) != repr(after[name]):  # 0.0 and -0.0 too
            found[name] = size(name, before[name], after[name])
    return found


def metric_difference(_: str, before: Points, after: Points) -> Difference:
    """The largest relative difference over the steps."""
    if [step for step, _ in before] != [step for step, _ in after]:
        return "recorded at other steps"
    pairs = [(a, b) for (_, a), (_, b) in zip(before, after, strict=True) if repr(a) != repr(b)]
    if any(value is None for pair in pairs for value in pair):
        return "not finite in one of the two"
    return max(abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in pairs)


def tensor_difference(runs: Sequence[Path], key: str, *_: str) -> Difference:
    """The L2 norm of the difference over that of the tensor before."""
    file, name = key.split(" ")
    a, b = (load_file(folder / file)[name] for folder in runs)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}"
    return float((a.double() - b.double()).norm() / (a.double().norm() or 1.0))


def cell(found: dict[str, Difference], total: Numbers) -> str:
    """How many of a run's numbers differ, and by how much at most."""
    if not found:
        return f"equal ({len(total)})" if total else "none"
    sizes = [what for what in found.values() if isinstance(what, float)]
    return f"{len(found)} of {len(total)} differ" + (f", up to {max(sizes):.1e}" if sizes else "")


def said(what: Difference) -> str:
    """A difference in words."""
    return what if isinstance(what, str) else f"differs by up to {what:.1e} of its size"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="train, and write down the numbers")
    runner.add_argument("--output", type=Path, required=True, help="an empty folder, or a new one")
    runner.add_argument("--start", type=Path, help="an earlier output whose start-* models are taken")
    comparison = commands.add_parser("compare", help="print what differs between two outputs")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    comparison.add_argument("--redefined", nargs="*", default=[], metavar="METRIC", help="metrics that may differ")
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        sys.exit(compare(options))


if __name__ == "__main__":
    main()
