"""What two runs have that differs: metrics, samples, weights, and the state that a run goes on from."""

import json
import math
from pathlib import Path

from safetensors.torch import load_file

NOT_COMPARED = ("time/", "perf/")
"""Metrics that no two runs have in common."""


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def metrics_of(run):
    """``{(step, name): number}``."""
    found = {}
    for line in lines_of(Path(run) / "metrics.jsonl"):
        step = line.pop("step")
        found |= {(step, name): value for name, value in line.items() if not name.startswith(NOT_COMPARED)}
    return found


def weights_of(run):
    """Every tensor of every model that the run saved."""
    files = sorted(path for path in Path(run).rglob("*.safetensors") if path.parts[-2] != "resume")
    return {f"{path.relative_to(run)}:{name}": t for path in files for name, t in load_file(path).items()}


def distance(a, b):
    """Relative difference of two numbers, of which neither is taken for smaller than 0.01."""
    if a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b), 0.01)


def metric_distances(first, second):
    """The metrics of two runs in the order of how much they differ, the largest first: ``[(distance, step, name)]``."""
    a, b = metrics_of(first), metrics_of(second)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    assert a
    return sorted(((distance(a[key], b[key]), *key) for key in a), reverse=True)


def weight_distance(first, second):
    """The largest relative difference of a tensor, in the Euclidean norm."""
    a, b = weights_of(first), weights_of(second)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    assert a
    return max(float((a[name] - b[name]).norm() / a[name].norm().clamp(min=1e-2)) for name in a)


def samples_of(run):
    """Texts of the samples that were shown, with their steps."""
    return [{k: v for k, v in line.items() if isinstance(v, str | int)} for line in lines_of(Path(run) / "samples.jsonl")]
