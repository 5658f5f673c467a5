"""Ranks that cannot train together are refused before they do, by one message that names what differs, and where."""

import json
import os
import re
import shutil
import socket

import pytest
import torch

from heedful import ConfigError
from heedful.distributed import ranks

SFT = [
    "sft", "--model", "policy", "--data", "demonstrations.jsonl", "--max-steps", "2", "--sample-every", "0",
    "--eval-every", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def command(launch, finished, inputs):
    """Exit status and messages of each rank of a command, run in the folder of inputs or in one folder for each rank."""

    def of(size, *words, cwds=None, **options):
        processes = launch(size, "heedful", *words, cwds=cwds or [inputs()] * size, **options)
        statuses, said = finished(processes, timeout=300)
        lines = [[line for line in one.splitlines() if line.startswith("heedful:")] for one in said]
        assert not any("Traceback" in one for one in said), said
        return list(zip(statuses, lines, strict=True))

    return of


def test_other_settings(command, tmp_path):
    first, second = command(2, *SFT, "--output", tmp_path / "run", "--seed", "{rank}")
    assert first[0] == second[0] == 2
    assert re.match(
        "heedful: ConfigError: rank 1 differs from rank 0 in settings: .{12} instead of .{12}; start", first[1][0]
    )
    assert second[1] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_other_data_and_another_model(command, inputs, tmp_path):
    folders = [tmp_path / name for name in ("一", "二")]
    for folder in folders:
        shutil.copytree(inputs(), folder)
    with (folders[1] / "demonstrations.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "more", "completion": "text"}) + "\n")
    (first, _), _ = command(2, *SFT, "--output", tmp_path / "run", cwds=folders), None
    assert first[0] == 2
    assert "rank 1 differs from rank 0 in data demonstrations.jsonl" in first[1][0]
    shutil.copy(folders[0] / "demonstrations.jsonl", folders[1])
    config = folders[1] / "policy" / "config.json"
    config.write_text(config.read_text() + "\n")
    (first, _), _ = command(2, *SFT, "--output", tmp_path / "run", cwds=folders), None
    assert "rank 1 differs from rank 0 in models policy" in first[1][0]


@pytest.mark.exhaustive
def test_more_ranks_than_rows(command, tmp_path):
    found = command(3, *SFT, "--output", tmp_path / "run", "--batch-size", 2)
    assert [status for status, _ in found] == [2, 2, 2]
    assert found[0][1][0].startswith("heedful: ConfigError: 3 ranks, but a step has 2 rows to divide among them")
    assert found[1][1] == found[2][1] == []


@pytest.mark.exhaustive
def test_a_mistake_that_all_ranks_make_is_told_once(command, tmp_path):
    found = command(2, *SFT, "--output", tmp_path / "run", "--data", "no.jsonl")
    assert [status for status, _ in found] == [2, 2]
    assert len(found[0][1]) == 1
    assert found[1][1] == []


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, as in test_compiled.py
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_no_rank_is_compiled_if_one_cannot_be(command, tmp_path):
    """--compile on ends the run on all ranks."""
    cache, nowhere = ({"TORCHINDUCTOR_CACHE_DIR": path} for path in (str(tmp_path / "cache"), "/dev/null/cache"))
    found = command(2, *SFT, "--output", tmp_path / "run", "--compile", "on", **cache, per_rank={1: nowhere})
    assert [status for status, _ in found] == [2, 2]
    assert "heedful: ConfigError: --compile on: torch.compile does not work: " in found[0][1][-1]
    assert "Not a directory" in found[0][1][-1]
    assert any((tmp_path / "cache").iterdir()), "rank 0 could compile"
    assert found[1][1] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_port_that_is_taken(command, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = command(
            2, *SFT, "--output", tmp_path / "run", "--distributed-timeout-minutes", 0.1, port=taken.getsockname()[1]
        )
    assert [status for status, _ in found] == [2, 2]
    assert "the port is taken" in found[0][1][0]
    assert "--master-port" in found[0][1][0]


def test_a_process_alone_is_refused(forked_heedful, inputs):
    """Another command than a trainer, and one of which nothing says which rank it is."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"WORLD_SIZE": "2"}
    for words, rank, said in (
        (["tiny"], {"RANK": "0"}, "heedful tiny is one process; start it without torchrun, which is for trainers\n"),
        (
            SFT,
            {},
            "heedful: ConfigError: RANK is not set, but WORLD_SIZE=2 means several processes; start them with torchrun",
        ),
    ):
        process = forked_heedful(*words, "--output", "run", cwd=inputs(), env=environment | rank)
        _, err = process.communicate()
        assert process.returncode == 2
        assert said in err
        assert len(err.splitlines()) == 1


@pytest.fixture
def environment(monkeypatch):
    """``environment(rank=3, ...)`` sets what a launcher sets."""

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name.upper(), str(value))

    return put


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        (
            "cuda",
            2,
            "rank 3: 4 ranks on a machine with 2 CUDA devices; use torchrun --nproc-per-node 2, or --device cpu",
        ),
        ("cuda:1", 4, "--device cuda:1: 4 ranks cannot share a GPU"),
        ("mps", 0, "--device mps: 4 ranks cannot share it"),
    ],
)
def test_ranks_that_would_share_a_device(monkeypatch, environment, name, gpus, said):
    environment(world_size=4, rank=3, local_rank=3, local_world_size=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=re.escape(said)):
        ranks.local_device(torch.device(name))


def test_each_rank_has_the_device_of_its_number(monkeypatch, environment):
    environment(world_size=4, rank=3, local_rank=1, local_world_size=2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert ranks.local_device(torch.device("cuda")) == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert ranks.local_device(torch.device("cpu")) == torch.device("cpu")
    assert ranks.size() == 1
