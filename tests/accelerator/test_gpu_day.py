"""The kit for a GPU (benchmarks/gpu_day) on the pretend accelerator: no tensor on a wrong device, and every number right."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from pretend_device import OTHER_NAMES
from rehearsal import DEVICE

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu_day"
MEASURED = {"truth": 11, "memory": 3, "decode": 4, "fit": 1}
"""Results of each row on a device without graphs."""
aten = torch.ops.aten


class Kept(list):
    """Results in memory."""

    add = list.append


def results(row, folder):
    sys.path[:0] = [str(KIT), str(KIT.parent)]
    day = importlib.import_module("common").day(row, DEVICE, Kept(), folder, dry=True)
    getattr(importlib.import_module("truth" if row in ("truth", "memory") else "speed"), row)(day)
    return [line for line in day.results if "left_out" not in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", MEASURED)
def test_a_row_runs_on_a_device(row, tmp_path):
    found = results(row, tmp_path)
    assert [line for line in found if not line.get("right", True)] == []
    assert len(found) == MEASURED[row]


@pytest.mark.exhaustive
def test_products_that_are_off_by_a_thousandth_are_noticed(tmp_path):
    OTHER_NAMES[aten.mm.default] = lambda x, y: aten.mm(x, y) * 1.001
    wrong = [line["what"] for line in results("truth", tmp_path) if not line["right"]]
    assert wrong == [f"{what} beside the CPU's, float32" for what in ("log-probs", "gradients", "a step of PPO")], (
        "bfloat16 is not that exact"
    )
