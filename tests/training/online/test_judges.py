"""Judges in training: what a server does wrong changes no weight, and one that dies costs nothing but time."""

import zlib

import pytest

from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, RewardError, train_ppo
from heedful.apps.demo.judge import gold_judge
from heedful.rewards import judge
from jsonl import read_metrics
from trainers import TRAIN

FAULTS = {"rate_limited": 0.03, "failing": 0.005, "html": 0.005, "garbage": 0.03, "delay": (0.0, 0.05)}
JUDGED = {"reward_retry_minutes": 1.0}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(tiny, gold_prompts, tmp_path):
    """Settings of a run on the gold judge's prompts, with 64 responses a step."""
    sizes = {"rollout_batch_size": 64, "minibatch_size": 64, "ppo_epochs": 2, "max_new_tokens": 12, "steps": 2}
    sizes |= {"eval_fraction": 0.3, "learning_rate": 1e-3, "sample_every": 0, "eval_every": 0}
    machine = {"dtype": "float32", "device": "cpu"}
    return {"model": tiny("gpt2"), "data": gold_prompts, "output": tmp_path / "run"} | sizes | machine


def by_hash(completions):
    """What the server's judge says that is asked for it."""
    return [zlib.crc32(completion.encode()) % 101 / 100 for completion in completions]


def left(run):
    """The weights of a run's model, and its metrics but those of times and of what a judge costs."""
    lines = read_metrics(run)
    own = ("time/", "perf/", "judge/", "eval/judge/")
    kept = [{name: value for name, value in line.items() if not name.startswith(own)} for line in lines]
    return (run / "final" / "model.safetensors").read_bytes(), kept


def judged(run):
    """The metrics of a run's judge, step by step."""
    return [{k: v for k, v in line.items() if "judge" in k} for line in read_metrics(run, having="judge/requests")]


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_ppo_against_a_bad_server_is_ppo_against_the_judge_itself(settings, chat_server, tmp_path, monkeypatch, steps):
    """Steps of 64 requests in flight, of which some are put off, fail, or are answered with HTML or without a number."""
    monkeypatch.setattr(judge, "FIRST_WAIT", 0.05)
    settings |= {"steps": steps}
    train_ppo(PPOConfig(**settings | {"output": tmp_path / "here"}), rewards=[by_hash])
    chat_server.faults(**FAULTS, by_hash=True)
    train_ppo(PPOConfig(**settings, **JUDGED, rewards=(chat_server.judge,)))
    weights, metrics = left(tmp_path / "here")
    assert all(line["reward/score_std"] > 0 for line in metrics if "reward/score_std" in line), "nothing to get wrong"
    assert left(tmp_path / "run") == (weights, metrics)
    costs, seen = judged(tmp_path / "run"), chat_server.seen()
    assert seen["most_in_flight"] == 64
    assert seen["faults"] > 2 * steps
    assert sum(line["judge/retries"] for line in costs) > 0 < sum(line["judge/unusable_frac"] for line in costs)
    assert all(line["judge/prompt_tokens"] > 64 * 100 and line["judge/completion_tokens"] > 64 * 10 for line in costs)
    assert all("reward/failed_frac" not in line for line in metrics)


@pytest.mark.exhaustive
def test_a_judge_that_dies_stops_a_run_that_then_goes_on(heedful, settings, chat_server, tmp_path):
    """Exit status 4, everything saved; the same command goes on, to the same weights, bit for bit."""
    settings |= {"steps": 4}
    train_ppo(PPOConfig(**settings | {"output": tmp_path / "whole"}, **JUDGED, rewards=(chat_server.judge,)))
    later = sum(int(step["judge/requests"]) for step in judged(tmp_path / "whole")[1:])
    chat_server.faults(dies_after=chat_server.seen()["requests"] - later + 10)
    settings |= {"rewards": chat_server.judge, "reward_retry_minutes": 0.002}
    done = heedful("ppo", **settings)
    assert done.status == 4
    assert f"reward {chat_server.judge} gave no verdicts: status 503: 'gone'" in done.err
    assert "resumes from" in done.err
    assert not (tmp_path / "run" / "final").exists()
    chat_server.faults()
    assert heedful("ppo", **settings).status == 0
    assert left(tmp_path / "run") == left(tmp_path / "whole")


