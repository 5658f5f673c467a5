"""The task of benchmarks/critic: how often its demonstrations are right, and what its reward counts."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "critic"


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("task")


@pytest.mark.parametrize("n", [20, 50, 100, 400])
def test_the_errors_of_demonstrations_leave_three_of_ten_right(task, n):
    """How likely the sum is still the true one, step by step: an error leaves it, and one of nine meets it again."""
    eps, still = task.error_rate(n), 1.0
    for _ in range(n):
        still = (1 - eps) * still + eps / 9 * (1 - still)
    assert still == pytest.approx(task.START, abs=1e-12)


def test_demonstrations_are_right_as_often_as_they_should_be(task):
    records = list(task.demonstrations(20, 2000, seed=0))
    marks = task.right([record["prompt"] for record in records], [record["completion"] for record in records])
    assert sum(marks) / 2000 == pytest.approx(task.START, abs=0.04)  # four standard errors


def test_an_answer_is_right_by_its_last_digit_and_its_length(task):
    asked = task.prompts(20, 1, seed=0)[0]["prompt"]
    total = sum(map(int, asked[1:-1])) % 10
    answers = [
        "0" * 19 + str(total),
        "0" * 19 + str((total + 1) % 10),
        "0" * 18 + str(total),
        "",
        "中" * 19 + str(total),
    ]
    assert task.right([asked] * 5, answers) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_an_answer_is_on_track_where_its_sum_is_the_true_one(task):
    assert task.on_track("a3141=", "3489") == [True, True, True, True]
    assert task.on_track("a3141=", "3599") == [True, False, False, True]
    assert task.on_track("a3141=", "34") == [True, True]
