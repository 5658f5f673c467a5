"""The process that answers prompts for a server: its protocol, errors that do not end it, determinism."""

import io
import json
import os
import subprocess
import sys

import pytest

from heedful.apps.rounds.sample import serve
from heedful.configs.tools import SampleWorkerConfig

REQUESTS = [
    {"id": 1, "prompts": ["1 + 1 = ?", [{"role": "user", "content": "🦊 \u2028 猫？"}]], "answers": 2},
    {"id": "二", "prompts": ["1 + 1 = ?"]},
]


@pytest.fixture
def ask(tiny):
    """``ask(lines)``: the replies of a worker in this process."""

    def run(lines, **settings):
        small = {"max_new_tokens": 5, "device": "cpu", "dtype": "float32"}
        config = SampleWorkerConfig(**({"models": (tiny("qwen3"),)} | small | settings))
        replies = io.StringIO()
        status = serve(config, io.StringIO("".join(f"{line}\n" for line in lines)), replies)
        assert replies.getvalue().isascii(), "some readers end a line at U+2028"
        return status, [json.loads(line) for line in replies.getvalue().split("\n") if line]

    return run


def test_answers_come_in_order_and_say_what_wrote_them(ask, tiny):
    status, (ready, first, second) = ask([json.dumps(request, ensure_ascii=False) for request in REQUESTS])
    assert status == 0
    assert ready == {"ready": {"models": [tiny("qwen3")]}}
    assert (first["id"], second["id"]) == (1, "二")
    assert [len(answers) for answers in first["answers"]] == [2, 2]
    assert [len(answers) for answers in second["answers"]] == [2]
    for answer in (*first["answers"][0], *first["answers"][1], *second["answers"][0]):
        assert isinstance(answer["response"], str)
        assert answer["source"]["checkpoint"] == tiny("qwen3")


def test_the_same_requests_get_the_same_answers_and_repeated_ones_new_ones(ask):
    lines = [json.dumps(REQUESTS[1])] * 2
    (_, once), (_, again) = ask(lines), ask(lines)
    assert once == again
    assert once[1]["answers"] != once[2]["answers"]


BAD = {
    "{": "not a JSON line",
    "[]": "a request must be an object",
    '{"id": 7, "prompts": []}': "must be a list of strings or of conversations",
    '{"id": 7, "prompts": [" "]}': "prompts[0]",
    '{"id": 7, "prompts": [{"role": "user"}]}': "prompts[0]",
    '{"id": 7, "prompts": ["\\ud800"]}': "lone surrogate",
    '{"id": 7, "prompts": ["a"], "answers": true}': "from 1 to 64",
    '{"id": 7, "prompts": ["a"], "answers": 65}': "from 1 to 64",
}


def test_a_bad_request_gets_an_error_and_the_next_is_answered(ask):
    _, (_, *bad, good) = ask([*BAD, json.dumps(REQUESTS[1])])
    for reply, (line, said) in zip(bad, BAD.items(), strict=True):
        assert said in reply["error"]
        assert reply["id"] == (7 if '"id": 7' in line else None)
    assert good["answers"]


def test_a_model_that_is_not_there_is_said_instead_of_ready(ask):
    status, (only,) = ask([json.dumps(REQUESTS[1])], models=("/没有",))
    assert status == 2
    assert "/没有" in only["error"]


@pytest.mark.exhaustive
def test_as_a_process(tiny, tmp_path):
    """From a YAML file, with bytes that are no UTF-8 among the requests, in a locale without Unicode."""
    file = tmp_path / "设置.yaml"
    file.write_text(f"models: [{tiny('qwen3')}]\nmax_new_tokens: 4\ndevice: cpu\ndtype: float32\n", encoding="utf-8")
    requests = json.dumps(REQUESTS[0], ensure_ascii=False).encode() + b'\n{"id": 2, "prompts": ["\xff"]}\n'
    done = subprocess.run(
        [sys.executable, "-m", "heedful.apps.rounds.sample", str(file)],
        input=requests,
        capture_output=True,
        timeout=120,
        env=os.environ | {"LC_ALL": "C", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    ready, first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert ready["ready"]
    assert len(first["answers"]) == 2
    assert "error" in second
