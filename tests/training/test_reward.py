"""The reward model learns preferences, from rankings of any length: every pair of a prompt, every response read once."""

import random

import pytest
import torch

from gradients import distance, flat_gradient
from heedful import Ranking, RewardConfig, train_reward
from heedful.algorithms.reward_model import accumulate, evaluate_rankings, micro_batches
from heedful.core import agreement, ordered_pairs, pairwise_reward_loss, ranking_reward_loss
from heedful.data.chat import RewardInputs
from heedful.data.loading import RankingRows, encode_rankings
from heedful.models import load_reward_model, load_tokenizer
from heedful.types import MicroBatch
from jsonl import read_jsonl, write_jsonl
from plain import random_text

CPU = torch.device("cpu")
RANKS = [(0, 1), (2, 0, 1), (0, 1, 1, 2), (1, 0), (0, 3, 2, 1, 4), (0, 0, 1)]
"""Rankings of two to five responses, with ties, in no order."""


@pytest.fixture
def model_and_inputs(tiny):
    tokenizer = load_tokenizer(tiny("gpt2"))
    model = load_reward_model(tiny("gpt2"), tokenizer, device=CPU, compute_dtype=torch.float32, seed=0).double().eval()
    with torch.no_grad():
        model.classifier.score.weight.mul_(20)  # scores that differ, so that a wrong pair shows
    return model, RewardInputs(tokenizer)


def make(inputs, all_ranks=RANKS, *, margins=False) -> list[RankingRows]:
    random.seed(1)

    def ranking(i, ranks):
        texts = random_text(), tuple(random_text() for _ in ranks)
        return Ranking(*texts, ranks, f"row {i}", random.random() if margins else None)

    rankings = [ranking(i, ranks) for i, ranks in enumerate(all_ranks)]
    return encode_rankings(rankings, inputs, max_length=128, action="error", equal_pairs="error")[0]


@pytest.fixture
def config(tmp_path):
    def make_config(**settings):
        return RewardConfig(model="m", data="d", output=tmp_path / "run", **settings)

    return make_config


def gradient(model, rankings, config):
    model.zero_grad()
    metrics = accumulate(model, rankings, config)
    return metrics, flat_gradient(model)


def one_by_one(model, rankings):
    return [[float(model([row]).detach()) for row in one.rows] for one in rankings]


@pytest.mark.parametrize(
    "options", [{}, {"margins": True}, {"center_coef": 0.3}, {"label_smoothing": 0.2}], ids="-".join
)
def test_the_loss_is_the_formula_on_scores_computed_row_by_row(model_and_inputs, config, options):
    """Mean over the pairs of a prompt, then over prompts; each option changes it."""
    model, inputs = model_and_inputs
    settings = {name: value for name, value in options.items() if name != "margins"}
    rankings = make(inputs, margins="margins" in options)
    metrics = accumulate(model, rankings, config(**settings, micro_batch_size=2))

    means = []
    for one, scores in zip(rankings, one_by_one(model, rankings), strict=True):
        pairs = torch.tensor(ordered_pairs(one.ranking.ranks, scores), dtype=torch.float64)
        margin = torch.full((len(pairs),), one.ranking.margin or 0.0, dtype=torch.float64)
        means.append(pairwise_reward_loss(pairs[:, 0], pairs[:, 1], margin=margin, **settings))
    expected = sum(loss for loss, _ in means) / len(means)
    plain, _ = gradient(model, make(inputs), config(micro_batch_size=2))
    assert metrics["loss/reward"] == pytest.approx(float(expected), rel=1e-9)
    assert metrics["reward/margin"] == pytest.approx(float(sum(m["reward/margin"] for _, m in means)) / 6, rel=1e-9)
    assert metrics["reward/accuracy"] == pytest.approx(float(sum(m["reward/accuracy"] for _, m in means)) / 6)
    assert (abs(metrics["loss/reward"] - plain["loss/reward"]) > 1e-3) == bool(options)


