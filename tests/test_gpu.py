"""The checks of `heedful doctor --device cuda`, one test for each."""

import pytest
import torch

from heedful.device_checks.checks import CHECKS, run_check
from heedful.kernels.device import resolve_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_cuda(check):
    row = run_check(check, resolve_device("cuda"))
    if row.outcome == "skip":
        pytest.skip(row.note)
    assert row.outcome == "pass", row
