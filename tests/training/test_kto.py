"""KTO learns what labels prefer, by the formula, and neither its gradient nor its KL knows the micro-batch size."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from gradients import distance, flat_gradient
from heedful import ConfigError, DataError, KTOConfig, Labelled, Message, core, train_kto
from heedful.algorithms.kto import accumulate, encode_labelled, mean_of_others, start, with_others, with_reference
from heedful.data.batches import AdaptiveMicroBatch
from heedful.data.chat import Renderer
from heedful.models import load_tokenizer
from jsonl import read_jsonl, read_metrics
from plain import log_prob, preference, random_text


def settings(tmp_path, **changes):
    return KTOConfig(**{"model": "m", "data": "d", "output": tmp_path / "run", "dtype": "float32", **changes})


@pytest.mark.exhaustive
def test_learns_planted_labels_on_held_out_prompts(tiny, written, tmp_path):
    """Good responses of two letters have a z, bad ones, to other prompts, a q. At the start policy and reference are one:
    every gain is 0, so the loss is half the mean weight, and none is right."""
    letters = random.Random(0).choices("abcd", k=240)
    records = [
        {"prompt": f"第{i}题", "completion": c + "qz"[i % 2], "label": i % 2 == 1} for i, c in enumerate(letters)
    ]
    options = {"eval_fraction": 0.25, "max_steps": 20, "learning_rate": 3e-3, "sample_every": 0}
    config = settings(tmp_path, model=tiny("qwen3"), data=written("labelled.jsonl", records), **options)
    summary = train_kto(config)
    first, last = summary["first_evaluation"], summary["last_evaluation"]
    assert first["eval/loss"] == pytest.approx(0.5, rel=1e-4)
    assert first["eval/margin"] == pytest.approx(0, abs=1e-5)
    assert first["eval/z0"] == pytest.approx(0, abs=1e-4)
    assert last["eval/accuracy"] > 0.9
    assert last["eval/margin"] > 0.1
    assert last["eval/loss"] < 0.48
    assert summary["data"]["good"] + summary["data"]["bad"] == summary["data"]["train"]
    before, after = (preference(folder) for folder in (tiny("qwen3"), config.output / "final"))
    assert after > before + 1


def rows_of(renderer, config, number=7, *, reference=None):
    """Rows of random texts; with a reference's log-probs, if there is one."""
    random.seed(1)
    records = [
        Labelled((Message("user", f"{i}{random_text()}。"),), f"{random_text()}。", f"row {i}", label=i % 3 > 0)
        for i in range(number)
    ]
    labelled, _ = encode_labelled(records, renderer, 200, config)
    rows = with_others(labelled, labelled, 200, seed=0)[0]
    if reference is None:
        return rows
    return with_reference(reference, rows, renderer.pad_id, config.micro_batch, AdaptiveMicroBatch())


