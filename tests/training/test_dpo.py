"""DPO learns what pairs prefer, by the formula, and its gradient does not know the micro-batch size."""

import inspect
import json
import math
import random
from dataclasses import replace

import pytest
import torch

import heedful
from cases import often
from gradients import distance, flat_gradient
from heedful import ConfigError, DataError, DPOConfig, Message, Ranking, core, train_dpo
from heedful.algorithms import dpo as dpo_module
from heedful.algorithms import sft as sft_module
from heedful.algorithms.dpo import (
    EncodedPair,
    accumulate,
    encode_preferences,
    margins,
    pair_loss,
    response_logprobs,
    with_reference,
)
from heedful.core.masking import rightness
from heedful.data.chat import Renderer
from heedful.data.loading import Example
from heedful.models import load_policy, load_tokenizer
from heedful.types import MicroBatch
from jsonl import read_jsonl, write_jsonl
from plain import log_prob, preference, random_text

CPU = torch.device("cpu")
LEARN = {"eval_fraction": 0.25, "max_steps": 25, "learning_rate": 3e-3, "sample_every": 0}


def settings(tmp_path, **changes):
    return DPOConfig(**{"model": "m", "data": "d", "output": tmp_path / "run", "dtype": "float32", **changes})


STARTS = {"sigmoid": math.log(2), "ipo": 1 / (4 * 0.1**2), "hinge": 1.0}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        *((loss, {}) for loss in (*STARTS, "simpo", "orpo")),
        ("sigmoid", {"length_normalise": True}),
        ("sigmoid", {"nll_coef": 0.5}),
    ],
)
def test_learns_planted_preferences_on_held_out_pairs(tiny, written, tmp_path, loss, changes):
    """The chosen of two letters has a z, the rejected a q. At the start policy and reference are one: h = 0, so the loss is
    log 2, 1 / (4 beta^2), or 1, and no pair is won."""
    letters = random.Random(0).choices("abcd", k=120)
    pairs = [{"prompt": f"第{i}题", "chosen": f"{c}z", "rejected": f"{c}q"} for i, c in enumerate(letters)]
    config = settings(tmp_path, model=tiny("qwen3"), data=written("pairs.jsonl", pairs), loss=loss, **LEARN, **changes)
    summary = train_dpo(config)
    first, last = summary["first_evaluation"], summary["last_evaluation"]
    assert summary["data"]["held_out"] > 15
    if loss in STARTS and not changes:
        assert first["eval/loss"] == pytest.approx(STARTS[loss], rel=1e-4)
        assert first["eval/margin"] == pytest.approx(0, abs=1e-5)
    assert last["eval/accuracy"] == 1.0
    assert last["eval/loss"] < 0.8 * first["eval/loss"]
    assert ("eval/nll" in last) == (loss == "orpo" or "nll_coef" in changes)
    assert last.get("eval/nll", 0) < first.get("eval/nll", 1)
    before, after = (preference(folder) for folder in (tiny("qwen3"), config.output / "final"))
    assert after > before + 1


def pairs_of(renderer, config, number=6):
    random.seed(1)
    texts = [[f"{random_text()}。" for _ in range(3)] for _ in range(number)]
    rankings = [Ranking((Message("user", p),), (a, b), (0, 1), f"row {i}") for i, (p, a, b) in enumerate(texts)]
    return encode_preferences(rankings, renderer, 200, config)[0]


def test_a_loss_without_a_reference_loads_and_reads_none_and_the_table_shows_different_prompts(
    tiny, tmp_path, monkeypatch
):
    """No pass before the first step, and no second model."""
    for name in ("reference_of", "with_reference"):
        monkeypatch.setattr(dpo_module, name, lambda *_: pytest.fail("a reference was asked for"))
    records = [{"prompt": f"第{i // 3}题", "chosen": f"{i}z", "rejected": f"{i}q"} for i in range(12)]
    data = {"data": write_jsonl(tmp_path / "pairs.jsonl", records), "eval_fraction": 0, "batch_size": 4}
    train_dpo(settings(tmp_path, model=tiny("gpt2"), loss="orpo", max_steps=1, num_samples=3, **data))
    rows = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert [row["prompt"] for row in rows] == ["第0题", "第1题", "第2题"]
    assert {"prompt", "chosen", "rejected", "response"} <= set(rows[0])


