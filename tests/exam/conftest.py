"""The exam of a function on eight pairs."""

import pytest

from exam_cases import RECORDS
from heedful.apps.exam.examine import examine
from heedful.configs.exam import ExamConfig


@pytest.fixture
def examined(written):
    """``examined(function, records, **settings)``: the exam of a function on records of pairs."""

    def run(function, records=RECORDS, *, second=(), judge=(), **settings):
        data = written("数据.jsonl", records)
        config = ExamConfig(reward="rule:digits", data=data, device="cpu", dtype="float32", **settings)
        return examine(config, function, judge, second)

    return run
