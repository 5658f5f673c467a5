"""The kit for a GPU (benchmarks/gpu_day) on the pretend accelerator: no tensor on a wrong device, and every number right."""

import importlib
import sys
from pathlib import Path

import pytest
from rehearsal import DEVICE

from cases import often

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu_day"


class Kept(list):
    """Results in memory."""

    add = list.append


@pytest.mark.parametrize("row", often(["truth", "memory", "decode", "fit"], ["truth"]))
def test_a_row_runs_on_a_device(row, tmp_path):
    sys.path[:0] = [str(KIT), str(KIT.parent)]
    day = importlib.import_module("common").day(row, DEVICE, Kept(), tmp_path, dry=True)
    module = "truth" if row in ("truth", "memory") else "speed"
    getattr(importlib.import_module(module), row)(day)
    assert [line for line in day.results if not line.get("right", True)] == []
    assert (
        len([line for line in day.results if "left_out" not in line])
        == {"truth": 11, "memory": 3, "decode": 4, "fit": 1}[row]
    )
