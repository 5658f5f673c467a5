"""The task of benchmarks/critic: how often its demonstrations are right, and what its reward counts."""

import importlib.util
from pathlib import Path

import pytest
import torch

from heedful import as_responses
from heedful.models import Policy

FOLDER = Path(__file__).parents[1] / "benchmarks" / "critic"


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("task")


@pytest.mark.parametrize("n", [20, 50, 100, 400])
def test_the_errors_of_demonstrations_leave_three_of_ten_right(task, n):
    assert (1 - task.error_rate(n)) ** n == pytest.approx(task.START, abs=1e-12)


def test_demonstrations_are_right_as_often_as_they_should_be_and_written_in_letters_from_their_first_error_on(task):
    records = list(task.demonstrations(20, 2000, seed=0))
    rewards = task.right([record["prompt"] for record in records], [record["completion"] for record in records])
    assert sum(rewards) / 2000 == pytest.approx(task.START, abs=0.04)  # four standard errors
    for record in records[:50]:
        assert [sum_ in task.DIGITS for sum_ in record["completion"]] == task.on_track(**as_arguments(record))


def as_arguments(record):
    return {"prompt": record["prompt"], "said": record["completion"]}


def test_an_answer_is_right_by_its_sums_and_its_length(task):
    asked = "a3141="
    said = ["3489", "3480", "3589", "348", "", "中489", "34899", "348J"]
    assert task.right([asked] * 8, said) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_is_on_track_until_its_first_error(task):
    asked = "a3141="
    assert task.on_track(asked, "3489") == [True, True, True, True]
    assert task.on_track(asked, "3589") == [True, False, False, False], "a right sum after an error does not mend it"
    assert task.on_track(asked, "34") == [True, True]


def test_a_perfect_critic_knows_an_error_once_it_is_said(task, tmp_path):
    """Before each token, ``decay ** steps left`` while all sums are right, else 0."""
    spec = importlib.util.spec_from_file_location("critic_gradients", FOLDER / "gradients.py")
    gradients = importlib.util.module_from_spec(spec)  # a helper of tests has its name
    spec.loader.exec_module(gradients)
    task.make_model(tmp_path / "model")
    policy = Policy.from_pretrained(str(tmp_path / "model"))
    ids = [[*policy.tokenizer(text).input_ids, policy.tokenizer.eos_token_id] for text in ("34", "3F", "CD")]
    batch = as_responses(policy, ["a31="] * 3, ids, raw_prompts=True)
    values = gradients.perfect_values(batch, 2, 0.5)
    assert torch.equal(values, torch.tensor([[0.25, 0.5, 1.0], [0.25, 0.5, 0.0], [0.25, 0.0, 0.0]]))
