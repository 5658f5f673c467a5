"""A rank that dies, hangs or fails ends the job: soon, with a message that names it, told by one rank."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 300


@pytest.fixture(scope="module")
def ended(launch):
    """Exit status of each rank and what it said; what hangs is left out."""

    def of(seconds, *does, **variables):
        processes = launch(len(does), "failing.py", seconds, *does, **variables)
        found = []
        try:
            for process, what in zip(processes, does, strict=True):
                if what != "hang":
                    _, said = process.communicate(timeout=LIMIT)
                    found.append((process.returncode, [x for x in said.splitlines() if x.startswith("heedful:")]))
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return found

    return of


def test_an_error_on_one_rank_is_told_by_the_first(ended):
    first, second = ended(600, "go on", "raise")
    assert first == (2, ["heedful: RankError: rank 1 of 2: DataError: 坏的 line 3"])
    assert second == (2, [])


@pytest.mark.parametrize("does", ["go on", pytest.param("save", marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_is_named(ended, does):
    """Also while the others write their parts."""
    first, second = ended(600, does, "kill")
    assert first[0] == 4
    assert "heedful: RankError: rank 1 of 2 has died (" in first[1][0]
    assert second == (-9, [])


@pytest.fixture(scope="module")
def torchrun():
    """``torchrun(*does)``: its exit status and what it and its ranks said; the ranks act as those of NCCL do."""
    script = str(Path(__file__).with_name("failing.py"))

    def of(*does):
        options = ["--standalone", "--nproc-per-node", str(len(does))]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, script, "600", *does],
            env=os.environ | {"LIKE_NCCL": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"},
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT,
            check=False,
        )
        return done.returncode, done.stderr

    return of


@pytest.mark.exhaustive
def test_a_rank_that_fails_beside_gpus_that_wait_ends_the_job(torchrun):
    """NCCL raises nothing in the others, and the end of its groups is a sum itself, for which nobody may wait: torchrun ends
    them once the one that failed has ended."""
    status, said = torchrun("block", "raise")
    assert status == 1
    assert said.count("heedful: rank 1: DataError: 坏的 line 3") == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: 2 ", said), said


@pytest.mark.exhaustive
def test_a_rank_that_dies_beside_gpus_that_wait_ends_the_job(torchrun):
    status, said = torchrun("block", "kill", "block")
    assert status == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 ", said), said
    assert "Signal 9 (SIGKILL)" in said


@pytest.mark.exhaustive
def test_a_mistake_of_our_own_beside_gpus_has_its_traceback(torchrun):
    """Also where the process must end at once."""
    status, said = torchrun("block", "break")
    assert status == 1
    assert said.count("ValueError: a mistake of our own") == 1
    assert "Traceback" in said


@pytest.mark.exhaustive
def test_without_the_first_rank_another_speaks(ended):
    """Rank 0 served the store, so the others know only that it is gone."""
    first, *others = ended(600, "kill", "go on", "go on")
    assert first == (-9, [])
    assert [status for status, _ in others] == [4, 4]
    said = [line for _, lines in others for line in lines]
    assert len(said) >= 1
    assert said[0].startswith("heedful: rank 1: RankError: rank")
    assert "0" in said[0].split("of 3")[0]


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_named_after_the_timeout(ended):
    first, second = ended(4, "go on", "hang", "go on")
    assert first[0] == second[0] == 4
    assert first[1][0].startswith(
        "heedful: RankError: rank 1 of 3 hangs, or is slower than --distributed-timeout-minutes"
    )
    assert second[1] == []


@pytest.mark.exhaustive
def test_an_error_on_every_rank_is_told_once(ended):
    found = ended(600, "raise", "raise", "raise")
    assert found == [(2, ["heedful: DataError: 坏的 line 3"]), (2, []), (2, [])]


@pytest.mark.exhaustive
def test_a_mistake_of_our_own_has_its_traceback_and_ends_the_others(ended):
    first, second = ended(600, "go on", "break")
    assert first == (1, ["heedful: RankError: rank 1 of 2: ValueError: a mistake of our own"])
    assert second[0] == 1


@pytest.mark.exhaustive
def test_a_rank_that_is_asked_to_end_ends_all(ended):
    first, second = ended(600, "go on", "terminate")
    assert first == (143, ["heedful: RankError: rank 1 of 2: Terminated"])
    assert second == (143, [])
