"""The best of n responses, measured on tiny models; what is computed there is tested in tests/core/test_best_of_n.py."""

import itertools
import json

import pytest

from heedful import BestOfNConfig, ConfigError, RewardError, ScoresConfig, evaluate_best_of_n, evaluate_scores
from heedful.cli.main import main
from heedful.core import kl_bound, mean_interval, share_interval

PROMPTS = [{"prompt": f"第{i}个问题"} for i in range(6)]


@pytest.fixture
def sampled(written, cpu):
    return {"data": written(PROMPTS), "max_new_tokens": 8, "num_samples": 24, **cpu}


def ascii_share(completions):
    return [float(sum(c.isascii() for c in text)) for text in completions]


def parity(completions):
    return [float(sum(map(ord, text)) % 2) for text in completions]


class Recorder:
    """A reward that remembers what it scored."""

    def __init__(self, function):
        self.function, self.prompts, self.texts, self.truncated = function, [], [], []

    def __call__(self, prompts, completions, truncated):
        self.prompts, self.texts, self.truncated = list(prompts), list(completions), list(truncated)
        return self.function(completions)


def test_of_one_it_is_the_plain_model(tiny, sampled):
    """Every number and sample that ``scores`` gives, bit for bit, with several choices a prompt."""
    settings = {"model": tiny(), "samples_per_prompt": 2, **sampled}
    plain = evaluate_scores(ScoresConfig(**settings), rewards=[ascii_share])
    one = evaluate_best_of_n(BestOfNConfig(n=1, **settings), rewards=[ascii_share])
    assert {name: one[name] for name in plain} == plain
    assert (one["win_rate"], one["kl_bound"], one["plain_score_mean"]) == (0.5, 0.0, plain["score_mean"])
    assert one["ties"] == len(one["samples"]) * 2


def test_the_best_of_four_by_hand(tiny, sampled):
    """And the table of k: the mean over prompts of what to expect of k responses; of 1 it is the plain model."""
    reward, judge = Recorder(ascii_share), Recorder(parity)
    config = BestOfNConfig(model=tiny(), **sampled)
    result = evaluate_best_of_n(config, rewards=[reward], judge=[judge])
    scores, judged = ascii_share(reward.texts), parity(reward.texts)
    assert reward.prompts == [record["prompt"] for record in PROMPTS for _ in range(4)]
    assert judge.texts == reward.texts
    groups = [range(i, i + 4) for i in range(0, 24, 4)]
    best = [max(group, key=lambda row: (scores[row], -row)) for group in groups]
    assert any(row not in (group[0], group[-1]) for row, group in zip(best, groups, strict=True))
    assert result["score_mean"] == pytest.approx(sum(scores[row] for row in best) / 6)
    assert result["interval_95"] == pytest.approx(mean_interval([[scores[row]] for row in best]))
    assert result["plain_score_mean"] == pytest.approx(sum(scores) / 24)
    assert result["judge_score_mean"] == pytest.approx(sum(judged[row] for row in best) / 6)
    judge_interval = mean_interval([[judged[row]] for row in best])
    assert result["judge_interval_95"] == pytest.approx(judge_interval)
    assert result["plain_judge_score_mean"] == pytest.approx(sum(judged) / 24)
    pairs = [(judged[row], judged[group[0]]) for row, group in zip(best, groups, strict=True)]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    assert len(set(wins)) > 1, "the seed no longer gives both ties and decisions"
    assert (result["win_rate"], result["ties"]) == (pytest.approx(sum(wins) / 6), wins.count(0.5))
    assert result["win_interval_95"] == share_interval([[win] for win in wins])
    assert result["kl_bound"] == kl_bound(4)
    assert result["eos_frac"] == pytest.approx(1 - sum(reward.truncated[row] for row in best) / 6)
    assert (result["prompts"], result["responses"]) == (6, 24)
    assert [tuple(row.values()) for row in result["samples"]] == [
        (reward.prompts[row], reward.texts[row], scores[row], judged[row]) for row in best
    ]
    table = result["best_of"]
    assert [row["k"] for row in table] == [1, 2, 3, 4]
    assert [row["kl_bound"] for row in table] == [kl_bound(k) for k in (1, 2, 3, 4)]
    pairs = [
        [max(pair, key=lambda row: (scores[row], -row)) for pair in itertools.combinations(group, 2)]
        for group in groups
    ]
    for name, interval, values in (("score", "interval_95", scores), ("judge_score", "judge_interval_95", judged)):
        of_two = [sum(values[row] for row in rows) / 6 for rows in pairs]
        assert table[1][name] == pytest.approx(sum(of_two) / 6)
        assert table[1][interval] == pytest.approx(mean_interval([[value] for value in of_two]))
    assert table[0]["interval_95"] == pytest.approx(mean_interval([scores[i : i + 4] for i in range(0, 24, 4)]))
    for prefix in ("", "judge_"):
        ends = (table[0][f"{prefix}score"], table[3][f"{prefix}score"])
        assert ends == (result[f"plain_{prefix}score_mean"], result[f"{prefix}score_mean"])