@pytest.mark.parametrize(
    ("answered", "when"), [pytest.param(20, "step 0", marks=pytest.mark.exhaustive), (80, "step 1")]
)
def test_a_judge_that_dies_before_the_first_whole_step(heedful, settings, chat_server, tmp_path, answered, when):
    """In the evaluation before it, and in it: exit status 4 as later, and the folder is as it was."""
    chat_server.faults(dies_after=answered)
    done = heedful("ppo", **settings, rewards=chat_server.judge, reward_retry_minutes=0)
    assert done.status == 4
    assert "gave no verdicts: status 503: 'gone'" in done.err
    assert ("step 0: " in done.err) == (when == "step 1")  # which is evaluated before the first step
    assert not (tmp_path / "run").exists()


def test_what_a_judge_cannot_say_is_masked_and_counted(settings, chat_server, tmp_path):
    """On some responses it never has a verdict: each is asked for three times, then left out; never a 0."""
    chat_server.faults(mute=(10, 1))
    settings |= {"steps": 1, "eval_fraction": 0.0}
    train_ppo(PPOConfig(**settings, **JUDGED, rewards=(chat_server.judge,), max_failed_rewards=0.4))
    steps = read_metrics(tmp_path / "run", having="judge/requests")
    failed = [round(64 * step.get("reward/failed_frac", 0)) for step in steps]
    assert sum(failed) > 0
    assert [step["judge/requests"] for step in steps] == [64 + 2 * count for count in failed]
    assert [step["judge/unusable_frac"] for step in steps] == [3 * count / (64 + 2 * count) for count in failed]


GROUPS = {
    "GRPO, ranking": (GRPOConfig, {"judge_mode": "ranking", "samples_per_prompt": 4}),
    "GRPO, pairwise": (GRPOConfig, {"judge_mode": "pairwise", "samples_per_prompt": 3}),
    "online DPO, pairwise": (OnlineDPOConfig, {"judge_mode": "pairwise", "samples_per_prompt": 2}),
    "PPO, ranking": (PPOConfig, {"judge_mode": "ranking", "samples_per_prompt": 4}),
}


def places(scores):
    """From 1 for the best to 0 for the worst; ties have the mean of their places."""
    wins = [sum((one > other) + 0.5 * (one == other) for other in scores) - 0.5 for one in scores]
    return [won / (len(scores) - 1) for won in wins]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GROUPS)
def test_comparing_modes_give_the_places_of_the_judges_scores(settings, chat_server, tmp_path, name):
    """The server knows the scores, so its verdicts make the places that they have within their group."""
    kind, changes = GROUPS[name]
    train, size = TRAIN[kind], changes["samples_per_prompt"]
    settings |= {"eval_fraction": 0.0, "rollout_batch_size": 6 * size, "minibatch_size": 6 * size}

    def placed(completions):
        scores = by_hash(completions)
        return [place for i in range(0, len(scores), size) for place in places(scores[i : i + size])]

    train(kind(**settings | {"output": tmp_path / "here", "samples_per_prompt": size}), rewards=[placed])
    chat_server.faults(by_hash=True)
    train(kind(**settings | changes, rewards=(chat_server.judge,)))
    weights, metrics = left(tmp_path / "here")
    found, lines = left(tmp_path / "run")
    assert all(line["reward/score_std"] > 0.2 for line in metrics if "reward/score_std" in line)
    assert found == weights
    assert lines == metrics
    requests = [step["judge/requests"] for step in judged(tmp_path / "run")]
    assert len(requests) == 2
    assert all(0 < count <= 6 * (1 if changes["judge_mode"] == "ranking" else size * (size - 1)) for count in requests)


