"""What two runs have that differs: metrics, samples, weights, and the state that a run resumes from."""

import json
import math
from pathlib import Path

from safetensors.torch import load_file

NOT_COMPARED = ("time/", "perf/")
"""Metrics that no two runs have in common."""


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []


def metrics_of(run):
    """``{(step, name): number}``."""
    found = {}
    for line in lines_of(Path(run) / "metrics.jsonl"):
        step = line.pop("step")
        found |= {(step, name): value for name, value in line.items() if not name.startswith(NOT_COMPARED)}
    return found


def weights_of(run):
    """The tensors of best/ and final/, by the path of each file."""
    files = [path for name in ("best", "final") for path in sorted(Path(run, name).rglob("*.safetensors"))]
    return {str(path.relative_to(run)): load_file(path) for path in files}


def distance(a, b, floor):
    """Relative difference of two numbers, of which neither is taken for smaller than ``floor``."""
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b), floor)


def metric_distances(first, second, *, floor=1e-2):
    """The metrics of two runs in the order of how much they differ, the largest first: ``[(distance, step, name)]``."""
    a, b = metrics_of(first), metrics_of(second)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    assert a
    return sorted(((distance(a[key], b[key], floor), *key) for key in a), reverse=True)


def weight_distance(first, second):
    """The largest relative difference of a saved model's weights, in the Euclidean norm."""
    a, b = weights_of(first), weights_of(second)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    assert a
    return max(_norm({k: a[name][k] - b[name][k] for k in a[name]}) / (_norm(a[name]) or 1.0) for name in a)


def _norm(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def samples_of(run):
    """Texts of the samples that were shown, with their steps."""
    return [
        {k: v for k, v in line.items() if isinstance(v, str | int)} for line in lines_of(Path(run) / "samples.jsonl")
    ]
