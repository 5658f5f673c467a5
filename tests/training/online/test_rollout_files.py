"""Every rollout as Parquet: what is in it, what is left of it after a kill, and that nothing is there twice."""

import os
from pathlib import Path

import pandas
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset

from cases import often
from heedful import GRPOConfig, OnlineDPOConfig, PPOConfig, train_grpo, train_ppo
from heedful.data.chat import Renderer
from heedful.models import load_tokenizer
from trainers import ONLINE

COLUMNS = [
    "step", "prompt", "response", "prompt_ids", "response_ids", "logprobs", "score", "rewards", "shaped_score", "kl",
    "length", "finish_reason", "source", "weights_version", "staleness",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def rows_of(run):
    return [row for path in sorted((run / "rollouts").iterdir()) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("kind", often(ONLINE, [PPOConfig, OnlineDPOConfig]), ids=lambda kind: kind.__name__)
def test_every_response_is_there_with_its_numbers(kind, config, length, numbers):
    settings = config(kind, rollouts="all", missing_eos_penalty=2.0)
    ONLINE[kind](settings, [length])
    rows = rows_of(settings.output)
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8
    for row in rows:
        assert row["prompt"].startswith("say ")
        assert row["source"].startswith(settings.data)
        assert row["score"] == len(row["response"]) == row["rewards"]["length"]
        assert row["length"] == len(row["response_ids"]) == len(row["logprobs"])
        assert row["shaped_score"] == row["score"] - 2.0 * (row["finish_reason"] == "length")
        assert all(logprob <= 0 for logprob in row["logprobs"])
    assert len({row["prompt"] for row in rows}) > 1
    for step, metrics in enumerate([m for m in numbers(settings.output) if "reference/kl" in m], 1):
        of_step = [row for row in rows if row["step"] == step]
        assert sum(row["kl"] for row in of_step) / 8 == pytest.approx(metrics["reference/kl"], rel=1e-5, abs=1e-9)
        assert sum(row["length"] for row in of_step) / 8 == metrics["rollout/response_length"]
        assert sum(row["finish_reason"] == "stop" for row in of_step) / 8 == metrics["rollout/eos_frac"]


def test_the_ids_are_those_of_the_texts(config, length):
    settings = config(rollouts="all", eval_fraction=0.0, rollout_batch_size=20, samples_per_prompt=2, minibatch_size=20)
    train_ppo(settings, [length])
    renderer = Renderer(load_tokenizer(settings.model))
    rows = rows_of(settings.output)
    assert {"say 苹果", "say 梨"} < {row["prompt"] for row in rows}
    for row in rows:
        assert row["prompt_ids"] == list(renderer.prompt_ids(row["prompt"]))
        ids = row["response_ids"][: -1 if row["finish_reason"] == "stop" else None]
        assert renderer.response_text(ids, prompt=row["prompt"]) == row["response"]


def test_pandas_and_datasets_read_them(config, length, tmp_path):
    settings = config(rollouts="all", steps=1, eval_fraction=0.0)
    train_ppo(settings, [length])
    files = str(settings.output / "rollouts" / "*.parquet")
    data = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    frame = pandas.read_parquet(settings.output / "rollouts")
    assert data.column_names == list(frame.columns) == COLUMNS
    assert len(data) == len(frame) == 8


def test_a_response_without_a_score_is_there_without_one(config):
    def broken(completions, **_):
        return [None if i % 4 == 3 else float(len(c)) for i, c in enumerate(completions)]

    settings = config(rollouts="all", max_failed_rewards=0.5, eval_fraction=0.0)
    train_ppo(settings, [broken])
    rows = rows_of(settings.output)
    assert [row["score"] is None for row in rows] == [False, False, False, True] * 4
    assert [row["kl"] is None for row in rows] == [False, False, False, True] * 4
    assert all(row["score"] == len(row["response"]) for row in rows if row["score"] is not None)


def test_no_kl_is_no_number(config, length):
    settings = config(GRPOConfig, rollouts="all", kl_coef=0.0)
    train_grpo(settings, [length])
    assert {row["kl"] for row in rows_of(settings.output)} == {None}


def test_nothing_is_kept_unasked_and_no_number_changes(config, length, numbers, tmp_path):
    train_ppo(config(output=tmp_path / "all", rollouts="all"), [length])
    train_ppo(config(output=tmp_path / "samples"), [length])
    assert numbers(tmp_path / "all") == numbers(tmp_path / "samples")
    assert not (tmp_path / "samples" / "rollouts").exists()


def test_names_that_are_not_utf8_are_escaped(config, prompts, length, tmp_path):
    """As everywhere else: a file's name in another encoding, and a reward's."""
    named = tmp_path / os.fsdecode(b"\xb4\xf0\xc7\xe3.jsonl")
    named.write_bytes(Path(prompts).read_bytes())
    length.__name__ = "gr\udcf6sse"
    settings = config(GRPOConfig, data=str(named), rollouts="all", steps=1, eval_fraction=0.0)
    train_grpo(settings, [length])
    for row in rows_of(settings.output):
        assert r"\udcb4\udcf0\udcc7\udce3.jsonl:" in row["source"]
        assert list(row["rewards"]) == [r"gr\udcf6sse"]


@pytest.mark.parametrize("kind", often([GRPOConfig, OnlineDPOConfig], [GRPOConfig]), ids=lambda kind: kind.__name__)
def test_a_step_whose_file_could_not_be_written_is_done_again(config, length, tmp_path, kind):
    """Something stands in its place; without it the run goes on, and has every file."""
    obstacle = tmp_path / "run" / "rollouts" / "step-000002.parquet"
    in_the_way = [True]

    def stumbles(completions):
        if in_the_way[0] and (tmp_path / "run" / "rollouts" / "step-000001.parquet").exists():
            obstacle.mkdir(exist_ok=True)
        return length(completions)

    settings = config(kind, steps=3, save_every=1, rollouts="all", eval_fraction=0.0)
    with pytest.raises(IsADirectoryError):
        ONLINE[kind](settings, [stumbles])
    obstacle.rmdir()
    in_the_way[0] = False
    ONLINE[kind](settings, [stumbles])
    assert [row["step"] for row in rows_of(settings.output)] == [1] * 8 + [2] * 8 + [3] * 8


def test_a_run_that_was_killed_has_every_response_once(config, length, killed, tmp_path):
    """Killed in step 4, with a checkpoint of step 2, whole files of all steps, and one that was half-written."""
    changes = {"steps": 4, "save_every": 2, "rollouts": "all"}
    train_ppo(config(output=tmp_path / "whole", **changes), [length])
    cut = config(output=tmp_path / "cut", **changes)
    killed("step.logged:kill@4", lambda: train_ppo(cut, [length]))
    folder = tmp_path / "cut" / "rollouts"
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:06d}.parquet" for step in (1, 2, 3, 4)]
    (folder / ".step-000004.parquet.heedful-partial").write_bytes(b"PAR1")
    (folder / "step-000009.parquet").write_bytes((folder / "step-000003.parquet").read_bytes())
    train_ppo(cut, [length])
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