COMPARING = {"judge_mode": "pairwise", "samples_per_prompt": 2}
NORM = {"eval_fraction": 0.0, "score_norm_samples": 8}
BEST = {"score_norm_samples": 8, "selection_rewards": ("rule:digits",)}
ALONE = [
    ({"judge_mode": "ranking"}, "--judge-mode ranking compares responses to the same prompt, and here each has one"),
    (COMPARING, "held-out prompts have one response each.*--eval-fraction 0"),
    (COMPARING | NORM, "--score-norm-samples takes one response"),
    ({"judge_rubric": "missing.txt"}, r"--judge-rubric missing\.txt cannot be read"),
]
BESIDE = [
    (COMPARING | NORM, "--score-norm-samples takes one response .* between 0 and 1"),
    (COMPARING, "held-out prompts have one response each.*--eval-fraction 0.*, or choose best/ .*--selection-rewards"),
    (COMPARING | BEST, "--score-norm-samples takes one response"),
]
"""Beside another reward: what is measured without the judge is not what is trained on, neither the scale of scores, nor the
model that is best."""


def test_what_cannot_work_is_refused_before_anything_is_asked(settings, chat_server, tmp_path):
    judge = chat_server.judge
    chat_server.faults()
    for tried, rewards in ((ALONE, []), (BESIDE, [gold_judge])):
        for changes, said in tried:
            with pytest.raises(ConfigError, match=said):
                train_ppo(PPOConfig(**settings | changes, rewards=(judge,)), rewards=rewards)
    with pytest.raises(ConfigError, match="--selection-rewards scores held-out responses one by one"):
        train_ppo(PPOConfig(**settings | COMPARING | {"selection_rewards": (judge,)}), rewards=[gold_judge])
    assert chat_server.seen()["requests"] == 0
    assert not (tmp_path / "run").exists()


def test_a_judge_that_compares_goes_with_another_choice_of_the_best(settings, chat_server, capsys):
    """Held-out scores are those of the other reward, and it is said."""
    chat_server.faults(by_hash=True)
    settings |= {"judge_mode": "ranking", "samples_per_prompt": 2, "steps": 1, "ppo_epochs": 1}
    settings |= {"rollout_batch_size": 8, "minibatch_size": 8, "selection_rewards": ("rule:digits",)}

    def three(completions):
        return [3.0] * len(completions)

    found = train_ppo(PPOConfig(**settings, rewards=(chat_server.judge,)), rewards=[three])
    assert found["last_evaluation"]["eval/score_mean"] == 3.0
    assert 3.0 < found["last_step"]["reward/score_mean"] < 4.0
    assert "eval/judge_mean" in found["best"]
    assert capsys.readouterr().err.count("eval/score_mean and eval/objective exclude the comparing judge") == 1


def test_another_rubric_is_another_run(settings, chat_server, tmp_path):
    """An unfinished run goes on with the rubric, the model and the mode that it began with."""
    rubric = tmp_path / "评分标准.txt"
    rubric.write_text("回答要准确、礼貌、简短。", encoding="utf-8")
    settings |= {"rollout_batch_size": 8, "minibatch_size": 8, "eval_fraction": 0.0}
    settings |= {"judge_rubric": rubric, "reward_retry_minutes": 0.0, "rewards": (chat_server.judge,)}
    chat_server.faults(dies_after=12)
    with pytest.raises(RewardError, match="gave no verdicts"):
        train_ppo(PPOConfig(**settings))
    chat_server.faults()
    assert f"- {chat_server.judge}\n" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="#another"):
        train_ppo(PPOConfig(**settings | {"rewards": (chat_server.judge.replace("#gold", "#another"),)}))
    rubric.write_text("回答要长。", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"评分标准\.txt has changed since the run began"):
        train_ppo(PPOConfig(**settings))