def test_without_a_judge_the_rewards_judge(tiny, sampled):
    result = evaluate_best_of_n(BestOfNConfig(model=tiny(), **sampled), rewards=[ascii_share])
    same = evaluate_best_of_n(BestOfNConfig(model=tiny(), **sampled), rewards=ascii_share, judge=ascii_share)
    assert 0.5 < result["win_rate"] == same["win_rate"]
    assert same["judge_score_mean"] == same["score_mean"] == result["score_mean"]
    assert not [name for name in [*result, *result["best_of"][0], *result["samples"][0]] if "judge" in name]


def test_several_choices_for_each_prompt(tiny, sampled, written):
    """As in a file with every prompt twice; the intervals are over prompts in both."""
    config = BestOfNConfig(model=tiny(), n=3, samples_per_prompt=2, **sampled)
    result = evaluate_best_of_n(config, rewards=[ascii_share])
    twice = sampled | {"data": written([record for record in PROMPTS for _ in range(2)], "两次.jsonl")}
    repeated = evaluate_best_of_n(BestOfNConfig(model=tiny(), n=3, **twice), rewards=[ascii_share])
    scores = [row["score"] for row in repeated["samples"]]
    assert result["score_mean"] == pytest.approx(repeated["score_mean"])
    assert result["interval_95"] == pytest.approx(mean_interval([scores[i : i + 2] for i in range(0, 12, 2)]))
    assert (result["win_rate"], result["ties"]) == (pytest.approx(repeated["win_rate"]), repeated["ties"])
    assert result["win_interval_95"] == pytest.approx(repeated["win_interval_95"])
    assert (result["prompts"], result["responses"]) == (6, 36)
    assert result["samples"] == repeated["samples"][::2]


def test_greedy_responses_leave_nothing_to_choose(sampled):
    with pytest.raises(ConfigError, match="--n 4 needs a --temperature above 0"):
        BestOfNConfig(model="m", temperature=0.0, **sampled)
    BestOfNConfig(model="m", n=1, temperature=0.0, **sampled)


def test_a_bad_judge_is_told_before_anything_is_loaded(sampled, tmp_path):
    """By its own flag: the rewards are in order, and the model does not exist."""
    with pytest.raises(ConfigError, match=r"^--judge: 'gold' is not a reward; use model:PATH"):
        evaluate_best_of_n(BestOfNConfig(model="没有", rewards=("rule:digits",), judge=("gold",), **sampled))
    (tmp_path / "r.py").write_text("import 没有这个模块\n", encoding="utf-8")
    judge = (f"python:{tmp_path / 'r.py'}:f",)
    with pytest.raises(RewardError, match=r"^--judge: .*cannot be imported"):
        evaluate_best_of_n(BestOfNConfig(model="没有", rewards=("rule:digits",), judge=judge, **sampled))
    with pytest.raises(ConfigError, match=r"^--rewards is missing"):
        evaluate_best_of_n(BestOfNConfig(model="没有", judge=("rule:digits",), **sampled))


def test_the_command(tiny, sampled, tmp_path, capsys):
    output, judge = tmp_path / "最好.json", "rule:length:1-9"
    arguments = ["--model", tiny(), "--data", sampled["data"], "--rewards", "rule:digits", "--judge", judge]
    more = ["--n", "2", "--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu", "--output", str(output)]
    assert main(["evaluate", "best-of-n", *arguments, *more]) == 0
    config = BestOfNConfig(model=tiny(), rewards=("rule:digits",), judge=(judge,), n=2, **sampled | {"num_samples": 4})
    expected = evaluate_best_of_n(config)
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found.pop("settings")["judge"] == [judge]
    assert found == json.loads(json.dumps(expected)), "intervals are lists there"
    printed = capsys.readouterr().out
    assert f"judge_score_mean: {expected['judge_score_mean']:.4f}" in printed
    assert "best_of" in printed
    assert "best_of:" not in printed