def test_micro_batches_do_not_change_the_gradient(model_and_inputs, config, passes):
    model, inputs = model_and_inputs
    rankings = make(inputs, margins=True)
    settings = {"center_coef": 0.01, "label_smoothing": 0.1}
    metrics, whole = gradient(model, rankings, config(micro_batch_size=100, **settings))
    for size, tokens in ((2, None), (100, 1), (100, 250)):
        seen = passes(model)
        limits = {"micro_batch_size": size, "micro_batch_tokens": tokens}
        split_metrics, split = gradient(model, rankings, config(**limits, **settings))
        assert distance(split, whole) < 1e-12
        assert split_metrics == pytest.approx(metrics, rel=1e-12)
        alone = [(len(one.rows), len(one.rows) * one.longest) for one in rankings]
        assert all(tokens is None or taken <= tokens or (rows, taken) in alone for rows, taken in seen)
        assert sum(rows for rows, _ in seen) == sum(len(ranks) for ranks in RANKS), "each response is read once"
        assert tokens is None or (len(seen) == 6) == (tokens == 1)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_ranking_is_never_split(model_and_inputs, size):
    """And a micro-batch holds as many responses as that number of pairs, or one ranking that is larger."""
    model, inputs = model_and_inputs
    rankings = make(inputs)
    parts = list(micro_batches(model, rankings, MicroBatch(size)))
    assert sorted(one.ranking.source for part in parts for one in part) == [f"row {i}" for i in range(6)]
    for part in parts:
        assert len(part) == 1 or sum(len(one.rows) for one in part) <= 2 * size
    pairs = micro_batches(model, make(inputs, [(0, 1)] * 7), MicroBatch(size))
    assert [len(part) for part in pairs] == {1: [1] * 7, 2: [2, 2, 2, 1], 100: [7]}[size]


def test_a_ranking_without_pairs_leaves_the_count(model_and_inputs, config):
    model, inputs = model_and_inputs
    (tied,), rankings = make(inputs, [(4, 4, 4)]), make(inputs)
    metrics, expected = gradient(model, rankings, config(micro_batch_size=2))
    with_tied, found = gradient(model, [*rankings[:3], tied, *rankings[3:]], config(micro_batch_size=2))
    for name in ("loss/reward", "reward/accuracy", "reward/margin"):
        assert with_tied[name] == pytest.approx(metrics[name], rel=1e-12)
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("architecture", ["qwen3", "deberta-v2"])
def test_pairs_are_trained_to_the_bit_as_by_the_pairwise_loss(tiny, config, architecture):
    tokenizer = load_tokenizer(tiny(architecture))
    model = load_reward_model(tiny(architecture), tokenizer, device=CPU, compute_dtype=torch.float32, seed=0).eval()
    pairs = make(RewardInputs(tokenizer), [(0, 1)] * 9, margins=True)
    settings = {"center_coef": 0.1, "label_smoothing": 0.1}
    metrics, found = gradient(model, pairs, config(micro_batch_size=4, **settings))

    model.zero_grad()
    ordered = sorted(pairs, key=lambda pair: sum(len(row["input_ids"]) for row in pair.rows))
    total = torch.zeros(())
    for start in (0, 4, 8):
        part = ordered[start : start + 4]
        scores = model([pair.rows[0] for pair in part] + [pair.rows[1] for pair in part])
        margin = scores.new_tensor([pair.ranking.margin for pair in part])
        loss, _ = pairwise_reward_loss(scores[: len(part)], scores[len(part) :], num_pairs=9, margin=margin, **settings)
        loss.backward()
        total += loss.detach()
    assert metrics["loss/reward"] == float(total)
    assert torch.equal(found, flat_gradient(model))


def settings(tiny, tmp_path, name, architecture="gpt2", **more):
    more = {"sample_every": 0, "max_steps": 3} | more
    return RewardConfig(model=tiny(architecture), output=tmp_path / name, dtype="float32", **more)


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("deberta-v2", marks=pytest.mark.exhaustive)])
def test_separates_planted_preferences_on_held_out_pairs(tiny, tmp_path, architecture):
    """Of random words: the chosen response has a z somewhere."""
    random.seed(0)

    def word(letters):
        return "".join(random.choices(letters, k=random.randint(2, 8)))

    def pair(number):
        plain = word("abcdefgh")
        position = random.randrange(len(plain))
        chosen = plain[:position] + "z" + plain[position:]
        prompt = f"第{number}题 {word('mnop')}"
        return {"prompt": prompt, "chosen": chosen, "rejected": word("abcdefgh") + random.choice("abcdefgh")}

    planted = write_jsonl(tmp_path / "pairs.jsonl", [pair(i) for i in range(160)])
    sizes = {"eval_fraction": 0.25, "epochs": 10, "batch_size": 30, "micro_batch_size": 30, "learning_rate": 5e-3}
    sizes |= {"max_steps": None, "eval_every": 0}
    summary = train_reward(settings(tiny, tmp_path, "run", architecture, data=planted, **sizes))
    assert summary["data"]["held_out"] > 25
    assert summary["first_evaluation"]["eval/accuracy"] < 0.8
    assert summary["last_evaluation"]["eval/accuracy"] >= 0.95


