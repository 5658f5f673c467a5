"""The critics of a report: their numbers by hand, which responses are read, and runs that have none."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logged_runs import episode

SCORES = (0.0, 2.0, 0.0, 2.0)
VALUES = ([0.5, 0.5], [0.5, 1.5]) * 2
RESPONSES = [("问题", "ab"), ("问题", "cd"), ("q", "ab"), ("q", "cd")]
SETTINGS = {"gamma": 1.0, "gae_lambda": 0.5, "samples_per_prompt": 2}


@pytest.fixture
def logged(log_run):
    """``logged(settings, ...)`` is a run with two responses to each of two prompts, of two tokens, in each of its steps."""

    def write(settings=SETTINGS, steps=1, values=VALUES, responses=RESPONSES, **options):
        run = log_run(steps=steps, responses=responses, settings=settings, **options)
        for path in (run / "rollouts").iterdir():
            rewards = [
                [0.0] * (len(text.encode()) - 1) + [score] for (_, text), score in zip(responses, SCORES, strict=True)
            ]
            replace(path, "token_rewards", rewards)
            replace(path, "values", values)
        return run

    return write


def replace(path, name, numbers):
    table = pq.read_table(path)
    column = pa.array(numbers, pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


@pytest.fixture
def part(heedful, tmp_path):
    """``part(run)`` is what the page says of critics: the words, and the pictures' titles with their alternative texts."""

    def read(*runs):
        outcome = heedful("report", *map(str, runs), output=tmp_path / "页.html")
        assert outcome.status == 0, outcome.err
        page = (tmp_path / "页.html").read_text(encoding="utf-8")
        found = re.search('<section aria-labelledby="the-critic">(.*?)</section>', page, re.DOTALL)
        if found is None:
            return "", {}
        pictures = dict(re.findall(r'<figcaption>(.*?)</figcaption><svg [^>]*aria-label="([^"]*)"', found[1]))
        return " ".join(re.sub("<[^>]*>", " ", found[1].replace("&#x27;", "'")).split()), pictures

    return read


def test_the_numbers_by_hand(logged, part):
    """Returns are 0 and 2 with variance 1. The critic says 1/2 of both at first, then 1/2 and 3/2: its errors -1/2, -1/2,
    3/2, 1/2 have variance 11/16. The other response's return is off by 2. At lambda 1/2 the advantages are -1/4, -1/2, 5/4,
    1/2, with variance 15/32."""
    said, pictures = part(logged())
    assert "critic, lambda 1 0.312 0 0.25 0.688" in said
    assert "critic, lambda 0.5 — — — 0.469" in said
    assert "value of the prompt alone 0 0 0.5 1" in said
    assert "mean of the prompt's other responses −3 −3 0 4" in said
    assert "Step 1: 4 responses, 8 values; lambda 0.5, gamma 1." in said
    assert list(pictures) == [
        "calibration",
        "variance explained, by place",
        "bias, by place",
        "variance of the advantage",
    ]
    assert "critic from 0 to 0.75," in pictures["variance explained, by place"]
    assert "value of the prompt alone from 0.5 to 0.5," in pictures["bias, by place"]
    assert "mean return from 0 to 2," in pictures["calibration"]
    assert "critic from 0.3125 to 0.6875," in pictures["variance of the advantage"]


def test_only_the_last_steps_are_read_and_whole_groups(logged, part):
    """A response without values, or with one that is not finite, takes its group along."""
    run = logged(steps=12)
    replace(run / "rollouts" / "step-000012.parquet", "values", [None, *VALUES[1:]])
    replace(run / "rollouts" / "step-000011.parquet", "values", [*VALUES[:3], [0.5, float("nan")]])
    replace(run / "rollouts" / "step-000010.parquet", "values", [None] * 4)
    empty = run / "rollouts" / "step-000009.parquet"
    pq.write_table(pq.read_table(empty).slice(0, 0), empty)
    said, _ = part(run)
    assert "Steps 3 to 12: 28 responses, 56 values" in said
    assert "critic, lambda 1 0.312 0 0.25 0.688" in said


def test_a_large_run_is_read_in_part(logged, part, monkeypatch):
    monkeypatch.setattr("heedful.apps.report.critics.MOST_TOKENS", 14)
    said, _ = part(logged(steps=3))
    assert "Steps 2 to 3: 6 responses, 12 values" in said


def test_a_response_that_is_one_action_has_no_places(logged, part):
    """Its rewards come at once, and lambda has no effect."""
    responses = [("q", "a好"), ("q", "cdef"), ("q", "b"), ("q", "a")]
    values = [[0.5] * 4, [1.5] * 4, [0.5], [1.5]]
    said, pictures = part(logged({"gamma": 1.0, "importance_level": "sequence"}, values=values, responses=responses))
    assert "4 responses, 4 values" in said
    assert "critic, lambda 1 0.75 0.75 0 0.25" in said
    assert list(pictures) == ["calibration", "variance explained, by length", "bias, by length"]


def test_turns_are_actions(logged, part):
    """Turns of two tokens and of one: a value and a return for each, of the turn's rewards and those behind it."""
    said = [
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "好"},
        {"role": "assistant", "content": "cd"},
    ]
    played = [episode(*said, rewards=[0.0, 0.5])] * 4
    values = [[value, 9.0, 0.5, 9.0] for value in (0.5, 1.5, 0.5, 1.5)]
    run = logged({"gamma": 1.0, "action": "turn"}, values=values, responses=[("问", "abcd")] * 4, episodes=played)
    path = run / "rollouts" / "step-000001.parquet"
    replace(path, "token_rewards", [[0.0, score, 0.0, 0.5] for score in (0.0, 1.0, 0.0, 1.0)])
    said, _ = part(run)
    assert "4 responses, 8 values" in said
    assert "critic, lambda 1 1 1 0 0" in said


def test_lambda_by_length_is_that_of_the_run(logged, part):
    """1 - 1 / (2 alpha) is 1/2 at alpha 1."""
    said, _ = part(logged({"gamma": 1.0, "gae_lambda_alpha": 1.0}))
    assert "critic, lambda 0.50 on average — — — 0.469" in said


def test_returns_that_do_not_vary_are_explained_by_nothing(logged, part):
    run = logged(values=[[0.5, 1.0]] * 4)
    replace(run / "rollouts" / "step-000001.parquet", "token_rewards", [[0.0, 1.0]] * 4)
    said, pictures = part(run)
    assert "critic, lambda 1 — — 0.25 —" in said
    assert pictures["variance explained, by place"] == "variance explained, by place: no values"
    assert "variance of the advantage" not in pictures


def test_a_run_without_values_says_how_to_get_them(log_run, part):
    run, other = log_run("甲/ppo", columns=False), log_run("乙/grpo", columns=False, algorithm="grpo")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"step": 3, "value/mean": 0.5}) + "\n")
    said, pictures = part(run, other)
    assert said.startswith("The critic 甲/ppo The run kept no values in rollouts/")
    assert "--rollouts all" in said
    assert "grpo" not in said
    assert pictures == {}
    assert part(other) == ("", {})
