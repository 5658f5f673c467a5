"""docs/resume.md: its loop ends when it should, and its lists are the code's."""

import re
import subprocess
from pathlib import Path

import pytest

from heedful.configs.settings import flag
from heedful.training.provenance import MUTABLE_ON_RESUME, PER_INVOCATION, TRACKING

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "resume.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("statuses", "calls"),
    [("0", 1), ("137 143 129 0", 4), ("130 0", 1), ("4 0", 1), ("137 130 0", 2), ("2 0", 1), ("3 0", 1)],
)
def test_the_loop_goes_on_after_a_kill_and_ends_with_ctrl_c(tmp_path, statuses, calls):
    """heedful heeds Ctrl-C and then ends with a status of its own, so that the shell would not end the loop by itself."""
    (loop,) = re.findall(r"^until .*$", PAGE, re.M)
    command = tmp_path / "heedful"
    command.write_text(f'#!/bin/sh\necho x >> calls\nset -- {statuses}\nshift $(($(wc -l < calls) - 1))\nexit "$1"\n')
    command.chmod(0o755)
    subprocess.run(["bash", "-c", f"PATH=.:$PATH\n{loop}"], cwd=tmp_path, timeout=120, check=False)
    assert (tmp_path / "calls").read_text().split() == ["x"] * calls


def test_the_settings_that_may_always_change():
    (said,) = re.findall(r"chosen anew\. (.*?) and the trackers", PAGE, re.S)
    assert set(re.findall(r"`(--[\w-]+)`", said)) == {
        flag(name) for name in MUTABLE_ON_RESUME if name not in {*PER_INVOCATION, *TRACKING}
    }