def test_the_nll_term_is_the_loss_of_sft_on_the_chosen_responses(gpt2, tmp_path):
    """In value and gradient, token for token: the same ones count, the end among them, and the prompt does not."""
    policy, renderer = gpt2
    policy.double()
    config = settings(tmp_path, loss="orpo", beta=1e-30, micro_batch_size=2)
    pairs = pairs_of(renderer, config)
    metrics = accumulate(policy, pairs, renderer.pad_id, config)
    found = flat_gradient(policy)
    policy.zero_grad()
    sft = sft_module.accumulate(policy, [pair.chosen for pair in pairs], renderer.pad_id, MicroBatch(8))
    assert metrics["loss/nll"] == pytest.approx(sft["loss/sft"], rel=1e-12)
    assert metrics["loss/dpo"] == pytest.approx(sft["loss/sft"], rel=1e-12)
    assert distance(found, flat_gradient(policy)) < 1e-12


SMOOTH = {"beta": 0.5, "label_smoothing": 0.2}


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1},
        SMOOTH,
        SMOOTH | {"length_normalise": True},
        SMOOTH | {"nll_coef": 0.3},
        {"loss": "robust", "beta": 0.3, "label_smoothing": 0.1},
        {"loss": "ipo", "beta": 0.1},
        {"loss": "ipo-sum", "beta": 0.1},
        {"loss": "hinge", "beta": 0.3},
        {"loss": "simpo", "beta": 2.5, "target_margin": 0.3},
        {"loss": "simpo"},
        {"loss": "orpo", "nll_coef": 0.0},
    ],
    ids=str,
)
def test_the_loss_is_the_formula_on_log_probs_of_plain_transformers(gpt2, other_gpt2, tmp_path, changes):
    """Policy and reference are different models, so nothing cancels."""
    config, kind = settings(tmp_path, micro_batch_size=4, **changes), changes.get("loss", "sigmoid")
    (policy, renderer), models = gpt2, [gpt2[0]]
    pairs = pairs_of(renderer, config)
    if kind not in ("simpo", "orpo"):
        models.append(other_gpt2)
        pairs = with_reference(other_gpt2, pairs, renderer.pad_id, config.micro_batch)
        assert len({round(pair.ref_chosen, 3) for pair in pairs}) == len(pairs)
    with torch.no_grad():
        metrics = accumulate(policy, pairs, renderer.pad_id, config)
    sides = [
        torch.stack([log_prob(model.lm, pair.prompt, getattr(pair, side).response) for pair in pairs])
        for model in models
        for side in ("chosen", "rejected")
    ]
    lengths = [torch.tensor([getattr(pair, side).num_tokens for pair in pairs]) for side in ("chosen", "rejected")]
    if kind == "simpo":
        options = {"beta": 2.0, "target_margin": 0.5} | {name: changes[name] for name in changes.keys() - {"loss"}}
        expected, wanted = core.simpo_loss(*sides, *lengths, **options)
    elif kind == "orpo":
        expected, wanted = core.orpo_loss(*sides, *lengths, beta=0.1)
    else:
        options = {"beta": changes["beta"], "label_smoothing": changes.get("label_smoothing", 0.0)}
        if kind == "ipo" or "length_normalise" in changes:
            options |= dict(zip(("chosen_tokens", "rejected_tokens"), lengths, strict=True))
        expected, wanted = core.dpo_loss(*sides, kind=kind.removesuffix("-sum"), **options)
        expected = expected - changes.get("nll_coef", 0.0) * sides[0].sum() / lengths[0].sum()
    assert metrics["loss/dpo"] == pytest.approx(float(expected), rel=1e-4)
    for name in ("reward/chosen", "reward/rejected", "reward/margin", "reward/accuracy"):
        assert metrics[name] == pytest.approx(float(wanted[name]), rel=1e-3, abs=1e-5), name


KINDS = {
    "dpo": {"beta": 0.3},
    "simpo": {"loss": "simpo"},
    "orpo": {"loss": "orpo"},
    "per-token-nll": {"length_normalise": True, "nll_coef": 0.5},
}


