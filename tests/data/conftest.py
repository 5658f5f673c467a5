"""Files whose first record is in line 2, and the renderer of a model that thinks and calls tools."""

import pytest
from transformers import AutoTokenizer

from heedful.data.chat import Renderer
from jsonl import lines


@pytest.fixture
def write(written):
    """``write(*records)`` is the path of a file with these records, from line 2 on."""
    return lambda *records: written("数据.jsonl", "\n" + lines(records))


@pytest.fixture
def renderer(thinker):
    """Of Qwen3's template, with one token per byte."""
    return Renderer(AutoTokenizer.from_pretrained(thinker()))