def test_rankings_of_two_are_pairs(tiny, tmp_path):
    """The same run, bit for bit, whichever way a file writes them."""
    random.seed(2)
    texts = [["".join(random.choices("abc苹果", k=9)) for _ in range(3)] for _ in range(12)]
    as_pairs = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in texts]
    as_rankings = [{"prompt": p, "responses": [b, a], "ranks": [7, 2]} for p, a, b in texts]
    weights, metrics = [], []
    for name, records in (("pairs", as_pairs), ("rankings", as_rankings)):
        data = write_jsonl(tmp_path / f"{name}.jsonl", records)
        run = settings(tiny, tmp_path, name, data=data, batch_size=4, eval_fraction=0.3)
        metrics.append(train_reward(run)["last_evaluation"])
        weights.append((tmp_path / name / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert metrics[0] == metrics[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mixed", [False, True])
def test_separates_planted_rankings_on_held_out_prompts(tiny, tmp_path, mixed):
    """The more letters z, the better; of four responses two tie. In the mixed file every other record is a pair."""
    random.seed(0)

    def response(zs):
        letters = [*random.choices("abcdefgh", k=6 - zs), *"z" * zs]
        random.shuffle(letters)
        return "".join(letters)

    records = []
    for i in range(150):
        prompt = f"第{i}题"
        if mixed and i % 2:
            records.append({"prompt": prompt, "chosen": response(2), "rejected": response(0)})
        else:
            zs = random.sample([0, 1, 1, 3], 4)
            records.append({"prompt": prompt, "responses": [response(z) for z in zs], "ranks": [9 - z for z in zs]})
    sizes = {"eval_fraction": 0.25, "epochs": 14, "batch_size": 25, "learning_rate": 5e-3, "max_steps": None}
    sizes |= {"eval_every": 0, "num_samples": 2, "sample_every": 1000}
    data = write_jsonl(tmp_path / "排序.jsonl", records)
    summary = train_reward(settings(tiny, tmp_path, "run", data=data, **sizes))
    assert summary["data"]["held_out"] > 25
    assert summary["first_evaluation"]["eval/accuracy"] < 0.8
    assert summary["last_evaluation"]["eval/accuracy"] >= 0.9
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples
    for sample in samples:
        assert sample["chosen"].count("z") > sample["rejected"].count("z")
        assert sample["chosen score"] > sample["rejected score"]


def test_evaluation_measures_all_pairs_alike(model_and_inputs, config):
    """The ranking of five has ten of the 22 pairs; in the loss it is one prompt of six."""
    model, inputs = model_and_inputs
    rankings = make(inputs)
    found = evaluate_rankings(model, rankings, config(micro_batch_size=2))
    scores = one_by_one(model, rankings)
    lengths = [[len(response) for response in one.ranking.responses] for one in rankings]
    measured = agreement([one.ranking.ranks for one in rankings], scores, lengths)
    assert measured["pairs"] == 1 + 3 + 5 + 1 + 10 + 2
    for name in ("accuracy", "ece", "length_correlation", "accuracy_similar_length"):
        assert found[f"eval/{name}"] == pytest.approx(measured[name], rel=1e-9), name
    flat = torch.tensor([score for own in scores for score in own], dtype=torch.float64)
    ranks = torch.tensor([rank for one in rankings for rank in one.ranking.ranks])
    groups = torch.tensor([i for i, one in enumerate(rankings) for _ in one.rows])
    loss, metrics = ranking_reward_loss(flat, ranks, groups)
    assert found["eval/loss"] == pytest.approx(float(loss), rel=1e-9)
    assert found["eval/score_mean"] == pytest.approx(float(flat.mean()), rel=1e-9)
    assert abs(float(metrics["reward/accuracy"]) - found["eval/accuracy"]) > 0.01


def test_evaluation_leaves_out_what_is_not_defined(model_and_inputs, config):
    model, inputs = model_and_inputs
    with torch.no_grad():
        model.classifier.score.weight.zero_()
    found = evaluate_rankings(model, make(inputs), config())
    assert found["eval/accuracy"] == 0
    assert "eval/length_correlation" not in found