@pytest.mark.parametrize("kind", often(KINDS, ["dpo", "per-token-nll"]))
def test_micro_batches_do_not_change_the_gradient(gpt2, tmp_path, passes, kind):
    config = settings(tmp_path, **KINDS[kind])
    policy, renderer = gpt2
    policy.double()
    pairs = with_reference(policy, pairs_of(renderer, config, 8), renderer.pad_id, config.micro_batch)
    pairs = [replace(pair, ref_chosen=pair.ref_chosen + i) for i, pair in enumerate(pairs)]  # or every h would be 0

    def gradient(size, tokens=None):
        policy.zero_grad()
        changed = replace(config, micro_batch_size=size, micro_batch_tokens=tokens)
        accumulate(policy, pairs, renderer.pad_id, changed)
        return flat_gradient(policy)

    whole = gradient(8)
    assert distance(gradient(3), whole) < 1e-12
    for tokens in (1, 200):
        seen = passes(policy)
        assert distance(gradient(8, tokens), whole) < 1e-12
        assert all(rows == 2 or taken <= tokens for rows, taken in seen)
        assert sum(rows for rows, _ in seen) == 16
        assert (len(seen) == 8) == (tokens == 1)


def test_a_response_ends_unless_it_was_cut(tiny, tmp_path):
    config, renderer = settings(tmp_path), Renderer(load_tokenizer(tiny("gpt2")))
    ends = []
    for truncated in (False, True):
        ranking = Ranking("问", ("ab", "cd"), (1, 0), "row", truncated=truncated)
        ((pair,), _) = encode_preferences([ranking], renderer, 100, config)
        letters = [renderer.decode([token]) for token in pair.chosen.response[:2]]
        assert letters == ["c", "d"], "rank 0 is the better one"
        ends.append((pair.chosen.num_tokens, pair.rejected.num_tokens))
    assert ends == [(3, 3), (2, 2)]


def test_a_cut_pair_token_by_token(tiny, tmp_path):
    """Room for three tokens of a response: the chosen one loses its tail and its end, the rejected one fits with its end."""
    config, renderer = settings(tmp_path, too_long="truncate"), Renderer(load_tokenizer(tiny("gpt2")))
    prompt = renderer.prompt_ids("问")
    ranking = Ranking("问", ("cdefg", "ab"), (0, 1), "row")
    ((pair,), counts) = encode_preferences([ranking], renderer, len(prompt) + 3, config)
    assert counts["truncated"] == 1
    assert pair.prompt == prompt
    assert [renderer.decode([token]) for token in pair.chosen.response] == ["c", "d", "e"]
    assert [renderer.decode([token]) for token in pair.rejected.response[:2]] == ["a", "b"]
    assert pair.rejected.response == renderer.response_ids("ab", prompt="问")
    assert len(pair.rejected.response) == 3
    policy = load_policy(tiny("gpt2"), device=CPU, compute_dtype=torch.float32).eval()
    with torch.no_grad():
        chosen, rejected = response_logprobs(policy, [pair], renderer.pad_id)
    assert float(chosen) == pytest.approx(float(log_prob(policy.lm, pair.prompt, pair.chosen.response)), rel=1e-5)
    assert float(rejected) == pytest.approx(float(log_prob(policy.lm, pair.prompt, pair.rejected.response)), rel=1e-5)


