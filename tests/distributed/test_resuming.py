"""A run that was cut short goes on with another number of ranks, to the numbers of one that was not."""

import json
import shutil

import pytest

from heedful.faults import POINTS

TOLERANCE = 1e-5
BY_THE_FIRST = {name for name in POINTS if name.startswith("save.")} | {
    "run.moving",
    "run.aside",
    "run.named",
    "run.opened",
    "run.finished",
    "reward.call",
}
"""Points to which only rank 0 comes."""

NOBODY_WAITS = {"run.learned", "run.finished"}
"""Points at which all has been learned: rank 0 saves the final model by itself."""


@pytest.fixture(scope="module")
def go(launch, finished, inputs):
    """``go(size, output, case)`` trains, cut short by faults on one rank if they are given. Returns exit statuses."""

    def of(size, output, case, faults=None, rank=0, timeout=600, **changes):
        per_rank = {rank: {"HEEDFUL_FAULTS": faults}} if faults else None
        variables = {"CHANGES": json.dumps(changes)}
        processes = launch(size, "training.py", inputs(), output, case, per_rank=per_rank, **variables)
        statuses, said = finished(processes, timeout)
        assert faults or statuses == [0] * size, [one[-3000:] for one in said]
        return statuses

    return of


@pytest.fixture(scope="module")
def whole(go, tmp_path_factory):
    """The folder of a run of two ranks that nothing interrupts."""
    made = {}

    def of(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("whole")
            go(2, folder, case)
            made[case] = folder / case
        return made[case]

    return of


def check(comparing, a, b):
    assert comparing.metric_distances(a, b, floor=1.0)[0][0] <= TOLERANCE
    assert comparing.weight_distance(a, b) <= TOLERANCE
    assert comparing.samples_of(a) == comparing.samples_of(b)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["sft", "ppo", "ppo-separate", "grpo-dynamic"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 1, 4)], ids=str)
def test_on_other_numbers_of_ranks(go, whole, comparing, tmp_path, case, sizes):
    """Asked to end after a step, by a signal that reaches one rank, the last one."""
    for size in sizes[:-1]:
        statuses = go(size, tmp_path, case, "step.learned:term@1", rank=size - 1)
        assert all(statuses), "it was to be cut short"
    go(sizes[-1], tmp_path, case)
    check(comparing, whole(case), tmp_path / case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", ["none", "full"])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_is_killed_loses_nothing(go, whole, comparing, tmp_path, point, shard):
    """By kill -9 at each fault point, on rank 1 if it comes there; checkpoints are saved every step."""
    case = "sft" if point == "save.aside" else "ppo-reward"  # it becomes better, so that a best/ is replaced
    rank = 0 if point in BY_THE_FIRST else 1
    replaces = point in {"run.moving", "run.aside"}
    if replaces:
        shutil.copytree(whole(case), tmp_path / case)
    statuses = go(2, tmp_path, case, f"{point}:kill", rank=rank, save_every=1, overwrite=replaces, shard=shard)
    assert statuses[rank] == -9, "the point was not visited"
    assert statuses[1 - rank] != 0 or point in NOBODY_WAITS
    if point == "run.aside":
        assert (tmp_path / case / ".replaced" / "summary.json").exists(), "it waits for the first step of the new run"
    if replaces or not (tmp_path / case / "summary.json").exists():
        go(2, tmp_path, case, save_every=1, overwrite=replaces, shard=shard)
    check(comparing, whole(case), tmp_path / case)


@pytest.mark.exhaustive
def test_a_rank_that_dies_in_the_passes_of_a_divided_value_head_is_named(launch, finished, inputs, tmp_path):
    """They are not made in `AdaptiveMicroBatch.run`, which names those that other passes lose."""
    per_rank, variables = {1: {"HEEDFUL_FAULTS": "update.stepped:kill"}}, {"CHANGES": json.dumps({"shard": "full"})}
    statuses, said = finished(launch(2, "training.py", inputs(), tmp_path, "ppo", per_rank=per_rank, **variables))
    assert statuses == [1, -9]  # training.py is no command
    assert "heedful.errors.RankError: rank 1 of 2 has died" in said[0]
