"""Every rollout as Parquet: what is in it, what is left of it after a kill, and that nothing is there twice."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pandas
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM

from cases import often
from heedful import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig, core, train_grpo, train_ppo
from heedful.algorithms.online.rollout_files import OF_TOKENS
from heedful.data.batches import collate
from heedful.data.chat import Renderer
from heedful.engines.teacher_forced import token_outputs
from heedful.models import load_policy, load_tokenizer
from heedful.types import MicroBatch
from trainers import ONLINE, TRAIN, varied

COLUMNS = [
    "step", "prompt", "response", "prompt_ids", "response_ids", "logprobs", "score", "rewards", "shaped_score", "kl",
    "length", "finish_reason", "source", "weights_version", "staleness", *OF_TOKENS,
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(run):
    return [row for path in sorted((run / "rollouts").iterdir()) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("kind", often(ONLINE, [PPOConfig, OnlineDPOConfig]), ids=lambda kind: kind.__name__)
def test_every_response_is_there_with_its_numbers(kind, config, length, numbers, tmp_path):
    """Also as pandas and datasets read them; nothing is kept unasked, and no number of the run changes."""
    sizes = {"rollout_batch_size": 16, "minibatch_size": 16, "samples_per_prompt": 2, "eval_fraction": 0.0}
    settings = config(kind, rollouts="all", missing_eos_penalty=2.0, **sizes)
    ONLINE[kind](settings, [length])
    rows, renderer = rows_of(settings.output), Renderer(load_tokenizer(settings.model))
    assert [row["step"] for row in rows] == [1] * 16 + [2] * 16
    assert {"say 苹果", "say 梨"} < {row["prompt"] for row in rows}
    for row in rows:
        assert row["source"].startswith(settings.data)
        assert row["score"] == len(row["response"]) == row["rewards"]["length"]
        assert row["length"] == len(row["response_ids"]) == len(row["logprobs"])
        assert row["shaped_score"] == row["score"] - 2.0 * (row["finish_reason"] == "length")
        assert all(logprob <= 0 for logprob in row["logprobs"])
        assert row["prompt_ids"] == list(renderer.prompt_ids(row["prompt"]))
        ids = row["response_ids"][: -1 if row["finish_reason"] == "stop" else None]
        assert renderer.response_text(ids, prompt=row["prompt"]) == row["response"]
    for step, metrics in enumerate(numbers(settings.output), 1):
        of_step = [row for row in rows if row["step"] == step]
        assert sum(row["kl"] for row in of_step) / 16 == pytest.approx(metrics["reference/kl"], rel=1e-5, abs=1e-9)
        assert sum(row["length"] for row in of_step) / 16 == metrics["rollout/response_length"]
        assert sum(row["finish_reason"] == "stop" for row in of_step) / 16 == metrics["rollout/eos_frac"]
    files = str(settings.output / "rollouts" / "*.parquet")
    data = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    frame = pandas.read_parquet(settings.output / "rollouts")
    assert data.column_names == list(frame.columns) == COLUMNS
    assert len(data) == len(frame) == 32
    samples = replace(settings, rollouts="samples", output=tmp_path / "samples")
    ONLINE[kind](samples, [length])
    assert numbers(samples.output) == numbers(settings.output)
    assert not (samples.output / "rollouts").exists()


def test_a_response_without_a_score_is_there_without_one(config):
    def broken(completions, **_):
        return [None if i % 4 == 3 else float(len(c)) for i, c in enumerate(completions)]

    settings = config(rollouts="all", max_failed_rewards=0.5, eval_fraction=0.0, steps=1)
    train_ppo(settings, [broken])
    rows = rows_of(settings.output)
    assert [row["score"] is None for row in rows] == [False, False, False, True] * 2
    for name in ("kl", *OF_TOKENS):
        assert [row[name] is None for row in rows] == [False, False, False, True] * 2, name
    assert all(row["score"] == len(row["response"]) for row in rows if row["score"] is not None)


def test_names_that_are_not_utf8_are_escaped(config, prompts, length, tmp_path):
    """As everywhere else: a file's name in another encoding, and a reward's."""
    named = tmp_path / os.fsdecode(b"\xb4\xf0\xc7\xe3.jsonl")
    named.write_bytes(Path(prompts).read_bytes())
    length.__name__ = "gr\udcf6sse"
    settings = config(GRPOConfig, data=str(named), rollouts="all", steps=1, eval_fraction=0.0)
    train_grpo(settings, [length])
    rows = rows_of(settings.output)
    assert {row["source"].rpartition("/")[2].rpartition(":")[0] for row in rows} == {r"\udcb4\udcf0\udcc7\udce3.jsonl"}
    assert {name for row in rows for name in row["rewards"]} == {r"gr\udcf6sse"}


@pytest.mark.parametrize("kind", often([GRPOConfig, OnlineDPOConfig], [GRPOConfig]), ids=lambda kind: kind.__name__)
def test_a_step_whose_file_could_not_be_written_is_done_again(config, length, tmp_path, kind):
    """Something stands in its place; without it the run goes on, and has every file."""
    obstacle = tmp_path / "run" / "rollouts" / "step-000002.parquet"
    in_the_way = [True]

    def stumbles(completions):
        if in_the_way[0] and (tmp_path / "run" / "rollouts" / "step-000001.parquet").exists():
            obstacle.mkdir(exist_ok=True)
        return length(completions)

    settings = config(kind, steps=2, save_every=1, rollouts="all", eval_fraction=0.0)
    with pytest.raises(IsADirectoryError):
        ONLINE[kind](settings, [stumbles])
    obstacle.rmdir()
    in_the_way[0] = False
    ONLINE[kind](settings, [stumbles])
    assert [row["step"] for row in rows_of(settings.output)] == [1] * 8 + [2] * 8


def test_a_run_that_was_killed_has_every_response_once(config, length, killed, tmp_path):
    """Killed in step 4, with a checkpoint of step 2, whole files of all steps, and one that was half-written."""
    changes = {"steps": 4, "save_every": 2, "rollouts": "all", "eval_fraction": 0.0, "max_new_tokens": 4}
    train_ppo(config(output=tmp_path / "whole", **changes), [length])
    cut = config(output=tmp_path / "cut", **changes)
    killed("step.logged:kill@4", lambda: train_ppo(cut, [length]))
    folder = tmp_path / "cut" / "rollouts"
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:06d}.parquet" for step in (1, 2, 3, 4)]
    (folder / ".step-000004.parquet.heedful-partial").write_bytes(b"PAR1")
    (folder / "step-000009.parquet").write_bytes((folder / "step-000003.parquet").read_bytes())
    train_ppo(cut, [length])
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


CASES = {
    "ppo": (PPOConfig, {"ppo_epochs": 2}, set(OF_TOKENS)),
    "one-update": (PPOConfig, {"ppo_epochs": 1, "value_epochs": 1}, set(OF_TOKENS)),
    "critic": (PPOConfig, {"critic": "separate"}, set(OF_TOKENS)),
    "grpo": (GRPOConfig, {"kl_coef": 0.0}, set(OF_TOKENS) - {"ref_logprobs", "values", "returns"}),
    "rloo": (GRPOConfig, {"advantage": "rloo", "kl_in": "reward"}, set(OF_TOKENS) - {"values", "returns"}),
    "a2c": (A2CConfig, {}, set(OF_TOKENS)),
    "online-dpo": (OnlineDPOConfig, {}, {"old_logprobs", "ref_logprobs", "entropy", "log_ratio"}),
    "online-dpo-twice": (OnlineDPOConfig, {"ppo_epochs": 2}, {"old_logprobs", "ref_logprobs", "entropy", "log_ratio"}),
}


@pytest.mark.parametrize("name", often(CASES, ["one-update", "grpo"]))
def test_each_algorithm_has_the_columns_that_it_knows(name, config):
    kind, changes, columns = CASES[name]
    settings = config(kind, rollouts="all", eval_fraction=0.0, learning_rate=1e-2, **changes)
    TRAIN[kind](settings, [varied])
    rows = rows_of(settings.output)
    assert len(rows) == 16
    for row in rows:
        assert {name for name in OF_TOKENS if row[name] is not None} == columns
        assert (row["kl"] is None) == ("ref_logprobs" not in columns)
        assert all(len(row[name]) == len(row["response_ids"]) for name in columns)
        if row["ref_logprobs"] is not None:
            kl = sum(a - b for a, b in zip(row["old_logprobs"], row["ref_logprobs"], strict=True))
            assert kl == pytest.approx(row["kl"], abs=1e-4)
        assert all(a <= 0 < b for a, b in zip(row["old_logprobs"], row["entropy"], strict=True))
        assert row["old_logprobs"] == pytest.approx(row["logprobs"], abs=1e-4)
    moved = any(ratio != 0 for row in rows for ratio in row["log_ratio"])
    assert moved == (changes.get("ppo_epochs") == 2 or name == "critic")


@pytest.mark.exhaustive
def test_advantages_follow_from_the_other_columns(config):
    """By core's own formulas, response by response: GAE of the written rewards and values, then whitened as a batch."""
    settings = config(PPOConfig, rollouts="all", eval_fraction=0.0, steps=1, gae_lambda=0.9, kl_coef=0.3)
    train_ppo(settings, [varied])
    rows = rows_of(settings.output)
    width = max(row["length"] for row in rows)

    def padded(name):
        return torch.tensor([row[name] + [0.0] * (width - row["length"]) for row in rows])

    mask = torch.tensor([[t < row["length"] for t in range(width)] for row in rows])
    advantages, returns = core.gae(padded("token_rewards"), padded("values"), mask, gamma=1.0, gae_lambda=0.9)
    torch.testing.assert_close(padded("advantages")[mask], core.whiten(advantages, mask)[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded("returns")[mask], returns[mask], rtol=1e-5, atol=1e-5)
    scores = torch.tensor([row["shaped_score"] for row in rows], dtype=torch.float32)
    read = padded("old_logprobs"), padded("ref_logprobs"), mask
    placed = core.kl_shaped_rewards(core.spread_scores(scores, None, mask), *read, kl_coef=0.3)
    torch.testing.assert_close(padded("token_rewards")[mask], placed[mask], rtol=1e-5, atol=1e-5)


def test_five_tokens_by_hand(config):
    """Of step 2: plain transformers on the checkpoint of step 1, a token at a time, and on the reference."""
    kept = {"save_every": 1, "save_total_limit": 3}
    settings = config(rollouts="all", eval_fraction=0.0, learning_rate=1e-2, temperature=0.7, **kept)
    train_ppo(settings, [varied])
    row = next(row for row in rows_of(settings.output) if row["step"] == 2 and row["length"] >= 5)
    policies = {"old_logprobs": settings.output / "checkpoints" / "step-000001", "ref_logprobs": Path(settings.model)}
    for column, folder in policies.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for t in range(5):
            ids = row["prompt_ids"] + row["response_ids"][:t]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            logprobs = (logits / 0.7).log_softmax(-1)
            assert row[column][t] == pytest.approx(float(logprobs[row["response_ids"][t]]), abs=1e-5)
            if column == "old_logprobs":
                assert row["entropy"][t] == pytest.approx(float(-(logprobs.exp() * logprobs).sum()), abs=1e-5)
    machine = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    head = load_policy(str(policies["old_logprobs"]), with_value_head=True, **machine)
    batch = collate([row["prompt_ids"]], [row["response_ids"]], pad_id=0)
    values = token_outputs(head.eval(), batch, temperature=0.7, micro_batch=MicroBatch(1)).values[0]
    assert row["values"] == pytest.approx(values.tolist(), abs=1e-5)
    assert any(abs(value) > 1e-3 for value in row["values"])


def test_the_ratio_is_of_the_new_policy_to_the_old(config):
    """In the second of two passes the policy is the one that a run of a single pass ends with."""
    settings = config(rollouts="all", eval_fraction=0.0, steps=1, learning_rate=1e-2)
    once, twice = (
        replace(settings, ppo_epochs=epochs, output=settings.output.with_name(f"{epochs}")) for epochs in (1, 2)
    )
    for run in (once, twice):
        train_ppo(run, [varied])
    model = AutoModelForCausalLM.from_pretrained(once.output / "final", dtype=torch.float32).eval()
    row = max(rows_of(twice.output), key=lambda row: max(map(abs, row["log_ratio"])))
    ids, length = torch.tensor([row["prompt_ids"] + row["response_ids"]]), row["length"]
    with torch.no_grad():
        logprobs = model(ids).logits[0, -length - 1 : -1].log_softmax(-1)
    new = logprobs.gather(-1, ids[0, -length:, None])[:, 0]
    assert row["log_ratio"] == pytest.approx((new - torch.tensor(row["old_logprobs"])).tolist(), abs=1e-4)
    assert max(map(abs, row["log_ratio"])) > 0.01


@pytest.mark.exhaustive
def test_the_ratio_is_that_of_the_last_pass(config):
    """In one pass over two minibatches the first has not moved. In two passes all has, and the second counts."""
    once = config(rollouts="all", eval_fraction=0.0, steps=1, minibatch_size=4, ppo_epochs=1, learning_rate=1e-2)
    train_ppo(once, [varied])
    ratios = [max(map(abs, row["log_ratio"])) for row in rows_of(once.output)]
    assert sorted(ratio > 1e-4 for ratio in ratios) == [False] * 4 + [True] * 4


def test_kl_that_no_pass_measured_is_missing(config):
    """SAO has no pass before the update, and a limit on approx_kl ends its passes after the second of four."""
    settings = config(
        rollouts="all",
        eval_fraction=0.0,
        steps=1,
        policy_loss="sao",
        critic="separate",
        kl_in="loss",
        kl_kind="k3",
        ppo_epochs=1,
        minibatch_size=2,
        learning_rate=1e-2,
        approx_kl_limit=1e-9,
        sample_every=1,
        num_samples=8,
    )
    train_ppo(settings, [varied])
    rows = rows_of(settings.output)
    assert sum(row["kl"] is None for row in rows) == len(rows) // 2 == 4
    shown = [json.loads(line) for line in (settings.output / "samples.jsonl").read_text("utf-8").splitlines()]
    assert sorted({row["kl"] is None for row in shown}) == [False, True]
