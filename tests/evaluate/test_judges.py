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
from heedful.apps.demo.judge import gold_judge
from heedful.cli.main import main

SAME = ("win_rate", "interval_95", "ties", "prompts")


@pytest.fixture
def settings(tiny, gold_prompts):
    limits = {"max_prompts": 10, "max_new_tokens": 12, "dtype": "float32", "device": "cpu"}
    return {"model": tiny("gpt2"), "data": gold_prompts, **limits}


def by_hash(completions):
    return [zlib.crc32(completion.encode()) % 101 / 100 for completion in completions]


def by_digits(completions):
    return [float(sum(c.isdigit() for c in completion)) for completion in completions]


def test_a_judge_compares(settings, chat_server, tiny):
    """As the judge's own scores do: two policies, with two requests for a pair in which a place could matter and one for a
    ranking; and the best of n. A comparison has no mean score."""
    chat_server.faults(by_hash=True)
    both = settings | {"baseline": tiny("qwen2"), "samples_per_prompt": 2}
    plain = evaluate_win_rate(WinRateConfig(**both), rewards=[by_hash])
    assert plain["ties"] < 10
    for mode, requests in (("pairwise", 2), ("ranking", 1)):
        judged = evaluate_win_rate(WinRateConfig(**both, judge_mode=mode, rewards=(chat_server.judge,)))
        assert {name: judged[name] for name in SAME} == {name: plain[name] for name in SAME}
        assert judged["score_mean"] == plain["win_rate"] == pytest.approx(1 - judged["baseline_score_mean"])
        assert judged["judge/requests"] <= 20 * requests
        assert judged["judge/prompt_tokens"] > 0
    plain = evaluate_best_of_n(BestOfNConfig(**settings, n=3), rewards=[by_hash], judge=[by_digits])
    ranked = BestOfNConfig(**settings, n=3, judge_mode="ranking", rewards=(chat_server.judge,))
    judged = evaluate_best_of_n(ranked, judge=[by_digits])
    assert judged["judge_score_mean"] == plain["judge_score_mean"]
    assert judged["win_rate"] == plain["win_rate"]
    with pytest.raises(ConfigError, match=r"--judge-mode ranking compares .* use heedful evaluate win-rate"):
        evaluate_scores(ScoresConfig(**settings, judge_mode="ranking", rewards=(chat_server.judge,)))


def test_judges_that_are_of_no_use(settings, chat_server, tiny, tmp_path, capsys):
    """One that takes whatever stands first finds nobody better; pairs without a verdict are left out and counted. One that
    dies: its address was right if it had answered, which is status 4, and there is nothing to keep."""
    both = settings | {"baseline": tiny("qwen2"), "judge_mode": "pairwise", "rewards": (chat_server.judge,)}
    chat_server.faults(prefers="1")
    found = evaluate_win_rate(WinRateConfig(**both))
    assert (found["win_rate"], found["ties"], found["judge/disagreed_frac"]) == (0.5, 10, 1.0)
    chat_server.faults(mute=(5, 0))
    found = evaluate_win_rate(WinRateConfig(**both, max_failed_rewards=0.9))
    assert 0 < found["failed"] < 10
    assert "gave no verdict" in found["first_failure"]
    assert found["judge/unusable_frac"] > 0
    words = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--rewards", chat_server.judge, "--reward-retry-minutes", "0", "--reward-concurrency", "1"]
    for answered, status in ((0, 2), (5, 4)):
        chat_server.faults(dies_after=answered)
        assert main(["evaluate", "scores", *words, "--output", str(tmp_path / "r.json")]) == status
        assert "gave no verdicts: status 503: 'gone'" in capsys.readouterr().err
        assert not (tmp_path / "r.json").exists()
    chat_server.faults()
    result = evaluate_scores(ScoresConfig(**settings, rewards=(chat_server.judge,)))
    assert result["score_mean"] == evaluate_scores(ScoresConfig(**settings), rewards=[gold_judge])["score_mean"]
    assert json.dumps(result)
