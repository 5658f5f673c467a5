"""The checks of ``heedful doctor --device`` on the pretend accelerator: all pass, and planted faults are noticed."""

import pytest
import torch
from pretend_device import OTHER_NAMES, Module
from rehearsal import DEVICE

from heedful.apps.device_checks.checks import CHECKS, LACKED, run_check

BY_NAME = {check.name: check for check in CHECKS}
aten = torch.ops.aten


def outcome(name):
    return run_check(BY_NAME[name], torch.device(DEVICE))


@pytest.mark.exhaustive
def test_every_check_passes_or_says_what_the_device_lacks():
    torch.set_num_threads(1)
    rows = [outcome(name) for name in BY_NAME]
    failed = [row for row in rows if row.outcome == "fail"]
    assert not failed
    left_out = {row.check: row.note for row in rows if row.outcome == "skip"}
    lacked = {check.name: f"{DEVICE} has no {LACKED[check.needs]}" for check in CHECKS if check.needs}
    assert left_out == lacked | {"a divided model, one rank": f"{DEVICE} has no collectives"}


# Planted faults: a check fails that passes without


@pytest.mark.parametrize(
    ("name", "kernel", "fault"),
    [
        ("passes, float32", aten.mm.default, lambda x, y: aten.mm(x, y) * 1.01),
        ("sampled log-probs, float32", aten.mm.default, lambda x, y: aten.mm(x, y) * (1.01 if len(x) <= 20 else 1)),
        pytest.param("greedy sampling", aten.argmax.default, aten.argmin.default, marks=pytest.mark.exhaustive),
    ],
    ids=["a pass", "sampling", "greedy sampling"],
)
def test_a_wrong_kernel_is_noticed(monkeypatch, name, kernel, fault):
    assert outcome(name).outcome == "pass"
    monkeypatch.setitem(OTHER_NAMES, kernel, fault)
    row = outcome(name)
    assert row.outcome == "fail"
    assert row.value > row.limit


def test_random_numbers_that_do_not_come_back_are_noticed(monkeypatch):
    name = "random numbers on resuming"
    assert outcome(name).outcome == "pass"
    monkeypatch.setattr(Module, "set_rng_state", lambda *_: None)
    row = outcome(name)
    assert (row.outcome, row.limit) == ("fail", 0)
    assert row.value > 900
