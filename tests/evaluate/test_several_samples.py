"""Several responses to a prompt: all are counted, and the interval is that of the prompts."""

import math

import pytest

from heedful import (
    ConfigError,
    KLConfig,
    Message,
    Prompt,
    Ranking,
    ScoresConfig,
    WinRateConfig,
    evaluate_kl,
    evaluate_scores,
    evaluate_win_rate,
)
from heedful.core import mean_interval, share_interval
from heedful.evaluate.measuring import by_prompt

PROMPTS = [{"prompt": f"第{i}个问题"} for i in range(5)]


@pytest.fixture
def once(written, cpu):
    return {"data": written(PROMPTS), "max_new_tokens": 12, "response_length": "fixed", "num_samples": 15, **cpu}


@pytest.fixture
def thrice(once, written):
    """The same prompts, each three times in the file: what three responses to a prompt must agree with."""
    return once | {"data": written([record for record in PROMPTS for _ in range(3)], "三次.jsonl")}


def parity(completions):
    return [sum(map(ord, text)) % 2 for text in completions]


def in_threes(values):
    return [values[i : i + 3] for i in range(0, len(values), 3)]


def test_values_are_grouped_by_prompt_wherever_it_stands():
    """A question is the same as text and as a message, with another system message too; whole texts have no prompt."""
    question = (Message("system", "短"), Message("user", "问"))
    items = [Prompt("问", "a:1"), Prompt("答", "a:2"), Prompt(question, "a:3"), Prompt("问", "b:9")]
    assert by_prompt([1.0, 2.0, 3.0, 4.0], items) == [[1.0, 3.0, 4.0], [2.0]]
    texts = [Ranking("", (text, "x"), (0, 1), "c:1") for text in ("甲", "乙", "甲")]
    assert by_prompt([1.0, 2.0, 3.0], texts) == [[1.0, 3.0], [2.0]]


def test_scores_count_every_response(tiny, once, thrice):
    seen = []

    def recorded(prompts, completions):
        seen.extend(zip(prompts, completions, strict=True))
        return [sum(c.isascii() for c in text) / 10 for text in completions]

    result = evaluate_scores(ScoresConfig(model=tiny(), samples_per_prompt=3, **once), rewards=[recorded])
    scores = [sum(c.isascii() for c in text) / 10 for _, text in seen]
    assert [prompt for prompt, _ in seen] == [record["prompt"] for record in PROMPTS for _ in range(3)]
    assert len({text for _, text in seen[:3]}) == 3, "responses to one prompt must differ"
    assert result["score_mean"] == pytest.approx(sum(scores) / 15)
    means = [sum(own) / 3 for own in in_threes(scores)]
    variance = sum((m - sum(means) / 5) ** 2 for m in means) / 4
    low, high = result["interval_95"]
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(variance / 5))
    assert (result["prompts"], result["responses"]) == (5, 15)
    assert [(row["prompt"], row["response"], row["score"]) for row in result["samples"]] == [
        (*seen[i], scores[i]) for i in range(0, 15, 3)
    ]
    repeated = evaluate_scores(ScoresConfig(model=tiny(), **thrice), rewards=[recorded])
    assert (repeated["prompts"], "responses" in repeated) == (15, False)
    assert [row["response"] for row in repeated["samples"]] == [text for _, text in seen[:15]]
    for name in ("score_mean", "interval_95", "response_length", "eos_frac", "empty_frac"):
        assert result[name] == pytest.approx(repeated[name], abs=1e-12)


def test_win_rate_compares_the_jth_with_the_jth(tiny, once, thrice):
    """As in a file with every prompt three times; the interval takes a prompt's three together."""
    models = {"model": tiny(), "baseline": tiny(seed=1)}
    result = evaluate_win_rate(WinRateConfig(samples_per_prompt=3, **models, **once), rewards=[parity])
    rows = evaluate_win_rate(WinRateConfig(**models, **thrice), rewards=[parity])["samples"]
    pairs = [(row["score"], row["baseline score"]) for row in rows]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    assert {0.5} < set(wins), "the seeds no longer give both ties and decisions"
    assert result["win_rate"] == pytest.approx(sum(wins) / 15)
    assert result["interval_95"] == share_interval(in_threes(wins))
    assert (result["ties"], result["prompts"], result["responses"]) == (wins.count(0.5), 5, 15)
    assert result["baseline_score_mean"] == pytest.approx(sum(b for _, b in pairs) / 15)
    assert result["samples"] == rows[::3]


def test_kl_is_the_mean_over_every_response(tiny, once, thrice):
    models = {"model": tiny(), "reference": tiny(seed=1)}
    result = evaluate_kl(KLConfig(samples_per_prompt=3, **models, **once))
    repeated = evaluate_kl(KLConfig(**models, **thrice))
    kls = [row["kl"] for row in repeated["samples"]]
    assert result["kl"] == pytest.approx(sum(kls) / 15, rel=1e-6)
    assert result["kl_per_token"] == pytest.approx(sum(kls) / 15 / 12, rel=1e-6)
    assert result["interval_95"] == pytest.approx(mean_interval(in_threes(kls)), rel=1e-6)
    assert result["interval_95"] == pytest.approx(repeated["interval_95"], rel=1e-6)
    assert result["interval_95"] != pytest.approx(mean_interval([[kl] for kl in kls]), rel=1e-2)
    assert (result["prompts"], result["responses"]) == (5, 15)
    assert [row["response"] for row in result["samples"]] == [row["response"] for row in repeated["samples"]][::3]


def test_greedy_responses_are_all_the_same(once):
    """Nothing is narrowed by counting one response three times."""
    with pytest.raises(ConfigError, match="--samples-per-prompt 3 needs a --temperature above 0"):
        ScoresConfig(model="m", samples_per_prompt=3, temperature=0.0, **once)
    ScoresConfig(model="m", samples_per_prompt=1, temperature=0.0, **once)
