"""Judges that compare, in heedful evaluate."""

import json
import zlib

import pytest

from heedful import (
    BestOfNConfig,
    ConfigError,
    ScoresConfig,
    WinRateConfig,
    evaluate_best_of_n,
    evaluate_scores,
    evaluate_win_rate,
)
from heedful.cli.main import main
from heedful.demo.judge import gold_judge

SAME = ("win_rate", "interval_95", "ties", "prompts")


@pytest.fixture
def settings(tiny, gold_prompts):
    return {
        "model": tiny("gpt2"),
        "data": gold_prompts,
        "max_prompts": 20,
        "max_new_tokens": 24,
        "dtype": "float32",
        "device": "cpu",
    }


def by_hash(completions):
    return [zlib.crc32(completion.encode()) % 101 / 100 for completion in completions]


def by_digits(completions):
    return [float(sum(c.isdigit() for c in completion)) for completion in completions]


@pytest.mark.parametrize(("mode", "samples"), [("pairwise", 2), ("ranking", 1)])
def test_a_judge_compares_two_policies(settings, chat_server, tiny, mode, samples):
    """As the judge's own scores do; two requests for a pair in which a place could matter, one for a ranking."""
    chat_server.faults(by_hash=True)
    both = settings | {"baseline": tiny("qwen2"), "samples_per_prompt": samples}
    plain = evaluate_win_rate(WinRateConfig(**both), rewards=[by_hash])
    assert plain["ties"] < 20 * samples / 2
    judged = evaluate_win_rate(WinRateConfig(**both, judge_mode=mode, rewards=(chat_server.judge,)))
    assert {name: judged[name] for name in SAME} == {name: plain[name] for name in SAME}
    assert judged["score_mean"] == plain["win_rate"] == pytest.approx(1 - judged["baseline_score_mean"])
    assert judged["judge/requests"] <= 20 * samples * (2 if mode == "pairwise" else 1)
    assert judged["judge/prompt_tokens"] > 0


def test_a_judge_that_takes_whatever_stands_first_finds_nobody_better(settings, chat_server, tiny):
    chat_server.faults(prefers="1")
    both = settings | {"baseline": tiny("qwen2"), "judge_mode": "pairwise", "rewards": (chat_server.judge,)}
    found = evaluate_win_rate(WinRateConfig(**both))
    assert (found["win_rate"], found["ties"], found["judge/disagreed_frac"]) == (0.5, 20, 1.0)


def test_a_ranking_chooses_the_best_of_n(settings, chat_server):
    """The same one as the judge's scores."""
    chat_server.faults(by_hash=True)
    plain = evaluate_best_of_n(BestOfNConfig(**settings, n=3), rewards=[by_hash], judge=[by_digits])
    ranked = BestOfNConfig(**settings, n=3, judge_mode="ranking", rewards=(chat_server.judge,))
    judged = evaluate_best_of_n(ranked, judge=[by_digits])
    assert judged["judge_score_mean"] == plain["judge_score_mean"]
    assert judged["win_rate"] == plain["win_rate"]


def test_pairs_without_a_verdict_are_left_out_and_counted(settings, chat_server, tiny):
    chat_server.faults(mute=(5, 0))
    both = settings | {"baseline": tiny("qwen2"), "judge_mode": "pairwise", "rewards": (chat_server.judge,)}
    found = evaluate_win_rate(WinRateConfig(**both, max_failed_rewards=0.9))
    assert 0 < found["failed"] < 20
    assert "gave no verdict" in found["first_failure"]
    assert found["judge/unusable_frac"] > 0


def test_a_comparison_has_no_mean_score(settings, chat_server):
    with pytest.raises(ConfigError, match=r"--judge-mode ranking compares .* use heedful evaluate win-rate"):
        evaluate_scores(ScoresConfig(**settings, judge_mode="ranking", rewards=(chat_server.judge,)))
    result = evaluate_scores(ScoresConfig(**settings, rewards=(chat_server.judge,)))
    assert result["score_mean"] == evaluate_scores(ScoresConfig(**settings), rewards=[gold_judge])["score_mean"]
    assert json.dumps(result)


@pytest.mark.parametrize(("answered", "status"), [(0, 2), (5, 4)])
def test_a_judge_that_dies_in_an_evaluation(settings, chat_server, tmp_path, capsys, answered, status):
    """Its address was right if it had answered: status 4, and there is nothing to keep."""
    chat_server.faults(dies_after=answered)
    words = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    words += [
        "--rewards",
        chat_server.judge,
        "--reward-retry-minutes",
        "0",
        "--reward-concurrency",
        "1",
    ]
    assert main(["evaluate", "scores", *words, "--output", str(tmp_path / "r.json")]) == status
    assert "gave no verdicts: status 503: 'gone'" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
