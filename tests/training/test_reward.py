"""The reward model learns preferences, from pairs of any length, and its gradient does not know the micro-batch size."""

import random

import pytest
import torch

from heedful import Ranking, RewardConfig, train_reward
from heedful.algorithms.reward_model import accumulate
from heedful.core import pairwise_reward_loss
from heedful.data.chat import RewardInputs
from heedful.data.loading import RankingRows
from heedful.models import load_reward_model, load_tokenizer
from jsonl import write_jsonl
from plain import random_text

CPU = torch.device("cpu")


@pytest.fixture
def planted(tmp_path):
    """Pairs of random words, the chosen response always holding the letter z, of many prompts (some Chinese)."""
    random.seed(0)

    def word(letters):
        return "".join(random.choices(letters, k=random.randint(2, 8)))

    def pair(number):
        plain = word("abcdefgh")
        position = random.randrange(len(plain))
        chosen = plain[:position] + "z" + plain[position:]
        prompt = f"第{number}题 {word('mnop')}"
        return {"prompt": prompt, "chosen": chosen, "rejected": word("abcdefgh") + random.choice("abcdefgh")}

    return write_jsonl(tmp_path / "pairs.jsonl", [pair(i) for i in range(160)])


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("deberta-v2", marks=pytest.mark.exhaustive)])
def test_separates_planted_preferences_on_held_out_pairs(tiny, planted, tmp_path, architecture):
    config = RewardConfig(
        model=tiny(architecture),
        data=planted,
        output=tmp_path / "run",
        eval_fraction=0.25,
        epochs=10,
        batch_size=30,
        micro_batch_size=30,
        learning_rate=5e-3,
        eval_every=0,
        sample_every=0,
        dtype="float32",
    )
    summary = train_reward(config)
    assert summary["data"]["held_out"] > 25
    assert summary["first_evaluation"]["eval/accuracy"] < 0.8
    assert summary["last_evaluation"]["eval/accuracy"] >= 0.95


def rows(tokenizer, num: int, *, margins: bool = False) -> list[RankingRows]:
    random.seed(1)
    inputs = RewardInputs(tokenizer)

    pairs = []
    for i in range(num):
        ranking = Ranking(
            random_text(),
            (random_text(), random_text()),
            (0, 1),
            f"row {i}",
            margin=random.random() if margins else None,
        )
        encoded = [inputs.encode(ranking.prompt, response) for response in ranking.responses]
        pairs.append(RankingRows(ranking, tuple(encoded)))
    return pairs


def gradient(model, pairs, config, size):
    model.zero_grad()
    changed = RewardConfig(**{**vars(config), "micro_batch_size": size})
    accumulate(model, pairs, changed)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_micro_batch_size_does_not_change_the_gradient(tiny, tmp_path, dtype, limit):
    """Also with margins, centring and label smoothing."""
    tokenizer = load_tokenizer(tiny("gpt2"))
    model = load_reward_model(tiny("gpt2"), tokenizer, device=CPU, compute_dtype=torch.float32, seed=0).to(dtype).eval()
    config = RewardConfig(model="m", data="d", output=tmp_path, center_coef=0.01, label_smoothing=0.1)
    pairs = rows(tokenizer, 8, margins=True)
    whole = gradient(model, pairs, config, 8)
    for size in (1, 3):
        split = gradient(model, pairs, config, size)
        assert float((split - whole).norm() / whole.norm()) < limit


def test_margin_and_options_reach_the_loss(tiny, tmp_path):
    """The trainer's loss equals the formula on scores computed row by row."""
    tokenizer = load_tokenizer(tiny("gpt2"))
    model = load_reward_model(tiny("gpt2"), tokenizer, device=CPU, compute_dtype=torch.float32, seed=0).eval()
    config = RewardConfig(model="m", data="d", output=tmp_path, center_coef=0.3, label_smoothing=0.2)
    pairs = rows(tokenizer, 5, margins=True)
    metrics = accumulate(model, pairs, config)
    chosen = torch.cat([model([pair.rows[0]]) for pair in pairs]).detach()
    rejected = torch.cat([model([pair.rows[1]]) for pair in pairs]).detach()
    margin = torch.tensor([pair.ranking.margin for pair in pairs])
    expected, _ = pairwise_reward_loss(chosen, rejected, margin=margin, center_coef=0.3, label_smoothing=0.2)
    assert metrics["loss/reward"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["reward/margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)


def test_same_seed_same_run_bit_for_bit(tiny, planted, tmp_path):
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = RewardConfig(
            model=tiny("gpt2"), data=planted, output=tmp_path / name, max_steps=3, seed=seed, sample_every=0
        )
        train_reward(config)
        weights.append((tmp_path / name / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