def test_the_reference_reads_no_more_than_the_limits_and_the_longest_pairs_first(gpt2, tmp_path, passes):
    """So memory runs out at once or never; the pairs keep their order."""
    policy, renderer = gpt2
    whole = settings(tmp_path, micro_batch_size=6)
    pairs = pairs_of(renderer, whole)
    expected = [pair.ref_chosen for pair in with_reference(policy, pairs, renderer.pad_id, whole.micro_batch)]
    for size, tokens in ((1, None), (2, None), (6, 250)):
        seen = passes(policy)
        config = replace(whole, micro_batch_size=size, micro_batch_tokens=tokens)
        done = with_reference(policy, pairs, renderer.pad_id, config.micro_batch)
        assert [pair.ref_chosen for pair in done] == pytest.approx(expected, rel=1e-5)
        assert [pair.ranking for pair in done] == [pair.ranking for pair in pairs]
        assert all(rows == 2 or (rows <= 2 * size and taken <= (tokens or taken)) for rows, taken in seen)
        assert sum(rows for rows, _ in seen) == 12
        longest = [taken // rows for rows, taken in seen]
        assert longest == sorted(longest, reverse=True)
        assert len(set(longest)) > 1


def test_another_reference_is_what_the_policy_is_compared_with(tiny, another, pairs, tmp_path):
    options = {"reference": another, "eval_data": pairs, "batch_size": 4, "max_steps": 1}
    found = train_dpo(settings(tmp_path, model=tiny("gpt2"), data=pairs, **options))["first_evaluation"]["eval/loss"]
    assert abs(found - math.log(2)) > 1e-4
    assert another in json.loads((tmp_path / "run" / "environment.json").read_text("utf-8"))["models"]


@pytest.mark.parametrize(
    ("record", "changes", "message"),
    [
        ({"prompt": "", "chosen": "a", "rejected": "b"}, {}, "the prompt is empty and the tokenizer has no BOS"),
        (
            {"prompt": "a" * 90, "chosen": "b" * 60, "rejected": "c"},
            {"max_length": 64, "too_long": "truncate"},
            "1 of 50 pairs have equal chosen and rejected responses after truncation",
        ),
        ({"prompt": "a", "responses": ["b", "c", "d"], "ranks": [0, 1, 2]}, {}, "a ranking of 3 responses"),
    ],
)
def test_pairs_it_cannot_learn_from_are_named(tiny, tmp_path, record, changes, message):
    others = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(60)]
    data = write_jsonl(tmp_path / "pairs.jsonl", [*others, record])
    with pytest.raises(DataError) as caught:
        train_dpo(settings(tmp_path, model=tiny("qwen3"), data=data, eval_fraction=0.2, **changes))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": "ipo", "label_smoothing": 0.1},
            "--label-smoothing belongs to --loss sigmoid or robust, got --loss ipo",
        ),
        ({"loss": "ipo-sum", "length_normalise": True}, "--length-normalise True divides .* use --loss ipo$"),
        ({"loss": "robust"}, "--loss robust needs .* --label-smoothing above 0 and below 0.5, got 0.0"),
        ({"loss": "robust", "label_smoothing": 0.5}, "--label-smoothing above 0 and below 0.5, got 0.5"),
        ({"loss": "simpo", "reference": "m"}, "--reference .* has no effect with --loss simpo, which"),
        ({"loss": "orpo", "reference_device": "cpu"}, "--reference-device .* has no effect with --loss orpo, which"),
        ({"loss": "orpo", "length_normalise": True}, "--length-normalise .* has no effect with --loss orpo, which"),
        ({"target_margin": 1.0}, "--target-margin 1.0 belongs to --loss simpo, got --loss sigmoid"),
    ],
)
def test_settings_that_a_loss_has_no_use_for_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "strength", "summed", "nll"),
    [
        ({}, 0.1, 0.1, 0.0),
        ({"beta": 0.3}, 0.3, 0.3, 0.0),
        ({"loss": "orpo"}, 0.1, None, 1.0),
        ({"loss": "simpo"}, 2.0, None, 0.0),
        ({"loss": "ipo"}, 0.1, None, 0.0),
        ({"length_normalise": True}, 5.0, None, 0.0),
        ({"length_normalise": True, "beta": 0.3, "nll_coef": 0.2}, 0.3, None, 0.2),
        ({"loss": "orpo", "beta": 0.5, "nll_coef": 0.0}, 0.5, None, 0.0),
    ],
)
def test_what_is_not_set_has_the_default_of_its_loss(tmp_path, changes, strength, summed, nll):
    """Losses without a reference, or per token, have no sums of nats for the alarm chosen-falling to compare."""
    config = settings(tmp_path, **changes)
    assert (config.strength, config.summed_strength, config.nll_weight) == (strength, summed, nll)


def sigmoid_by_hand(chosen, rejected, ref_chosen, ref_rejected, *, chosen_tokens, rejected_tokens, config, num_pairs):
    margin = chosen - ref_chosen - rejected + ref_rejected
    # a metric may be a plain number
    return -torch.nn.functional.logsigmoid(config.strength * margin).sum() / num_pairs, {"policy/seen": 1.0}


