"""The task of benchmarks/critic: how often its demonstrations are right, and what its reward counts."""

import importlib
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
    assert (1 - task.error_rate(n)) ** (n // 2) == pytest.approx(task.START, abs=1e-12)


def test_demonstrations_are_right_as_often_as_they_should_be_and_their_marks_are_true(task):
    records = list(task.demonstrations(20, 2000, seed=0))
    rewards = task.right([record["prompt"] for record in records], [record["completion"] for record in records])
    assert sum(rewards) / 2000 == pytest.approx(task.START, abs=0.04)  # four standard errors
    for record in records[:50]:
        true = task.on_track(record["prompt"], record["completion"])
        assert record["completion"][1::2] == "".join("+" if one else "-" for one in true)


def test_an_answer_is_right_by_its_steps_and_its_length(task):
    asked = "a3.1.4.1.="
    said = ["3+4+8+9+", "3-4-8-9-", "3+4+8+0+", "3+5+8+9+", "3+4+8+", "", "中+4+8+9+", "3+4+8+9+9"]
    assert task.right([asked] * 8, said) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "marks do not count"


def test_an_answer_is_on_track_until_its_first_error(task):
    asked = "a3.1.4.1.="
    assert task.on_track(asked, "3+4+8+9+") == [True, True, True, True]
    assert task.on_track(asked, "3+5-9-9-") == [True, False, False, False], (
        "a right sum after an error does not mend it"
    )
    assert task.on_track(asked, "3+4") == [True, True]


def test_a_perfect_critic_knows_an_error_once_it_is_said(task, tmp_path):
    """Before each token, ``decay ** steps left`` while all steps are right, else 0."""
    gradients = importlib.import_module("gradients")
    task.make_model(tmp_path / "model")
    policy = Policy.from_pretrained(str(tmp_path / "model"))
    ids = [[*policy.tokenizer(text).input_ids, policy.tokenizer.eos_token_id] for text in ("3+4+", "3+5-", "2-3-")]
    batch = as_responses(policy, ["a3.1.="] * 3, ids, raw_prompts=True)
    values = gradients.perfect_values(batch, 4, 0.5)
    expected = [[0.25, 0.5, 0.5, 1.0, 1.0], [0.25, 0.5, 0.5, 0.0, 0.0], [0.25, 0.0, 0.0, 0.0, 0.0]]
    assert torch.equal(values, torch.tensor(expected))
