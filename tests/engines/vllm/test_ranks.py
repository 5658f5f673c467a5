"""Several ranks that sample on servers: the first talks to them, and all learn from what they draw as one process would."""

import functools

import pytest

from heedful import GRPOConfig, train_grpo
from heedful.configs.parse import to_yaml
from jsonl import read_metrics, timeless
from launched import environment, free_port

CORRECTED = {"importance": "token-truncate"}


@pytest.fixture
def in_ranks(forked_heedful, tmp_path):
    """``in_ranks(config)`` trains in two ranks."""

    def run(config):
        path = tmp_path / "einstellungen.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        port = free_port()
        started = [forked_heedful("grpo", path, env=environment(rank, 2, port)) for rank in range(2)]
        said = [process.communicate(timeout=300)[1] for process in started]
        return [process.returncode for process in started], said

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("plays", [False, True], ids=["answers", "episodes"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"shard": "full"}, {"async_steps": 1, **CORRECTED}, {"shard": "full", "async_steps": 1, **CORRECTED}],
    ids=["whole", "divided", "ahead", "divided ahead"],
)
def test_ranks_learn_from_servers_as_one_process(server, settings, playing, in_ranks, tmp_path, changes, plays):
    first = server()
    make = functools.partial(playing, GRPOConfig, "Dice") if plays else functools.partial(settings, GRPOConfig)
    alone = {name: value for name, value in changes.items() if name != "shard"}
    train_grpo(make(first, **alone))
    asked = first.seen()["completions"]
    status, said = in_ranks(make(first, output=tmp_path / "zwei", **changes))
    assert status == [0, 0], said
    assert len(first.seen()["completions"]) == len(asked) > 0  # by one rank, not by each
    found, expected = ([timeless(one) for one in read_metrics(tmp_path / name)] for name in ("zwei", "run"))
    assert len(found) == len(expected) > 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_server_that_is_gone_ends_all_ranks(server, settings, in_ranks):
    first = server()
    first.set_faults(die_after=40)
    status, said = in_ranks(settings(GRPOConfig, first, sampler_retry_minutes=0.01))
    assert status == [4, 4], said
    assert "resumes once they are back" in said[0]
    assert "Traceback" not in said[0] + said[1]
