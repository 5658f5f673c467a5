"""Whole runs that sample on servers: what is learned, how old the weights were, what becomes of a run without servers."""

import contextlib
import functools
import itertools
import random
import threading

import pyarrow.parquet as pq
import pytest
import torch

import worlds
from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, faults, train_grpo, train_online_dpo, train_ppo
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.cli.main import main
from heedful.configs.parse import to_yaml
from heedful.engines.vllm import servers
from jsonl import read_metrics, timeless

CORRECTED = {"importance": "token-truncate"}


@pytest.fixture(autouse=True)
def _no_faults():
    yield
    faults.plan("")


def numbers(folder):
    """The lines of metrics.jsonl, but for times and what servers were asked again."""
    return [
        {name: value for name, value in timeless(one).items() if name != "rollout/sampler_retries"}
        for one in read_metrics(folder)
    ]


def steps_of(folder):
    """The lines of steps, without those of evaluations."""
    return [one for one in numbers(folder) if "reward/score_mean" in one]


def assert_close(found, expected):
    """The same numbers, up to the order in which rows are drawn together, which rounds otherwise."""
    assert [one.keys() for one in found] == [one.keys() for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.exhaustive
def test_failing_servers_change_nothing_of_what_is_learned(server, settings, tmp_path):
    """No row is lost or doubled, no group is cut, no row has another's score: every number of the run is the same."""
    train_grpo(settings(GRPOConfig, server(0)))
    expected = numbers(tmp_path / "run")
    first, second = server(0), server(1)
    first.set_faults(fail=[0, 5, 19], busy=[7], hang_up=[11, 23])
    second.set_faults(fail=[2], hang_up=[9], swap_after=12)
    train_grpo(settings(GRPOConfig, first, second, output=tmp_path / "faulty", sampler_retry_minutes=0.2))
    assert_close(numbers(tmp_path / "faulty"), expected)
    steps = steps_of(tmp_path / "run")
    assert [one["rollout/staleness_max"] for one in steps] == [0.0] * 3
    assert max(one["rollout/sampler_mismatch"] for one in steps) < 1e-4


@pytest.mark.exhaustive
def test_a_run_that_goes_on_learns_what_it_would_have(server, settings, tmp_path):
    first = server()
    train_grpo(settings(GRPOConfig, first))
    faults.plan("pass:raise@3")
    config = settings(GRPOConfig, first, output=tmp_path / "zwei", save_every=1)
    with pytest.raises(RuntimeError, match="a fault point"):
        train_grpo(config)
    faults.plan("")
    train_grpo(config)
    assert_close(numbers(tmp_path / "zwei"), numbers(tmp_path / "run"))


def test_episodes_are_sampled_turn_by_turn(server, playing, tiny, tmp_path):
    """What servers read before each turn is what the trainer learns: their log-probs are its own. Each turn has the tokens
    that are left."""
    train_grpo(playing(GRPOConfig, "Talk", server(), model=tiny("qwen3"), steps=2, rollouts="all"))
    for step in steps_of(tmp_path / "run"):
        assert step["rollout/sampler_mismatch"] < 1e-4
        assert step["rollout/staleness_max"] == 0.0
    rows = [row for path in (tmp_path / "run" / "rollouts").iterdir() for row in pq.read_table(path).to_pylist()]
    assert max(len(row["turn_ends"]) for row in rows) > 1
    assert max(len(row["response_ids"]) for row in rows) == 60
    assert {row["weights_version"] for row in rows} == {0, 1}


@contextlib.contextmanager
def starting(config):
    """A run before its first step."""
    with contextlib.closing(start(config, []).learner) as learner:
        yield learner


def assert_same_episodes(found, expected):
    assert found.batch.tokens() == expected.batch.tokens()
    assert [one.episode for one in found.completions] == [one.episode for one in expected.completions]
    assert [one.prompt.prompt for one in found.completions] == [one.prompt.prompt for one in expected.completions]


@pytest.mark.exhaustive
def test_the_local_engine_servers_and_sampling_ahead_play_the_same_episodes(server, playing):
    """If each token is the most likely one: the same prompts, tokens, turns and rewards."""
    played, there = [], {"sampler": (server().name,)}
    for changes in ({}, there, there | {"async_steps": 1, **CORRECTED}):
        with starting(playing(GRPOConfig, "Talk", temperature=1e-4, eval_fraction=0.0, **changes)) as learner:
            played.append(rollout(learner, next(learner.prompts)).responses)
    assert len({len(one.episode.ends) for one in played[0].completions}) > 1
    for other in played[1:]:
        assert_same_episodes(other, played[0])


def test_sampling_ahead_plays_what_sampling_in_turn_would(server, playing, tmp_path):
    """With the numbers of the step, which also those of environments come from. At the end no process is left, though the
    next batch is being played."""
    config = playing(GRPOConfig, "Deadly", server(), async_steps=1, eval_fraction=0.0, **CORRECTED)
    with starting(config) as learner:
        prompts = next(learner.prompts)
        ahead = learner.async_sampler.generate(learner.policy, prompts, learner.generator, version=0)
        numbers = torch.Generator().manual_seed(random.Random(f"{config.seed}:1").getrandbits(63))
        in_turn = learner.sampler.generate(learner.policy, prompts, numbers, version=0)
    assert_same_episodes(ahead, in_turn)
    torch.testing.assert_close(ahead.logprobs, in_turn.logprobs, atol=1e-5, rtol=1e-4)
    assert ahead.versions.tolist() == in_turn.versions.tolist() == [0] * 16
    processes = [int(noted.stem) for noted in tmp_path.glob("*.pid")]
    assert len(processes) == 16 + 16
    assert worlds.are_gone(processes)


def test_sampling_is_at_most_so_many_steps_ahead(server, settings, tmp_path):
    """Each response says which weights drew it, and the server saw the batches drawn by just those."""
    first, staleness = server(), [0, 1, 2, 2]
    config = settings(GRPOConfig, first, async_steps=2, steps=4, rollouts="all", eval_fraction=0.0, **CORRECTED)
    train_grpo(config, [])
    steps = steps_of(tmp_path / "run")
    assert [one["rollout/staleness_max"] for one in steps] == staleness
    assert [one["rollout/staleness_mean"] for one in steps] == staleness
    tables = [pq.read_table(path) for path in sorted((tmp_path / "run" / "rollouts").iterdir())]
    assert [set(table["staleness"].to_pylist()) for table in tables] == [{one} for one in staleness]
    versions = [step - old for step, old in enumerate(staleness)]
    assert [set(table["weights_version"].to_pylist()) for table in tables] == [{one} for one in versions]
    drew = [row["version"].rpartition("-")[2] for row in first.seen()["completions"]][-64:]
    assert drew == [str(version + 1) for version in versions for _ in range(16)], "the first weights are number 1"
    old = [one["rollout/sampler_mismatch"] > 1e-4 for one in steps]
    assert old == [stale > 0 for stale in staleness], "the policy has moved since"
    assert all((one["importance/log_ratio_max"] > 1e-4) == (one["step"] > 1) for one in steps)


@pytest.mark.exhaustive
def test_all_turns_of_an_episode_are_from_the_same_weights(server, playing, tmp_path):
    """Though evaluations come between with others, which play with environments of their own."""
    first = server()
    ahead = {"async_steps": 2, "steps": 4, "rollouts": "all", "eval_every": 1, **CORRECTED}
    train_grpo(playing(GRPOConfig, "Dice", first, **ahead))
    steps = steps_of(tmp_path / "run")
    assert [one["rollout/staleness_max"] for one in steps] == [0, 1, 2, 2]
    assert min(one["rollout/turns"] for one in steps) > 1
    drew = [int(row["version"].rpartition("-")[2]) for row in first.seen()["completions"]]
    assert [version for version, _ in itertools.groupby(drew)] == [1, 2, 3, 4, 5]


@pytest.mark.exhaustive
@pytest.mark.parametrize("plays", [False, True])
def test_a_run_ahead_goes_on_with_the_same_prompts(server, settings, playing, tmp_path, plays):
    """What was being drawn is drawn anew: each step has the prompts that it would have had, each once, and environments
    draw the same numbers."""
    first, make = (
        server(),
        functools.partial(playing, GRPOConfig, "Dice") if plays else functools.partial(settings, GRPOConfig),
    )
    settings_ = {"async_steps": 1, "steps": 4, "rollouts": "all", **CORRECTED}
    train_grpo(make(first, **settings_))
    config = make(first, output=tmp_path / "zwei", save_every=1, **settings_)
    faults.plan("pass:raise@3")
    with pytest.raises(RuntimeError, match="a fault point"):
        train_grpo(config)
    faults.plan("")
    train_grpo(config)
    read = [
        [pq.read_table(path)["prompt"].to_pylist() for path in sorted((tmp_path / name / "rollouts").iterdir())]
        for name in ("run", "zwei")
    ]
    assert len(read[0]) == 4
    assert read[0] == read[1]
    assert [one["rollout/staleness_max"] for one in steps_of(tmp_path / "zwei")] == [0, 1, 0, 1]


def test_every_kind_of_weights_goes_through_the_servers(server, settings, tmp_path):
    """The reference for the scores' scale, the average at evaluations, the live policy: each with its own log-probs."""
    first = server()
    changes = {"ema_decay": 0.9, "eval_every": 1, "score_norm_samples": 4, "steps": 2}
    train_ppo(settings(PPOConfig, first, reference=settings(GRPOConfig).model, **changes))
    steps = steps_of(tmp_path / "run")
    assert all(one["rollout/sampler_mismatch"] < 1e-4 for one in steps)
    versions = [row["version"] for row in first.seen()["completions"]]
    assert len(dict.fromkeys(versions)) == 4, "start and reference, step 1's average, its weights, step 2's average"


@pytest.mark.exhaustive
def test_online_dpo_samples_on_servers(server, settings, tmp_path):
    train_online_dpo(settings(OnlineDPOConfig, server(), steps=1))
    (step,) = steps_of(tmp_path / "run")
    assert step["rollout/staleness_max"] == 0.0


def command(config, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return main(["grpo", str(path)])


def test_a_server_that_is_gone_leaves_a_run_that_goes_on(server, settings, tmp_path, capsys, monkeypatch):
    """Exit status 4, a message with the address, and the same command goes on once it is back."""
    dying = server(1)
    config = settings(GRPOConfig, dying, sampler_retry_minutes=0.01)
    dying.set_faults(die_after=2 + 3 + 16 + 5)  # the trial, the evaluation, the first batch, part of the second
    assert command(config, tmp_path) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert f"heedful: SamplerError: --sampler: no server answers. {dying.name}" in said
    assert command(config, tmp_path) == 4, "of a run that goes on it is no mistake"
    said = " ".join(capsys.readouterr().err.split())
    assert f"{dying.name} cannot be reached" in said
    monkeypatch.setattr(servers, "FIRST_PATIENCE", 0.1)
    threading.Timer(0.3, dying.come_back).start()
    assert command(settings(GRPOConfig, dying, sampler_retry_minutes=0.2), tmp_path) == 0, "it was waited for"
    assert [one["step"] for one in steps_of(tmp_path / "run")] == [1, 2, 3]


def test_a_server_on_the_trainers_gpu_sleeps_before_memory_is_looked_at(server, settings, monkeypatch):
    """A machine of four pages, on which nothing fits."""
    first = server()
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    with pytest.raises(ConfigError, match=r"this run needs about .* GB for weights"):
        train_grpo(settings(GRPOConfig, first, sampler_sleep=True))
    assert first.seen()["orders"] == ["/sleep"]


@pytest.mark.exhaustive
def test_a_run_waits_for_a_server_that_comes_back(server, settings, tmp_path):
    dying = server(1)
    dying.set_faults(die_after=2 + 3 + 16 + 5)
    seen = []

    def reward(completions, **_):
        seen.append(len(completions))
        if len(seen) == 3:  # the trial, the evaluation, the first batch
            threading.Timer(0.3, dying.come_back).start()
        return [float(len(c)) for c in completions]

    train_grpo(settings(GRPOConfig, dying, sampler_retry_minutes=0.2, rewards=()), [reward])
    steps = read_metrics(tmp_path / "run", having="rollout/sampler_retries")
    assert [one["rollout/sampler_retries"] > 0 for one in steps] == [False, True, False]
    assert max(one["rollout/sampler_mismatch"] for one in steps) < 1e-4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampler": ("http://a:1",)}, "'http://a:1' is not a sampler; write vllm:http://HOST:PORT"),
        ({"sampler": ("vllm:a:1",)}, "write vllm:http://HOST:PORT"),
        ({"sampler": ("vllm:http://a:99999999",)}, "is not an address"),
        ({"sampler": ("vllm:http://a:1/v1",)}, "without a path"),
        ({"sampler": ("vllm:http://me:pw@a:1",)}, "holds a user or password"),
        ({"sampler": ("vllm:http://a:1,vllm:http://a:1/",)}, "names a server twice"),
        ({"sampler": (), "async_steps": 1}, "--async-steps 1 belongs to --sampler"),
        ({"sampler": (), "sampler_sleep": True}, "--sampler-sleep True belongs to --sampler"),
        ({"top_p": 0.9}, "--top-p 0.9 draws from another distribution .* --importance token-truncate"),
        ({"top_k": 5}, "--top-k 5 draws from another"),
        ({"async_steps": 1}, "trains on responses of older weights without a correction; add --importance"),
        ({"async_steps": 1, "dynamic_sampling_rounds": 1, **CORRECTED}, "does not go with --dynamic-sampling-rounds"),
        ({"async_steps": 1, "sampler_sleep": True, **CORRECTED}, "with --sampler-sleep servers sleep"),
        (
            {"async_steps": 2, "sampler_weights": "nccl", **CORRECTED},
            "use --sampler-weights folder, or --async-steps 1",
        ),
        ({"sampler_weights": "nccl", "sampler_folder": "x"}, "--sampler-folder belongs to"),
        ({"sampler_weights": "nccl", "sampler_sleep": True}, "nccl does not go with --sampler-sleep"),
        ({"cuda_graphs": "on"}, "--cuda-graphs on is about sampling in this process"),
        ({"quantize": "4bit", "lora_rank": 4}, "does not go with --quantize 4bit"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(changes, said, settings):
    with pytest.raises(ConfigError, match=said):
        settings(GRPOConfig, **({"sampler": ("vllm:http://a:1",)} | changes))


def test_addresses_may_be_a_list_or_one_word(settings):
    config = settings(GRPOConfig, sampler=("vllm:http://a:1,vllm:http://b:2/", "vllm:https://c"))
    assert config.sampler_addresses == ("http://a:1", "http://b:2", "https://c")
