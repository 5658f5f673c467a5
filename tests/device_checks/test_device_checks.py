"""Checks of a device: what becomes of them, and their table.

tests/accelerator/test_doctor.py plants faults for them to notice.
"""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from heedful.apps.device_checks.checks import CHECKS, DeviceCheck, Row, run_check
from heedful.apps.device_checks.result import CheckError, LeftOutError, Measurement, furthest, largest
from heedful.cli import doctor_device
from heedful.devices import CAPABILITIES

CPU = torch.device("cpu")
BY_NAME = {check.name: check for check in CHECKS}


def gives(value, limit=1.0):
    return DeviceCheck("made up", lambda _: Measurement(value, limit, "off"))


def raises(error):
    def measure(bench):
        assert list(bench.folder.iterdir()) == []
        print("on the way")
        raise error

    return DeviceCheck("made up", measure)


@pytest.mark.parametrize(
    ("check", "outcome", "note"),
    [
        (gives(1.0), "pass", "off"),
        (gives(1.1), "fail", "off"),
        (gives(math.nan), "fail", "off"),
        (raises(CheckError("moments are elsewhere")), "fail", "moments are elsewhere"),
        (raises(ValueError("first\nsecond")), "fail", r"ValueError: first \(test_device_checks.py:\d+\)"),
        (raises(LeftOutError("no such library")), "skip", "no such library"),
        (replace(gives(2.0), needs="graphs"), "skip", "cpu has no CUDA graphs"),
        (replace(gives(2.0), needs="bitsandbytes"), "skip", "cpu has no kernels of bitsandbytes"),
    ],
)
def test_what_becomes_of_a_check(capfd, check, outcome, note):
    row = run_check(check, CPU)
    assert (row.check, row.outcome) == ("made up", outcome)
    assert re.fullmatch(note, row.note)
    assert (row.value is None) == (note != "off")
    assert capfd.readouterr() == ("", "")


def test_a_precision_that_the_device_lacks_is_left_out():
    row = run_check(BY_NAME["passes, bfloat16"], torch.device("meta"))
    assert (row.outcome, row.note) == ("skip", "meta has no bfloat16")


def test_differences_are_the_largest_and_never_lost():
    ours, theirs = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])
    assert furthest([(theirs, theirs), (ours, theirs)]) == 0.5
    assert furthest([(ours, theirs)], relative=0.1) == pytest.approx(0.5 - 0.15)
    assert furthest([(theirs, theirs)], relative=0.1) == 0.0
    assert furthest([(ours, theirs), (torch.tensor([math.nan]), torch.tensor([1.0]))]) > 1e38
    assert largest([0.0, math.nan, 1.0]) == math.inf


def test_a_run_far_too_large_is_refused_where_memory_is_known(monkeypatch):
    """As if the CPU's memory were a device's."""
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda _: (8 * 10**9, 16 * 10**9), raising=False)
    row = run_check(BY_NAME["a run far too large"], CPU)
    assert row.outcome == "pass", row
    assert row.note.endswith("8.0 of 16.0 GB are free")
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda _: (10**20, 10**20))
    assert run_check(BY_NAME["a run far too large"], CPU).outcome == "fail"


def test_the_table(heedful, monkeypatch):
    """A line as each check ends, then their number; the same as JSON, and nothing else."""
    shown = (BY_NAME["AdamW in main memory"], replace(gives(2.0), name="坏"), BY_NAME["graphs, qwen3"])
    monkeypatch.setattr(doctor_device, "CHECKS", shown)
    outcome = heedful("doctor", "--device", "cpu")
    assert outcome.status == 2
    assert f"torch        {torch.__version__}" in outcome.out
    table = outcome.out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["pass", "fail", "skip"]
    assert "(at most 1e-06) weights, from fused AdamW's" in table[0]
    assert table[1].endswith("2 (at most 1) off")
    assert table[2].endswith("cpu has no CUDA graphs")
    assert outcome.out.splitlines()[-1].startswith("1 passed, 1 failed, 1 skipped in")
    outcome = heedful("doctor", "--json", "--device=cpu")
    assert outcome.status == 2
    given = json.loads(outcome.out)
    assert (given["pass"], given["fail"], given["skip"]) == (1, 1, 1)
    assert given["about"]["device"].startswith("cpu: ")
    assert [row["outcome"] for row in given["checks"]] == ["pass", "fail", "skip"]
    assert given["checks"][1]["value"] == 2.0
    monkeypatch.setattr(doctor_device, "CHECKS", shown[:1])
    assert heedful("doctor", "device", "--device", "cpu").status == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there(heedful):
    outcome = heedful("doctor", "--device", "cuda")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.message == (
        "heedful: ConfigError: --device: 'cuda' is not available on this machine; --device auto selects one that is"
    )


def test_the_driver_is_what_nvidia_says(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n[ $1 = --query-gpu=driver_version ] && echo 575.57.08\necho 575.57.08\n", encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor_device._driver() == "575.57.08"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n", encoding="utf-8")
    assert doctor_device._driver() == "unknown"
    program.write_text("#!/bin/sh\nexec sleep 9\n", encoding="utf-8")
    monkeypatch.setattr(doctor_device, "LONGEST", 0.1)
    assert doctor_device._driver() == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert doctor_device._driver() == "unknown"


@pytest.mark.parametrize(("value", "written"), [(math.inf, "inf"), (math.nan, "nan"), (2.0, 2.0), (None, None)])
def test_json_has_no_numbers_that_it_cannot_hold(value, written):
    row = Row("made up", "fail", value, 1.0, "off", 0.0).as_dict()
    assert json.loads(json.dumps(row, allow_nan=False))["value"] == written


@pytest.mark.exhaustive
def test_every_check_passes_on_the_cpu_or_says_what_it_lacks(heedful):
    outcome = heedful("doctor", "--device", "cpu", "--json")
    assert outcome.status == 0, outcome.out
    given = json.loads(outcome.out)
    assert len(given["checks"]) == len(CHECKS)
    left_out = {row["check"] for row in given["checks"] if row["outcome"] == "skip"}
    assert left_out == {
        *(name for name in BY_NAME if "graphs" in name or name.startswith("frozen weights")),
        "SFT, moments in main memory", "SFT, both", "8-bit moments", "4-bit weights", "memory against the plan",
        "a run far too large", "no waiting in a step", "a model that waits",
    }  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine that cannot capture")
def test_checks_of_graphs_fail_where_nothing_can_be_recorded(monkeypatch):
    """On a device that claims to have them, sampling continues kernel by kernel, with the same responses and a warning."""
    monkeypatch.setitem(CAPABILITIES, "cpu", replace(CAPABILITIES["cpu"], graphs=True))
    rows = {check.name: run_check(check, CPU) for check in CHECKS if check.needs == "graphs"}
    notes = {name: row.note for name, row in rows.items() if row.outcome == "fail"}
    assert rows.keys() - notes.keys() == {"no waiting in a step"}
    assert notes.pop("a model that waits").startswith("AssertionError: Torch not compiled with CUDA")
    assert all("cannot be captured as a CUDA graph" in note for note in notes.values()), notes
