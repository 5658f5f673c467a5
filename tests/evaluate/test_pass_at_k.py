"""pass@k of a policy: the estimator over the responses that were really sampled, its interval, and what is refused."""

import json
import math

import pytest

from heedful import PassAtKConfig, RewardError, evaluate_pass_at_k
from heedful.cli.main import main
from heedful.core import share_interval

PROMPTS = [{"prompt": f"第{i}个问题"} for i in range(6)]


@pytest.fixture
def settings(written, cpu):
    return {"data": written(PROMPTS), "max_new_tokens": 6, "response_length": "fixed", "num_samples": 6, **cpu}


def parity(completions, **_):
    return [float(sum(map(ord, text)) % 2) for text in completions]


def test_pass_at_k_is_counted_over_all_subsets_of_what_was_sampled(tiny, settings):
    """By hand: of the C(8, k) subsets of a prompt's responses, the share with a correct one; then the mean over prompts."""
    seen = []

    def noted(prompts, completions):
        scores = parity(completions)
        seen.extend(zip(prompts, scores, strict=True))
        return scores

    config = PassAtKConfig(model=tiny(), samples_per_prompt=8, k=(1, 3, 8), **settings)
    result = evaluate_pass_at_k(config, rewards=[noted])
    assert [prompt for prompt, _ in seen] == [record["prompt"] for record in PROMPTS for _ in range(8)]
    correct = [sum(score for _, score in seen[i : i + 8]) for i in range(0, 48, 8)]
    assert len(set(correct)) > 1
    for k in (1, 3, 8):
        passed = [1 - math.comb(8 - int(c), k) / math.comb(8, k) for c in correct]
        assert result[f"pass_at_{k}"] == pytest.approx(sum(passed) / 6, abs=1e-12)
        assert result[f"interval_95_at_{k}"] == pytest.approx(share_interval([[p] for p in passed]))
    assert result["pass_at_1"] == pytest.approx(result["correct_frac"])
    assert result["pass_at_1"] < result["pass_at_3"] <= result["pass_at_8"]
    assert (result["prompts"], result["responses"]) == (6, 48)
    assert [row["correct of 8"] for row in result["samples"]] == correct
    assert [row["score"] for row in result["samples"]] == [score for _, score in seen[::8]]


def test_correct_from_says_what_is_correct(tiny, settings):
    """Scores 0, 1, 2, 3 over and over: from 2 on half is correct, from 3.5 none, and 2 itself counts."""

    def counting(completions):
        return [float(i % 4) for i in range(len(completions))]

    found = [
        evaluate_pass_at_k(
            PassAtKConfig(model=tiny(), samples_per_prompt=4, k=(1, 3), correct_from=bound, **settings),
            rewards=[counting],
        )
        for bound in (2.0, 3.5)
    ]
    assert [(one["pass_at_1"], one["pass_at_3"]) for one in found] == [(0.5, 1.0), (0.0, 0.0)]


def test_a_prompt_with_a_failed_response_is_left_out_and_counted(tiny, settings):
    """The second prompt's third response has no score."""

    def failing(completions):
        return [None if i == 6 else float(i < 4) for i in range(len(completions))]

    config = PassAtKConfig(model=tiny(), samples_per_prompt=4, k=(2,), max_failed_rewards=0.5, **settings)
    result = evaluate_pass_at_k(config, rewards=[failing])
    assert result["failed"] == 1
    assert result["pass_at_2"] == pytest.approx(1 / 5)
    assert len(result["samples"]) == 5
    config = PassAtKConfig(model=tiny(), samples_per_prompt=2, max_failed_rewards=0.99, **settings)
    with pytest.raises(RewardError):
        evaluate_pass_at_k(config, lambda completions: [None if i % 2 else 1.0 for i in range(len(completions))])


def test_the_command(tiny, written, tmp_path, capsys):
    data = written([{"prompt": f"{i}加{i}等于几？", "answer": str(2 * i)} for i in range(6)])
    words = ["evaluate", "pass-at-k", "--model", tiny(), "--data", data, "--rewards", "rule:exact_number"]
    sizes = ["--samples-per-prompt", "4", "--max-new-tokens", "8", "--device", "cpu", "--dtype", "float32"]
    output = tmp_path / "结果.json"
    assert main([*words, *sizes, "--k", "1", "4", "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "pass_at_1: " in said
    assert "interval_95_at_4: " in said
    saved = json.loads(output.read_text(encoding="utf-8"))
    assert 0 <= saved["pass_at_1"] <= saved["pass_at_4"] <= 1
    assert saved["settings"]["k"] == [1, 4]
    assert main([*words, *sizes, "--k", "1", "5"]) == 2
    assert "--k must be numbers from 1 to --samples-per-prompt 4" in " ".join(capsys.readouterr().err.split())