def test_the_loss_is_the_formula_on_log_probs_of_plain_transformers(gpt2, other_gpt2, tmp_path):
    """Policy and reference are different models, so nothing cancels, and z0 is not 0 by itself."""
    options = {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    config = settings(tmp_path, micro_batch_size=2, **options)
    (policy, renderer), reference = gpt2, other_gpt2
    for first, second in ((policy, reference), (reference, policy)):
        rows = rows_of(renderer, config, reference=second)
        with torch.no_grad():
            metrics = accumulate(first, rows, renderer.pad_id, config)
        logprobs, ref_logprobs, others, ref_others = (
            torch.stack([log_prob(model.lm, one.prompt, one.response) for one in of_rows])
            for of_rows in ([row.example for row in rows], [row.other for row in rows])
            for model in (first, second)
        )
        kl = float((others - ref_others).mean())
        expected, wanted = core.kto_loss(
            logprobs, ref_logprobs, torch.tensor([row.record.label for row in rows]), kl=kl, **options
        )
        assert metrics["loss/kto"] == pytest.approx(float(expected), rel=1e-4)
        assert metrics["reference/z0"] == pytest.approx(max(0.0, kl), rel=1e-4)
        for name in ("reward/chosen", "reward/rejected", "reward/margin", "reward/accuracy"):
            assert metrics[name] == pytest.approx(float(wanted[name]), rel=1e-3, abs=1e-5), name
        assert abs(kl) > 1e-3


def test_micro_batches_do_not_change_the_gradient(gpt2, tmp_path, passes):
    config = settings(tmp_path, beta=0.3)
    policy, renderer = gpt2
    policy.double()
    rows = rows_of(renderer, config, 8, reference=policy)
    rows = [replace(row, ref=row.ref + i, ref_other=row.ref_other - i) for i, row in enumerate(rows)]

    def gradient(size, tokens=None):
        policy.zero_grad()
        changed = replace(config, micro_batch_size=size, micro_batch_tokens=tokens)
        metrics = accumulate(policy, rows, renderer.pad_id, changed)
        assert metrics["reference/z0"] == pytest.approx(3.5, rel=1e-4)
        return flat_gradient(policy)

    whole = gradient(8)
    for size, tokens in ((3, None), (8, 1), (8, 200)):
        seen = passes(policy)
        assert distance(gradient(size, tokens), whole) < 1e-12
        assert all(count == 1 or (count <= size and taken <= (tokens or taken)) for count, taken in seen)
        assert sum(count for count, _ in seen) == 16, "each prompt once with its response, once with another's"


def test_every_other_response_is_to_another_prompt_and_fits(gpt2, tmp_path):
    """Also if one prompt has nearly all records, and what does not fit behind a prompt is cut and counted."""
    config, (_, renderer) = settings(tmp_path), gpt2
    records = [Labelled("问", f"答{i:02}" * 9, f"row {i}", label=True) for i in range(1, 12)]
    records = [Labelled("一个长得多的问题", "答", "row 0", label=True), *records]
    limit = 56
    labelled, counts = encode_labelled(records, renderer, limit, config)
    assert counts == {"dropped_too_long": 0, "truncated": 0}
    rows, cut = with_others(labelled, labelled, limit, seed=0)
    first, *rest = labelled
    assert all(row.other.response == first.example.response for row in rows[1:])
    assert rows[0].other.response in [row.example.response[: limit - len(first.asked)] for row in rest]
    assert rows[0].other.num_tokens < rest[0].num_tokens
    assert (rows[0].other.length, cut) == (limit, 1)
    assert with_others(labelled, labelled, limit, seed=0)[0] == rows
    drawn = [with_others(labelled[:1] * 9, labelled, limit, seed)[0] for seed in (1, 2)]
    assert drawn[0] != drawn[1]


def test_a_kl_that_is_no_number_is_none_in_the_metrics(gpt2, tmp_path):
    """It is shown from 0 up, and that must not turn it into 0."""
    config, (policy, renderer) = settings(tmp_path), gpt2
    for of_others, shown in ((math.nan, math.nan), (1e4, 0.0)):
        rows = [replace(row, ref=0.0, ref_other=of_others) for row in rows_of(renderer, config)]
        found = accumulate(policy, rows, renderer.pad_id, config)["reference/z0"]
        assert found == pytest.approx(shown, nan_ok=True)


def test_other_responses_are_drawn_equally_often_and_at_once(tiny, tmp_path, monkeypatch):
    """One draw for each record, even if nearly all have the same prompt, and for a prompt that is not in the pool."""
    config, renderer = settings(tmp_path), Renderer(load_tokenizer(tiny("gpt2")))
    texts = [("问", "甲"), ("问", "乙"), ("另", "丙"), ("别", "丁")]
    records = [Labelled(prompt, text, f"row {i}", label=True) for i, (prompt, text) in enumerate(texts)]
    labelled, _ = encode_labelled(records, renderer, 200, config)
    draws = []
    monkeypatch.setattr(random.Random, "choice", None)
    real = random.Random.randrange
    monkeypatch.setattr(random.Random, "randrange", lambda self, n: draws.append(n) or real(self, n))
    for at, pool, others in [(0, labelled, "丙丁"), (2, labelled, "甲乙丁"), (3, labelled[:3], "甲乙丙")]:
        draws.clear()
        rows, _ = with_others([labelled[at]] * 3000, pool, 200, seed=0)
        decode = renderer.tokenizer.decode
        counts = Counter(decode(row.other.response, skip_special_tokens=True).strip() for row in rows)
        assert set(counts) == set(others)
        assert all(abs(count - 3000 / len(others)) < 130 for count in counts.values()), counts  # 5 standard deviations
        assert draws == [len(others)] * 3000


def test_pairs_are_good_and_bad_responses(tiny, written, tmp_path, capsys):
    """The KL of a pair's prompt is estimated on other prompts' responses, never on its own other one."""
    data = written("pairs.jsonl", [{"prompt": f"第{i}题", "chosen": f"{i}z", "rejected": f"{i}q"} for i in range(12)])
    options = {"eval_fraction": 0, "batch_size": 4, "max_steps": 1, "num_samples": 4}
    summary = train_kto(settings(tmp_path, model=tiny("gpt2"), data=data, **options))
    assert summary["data"] == {"records": 24, "train": 24, "held_out": 0, "good": 12, "bad": 12, "of_pairs": 24}
    said = " ".join(capsys.readouterr().err.split())
    assert "each pair counts as a good and a bad response" in said
    assert "would balance them" not in said
    rows = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert len({row["prompt"] for row in rows}) == 4
    assert {row.get("good", "z")[-1] + row.get("bad", "q")[-1] for row in rows} == {"zq"}
    assert all("response" in row for row in rows)


def test_a_step_without_bad_responses_has_no_mean_of_them(tiny, written, tmp_path, capsys):
    """One bad response of thirteen: most batches of four have none, and none of their numbers is missing or 0. It is said."""
    records = [{"prompt": f"第{i}题", "completion": f"{i}z", "label": i > 0} for i in range(13)]
    options = {"eval_fraction": 0, "batch_size": 4, "max_steps": 4, "sample_every": 0}
    config = settings(tmp_path, model=tiny("gpt2"), data=written("one.jsonl", records), **options)
    (found,) = start(config)[1].findings
    assert found.what == "12 good and 1 bad responses, weights 1 and 1", "what heedful doctor says"
    train_kto(config)
    said = " ".join(capsys.readouterr().err.split())
    assert "12 good and 1 bad responses, weights 1 and 1: --undesirable-weight 12 would balance them" in said
    lines = read_metrics(tmp_path / "run")
    with_bad = [line for line in lines if "reward/rejected" in line]
    assert 0 < len(with_bad) < len(lines) == 4
    assert all(("reward/margin" in line) == ("reward/rejected" in line) for line in lines)
    assert all("reward/chosen" in line and line["loss/kto"] > 0 for line in lines)


def test_another_reference_is_what_the_policy_is_compared_with(tiny, another, pairs, tmp_path):
    options = {"model": tiny("gpt2"), "data": pairs, "eval_fraction": 0, "batch_size": 4}
    data = [start(settings(tmp_path, reference=name, **options))[1].train for name in (None, another)]
    own, other = (torch.tensor([[row.ref, row.ref_other] for row in rows]) for rows in data)
    assert (own - other).abs().min() > 1e-4


def test_the_kl_of_the_reference_to_itself_is_0(gpt2, tmp_path):
    config, (policy, renderer) = settings(tmp_path), gpt2
    rows = rows_of(renderer, config, reference=policy)
    assert mean_of_others(policy, rows, renderer.pad_id, config.micro_batch) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": 2}, ":61: `label` is 2 (integer). Accepted: true or 1 for a good"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ":61: `chosen` and `rejected` are equal"),
        (
            {"prompt": "a" * 200, "completion": "b", "label": True},
            "1 of 61 labelled responses are longer than 128 tokens",
        ),
    ],
)
def test_records_it_cannot_learn_from_are_named(tiny, written, tmp_path, record, message):
    others = [{"prompt": f"{i}", "completion": "a", "label": bool(i % 2)} for i in range(60)]
    with pytest.raises(DataError) as caught:
        train_kto(settings(tmp_path, model=tiny("gpt2"), data=written("x.jsonl", [*others, record]), eval_fraction=0))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


ALIKE = [{"prompt": f"{i}", "completion": "a"} for i in range(40)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [one | {"label": True} for one in ALIKE],
            "`label` is true in all 40 training records, but KTO needs both: add bad responses; `heedful sft`",
        ),
        (
            [one | {"label": False} for one in ALIKE],
            "is false in all 40 training records, .* needs both: add good responses",
        ),
        (
            [{"prompt": "同一个", "completion": f"{i}", "label": bool(i % 2)} for i in range(40)],
            "all 40 training records have the same prompt",
        ),
    ],
)
def test_data_without_a_contrast_are_refused(tiny, written, tmp_path, records, message):
    with pytest.raises(DataError, match=message):
        train_kto(settings(tmp_path, model=tiny("gpt2"), data=written("one-sided.jsonl", records), eval_fraction=0))
    assert not (tmp_path / "run").exists()


def test_a_batch_of_one_has_no_mean(tmp_path):
    with pytest.raises(ConfigError, match=r"--batch-size is 1, but KTO estimates .* at least 2"):
        settings(tmp_path, batch_size=1)