@pytest.fixture
def trained(tiny, tmp_path):
    """``trained(loss)`` is the result of two steps with it, in micro-batches of one pair."""
    rows = [{"prompt": f"问{i}", "chosen": "好" * (i + 1), "rejected": f"不{i}"} for i in range(8)]

    def train(loss, name="运行"):
        config = heedful.DPOConfig(
            loss=loss, output=tmp_path / name, beta=0.3, learning_rate=1e-3, max_steps=2, batch_size=4, device="cpu",
            dtype="float32", micro_batch_size=1, eval_fraction=0.3, seed=1,
        )  # fmt: skip
        return heedful.train_dpo(config, model=tiny("gpt2"), data=rows)

    return train


def test_a_loss_of_ones_own_trains_as_the_built_in_one(trained, tmp_path):
    """As a function, and by its file; with accuracy and margin, and a metric of its own.

    It is asked about all pairs of a step or of an evaluation at once, also for the accuracy of each pair.
    """
    file, asked = tmp_path / "损失.py", set()
    file.write_text(f"import torch\n\n\n{inspect.getsource(sigmoid_by_hand)}", encoding="utf-8")

    def noting(*tensors, num_pairs, **settings):
        asked.add(num_pairs)
        return sigmoid_by_hand(*tensors, num_pairs=num_pairs, **settings)

    built_in, own = trained("sigmoid", "一"), trained(noting, "二")
    named = trained(f"python:{file}:sigmoid_by_hand", "三")
    assert asked == {4, 3}, "four pairs a step, three held out"
    assert len(built_in.metrics["eval/accuracy"].dropna()) == 2, "before the first step, and after the last"
    for result in (own, named):
        for metric in ("loss/dpo", "reward/accuracy", "reward/margin", "optimizer/grad_norm", "eval/accuracy"):
            expected, found = built_in.metrics[metric].dropna(), result.metrics[metric].dropna()
            assert len(found) == len(expected) > 0
            assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5), metric
        assert result.metrics["policy/seen"].dropna().tolist() == [4.0] * 2, "a sum over four micro-batches"


@pytest.mark.parametrize(
    "changes",
    [
        *({"loss": loss} for loss in ("sigmoid", "ipo", "ipo-sum", "hinge", "simpo", "orpo", sigmoid_by_hand)),
        {"loss": "robust", "label_smoothing": 0.1},
        {"loss": "sigmoid", "length_normalise": True},
    ],
)
def test_the_accuracy_of_each_pair_is_that_of_the_loss(tmp_path, changes):
    config = settings(tmp_path, **changes)
    ranking = Ranking("问", ("甲", "乙"), (0, 1), "row")
    # the last two are right only per token, only without a reference
    lengths = [(1, 8), (8, 1), (2, 2), (8, 1), (2, 2)]
    pairs = [EncodedPair(ranking, [0], Example([0], [1] * a), Example([0], [1] * b)) for a, b in lengths]
    references = [(-1.0, -9.0), (-9.0, -1.0), (-4.0, -4.0), (-8.0, -3.0), (-1.0, -4.0)]
    pairs = [replace(one, ref_chosen=a, ref_rejected=b) for one, (a, b) in zip(pairs, references, strict=True)]
    chosen, rejected = torch.tensor([-2.0, -9.5, -4.0, -10.0, -3.0]), torch.tensor([-9.5, -2.0, -4.0, -4.0, -4.0])
    alone = [
        pair_loss(chosen[i : i + 1], rejected[i : i + 1], [pair], config, num_pairs=1)[1]["reward/accuracy"]
        for i, pair in enumerate(pairs)
    ]
    assert {0.0, 0.5, 1.0} <= {float(one) for one in alone}
    assert rightness(margins(chosen, rejected, pairs, config)).tolist() == alone


def a_row(chosen, *_, **__):
    return chosen.sum(), {"reward/all": chosen}


def nothing(*_, **__):
    return None


def fails(*_, **__):
    raise ValueError("坏了")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (a_row, r"--loss a_row returned the metric 'reward/all' = tensor\(\[.*; a metric must be one number"),
        (nothing, r"--loss nothing must return \(loss, metrics\)"),
        (fails, "--loss fails raised ValueError: 坏了 .*test_dpo.py, line"),
        ("python:nowhere.py:loss", "the file nowhere.py of python:nowhere.py:loss does not exist"),
    ],
)
def test_a_loss_of_ones_own_that_is_none_is_told(trained, loss, said):
    with pytest.raises(ConfigError, match=said):
        trained(loss)
