"""What is no HTTP, or no clear HTTP, costs the server of a reward model neither a traceback nor its service."""

from urllib.parse import urlsplit

import httpx2
import pytest


@pytest.fixture
def port(serving):
    with serving(lambda prompts, completions, truncated: [0.5] * len(completions), max_characters=1000) as address:
        yield urlsplit(address).port
        answer = httpx2.get(f"{address}/health", trust_env=False)
        assert answer.status_code == 200


def test_each_is_refused_without_a_line(port, malformed, capfd):
    for name, request in malformed.MALFORMED.items():
        answered = malformed.statuses(malformed.send(port, request, "/score"))
        assert all(400 <= status < 500 for status in answered), f"{name}: {answered}"
        if name.startswith("both lengths") or "chunks in" in name or "with a line" in name:
            assert answered == [400], f"{name}: {answered}"
        for path in ("/score", "/health", "/nothing"):
            malformed.send(port, request, path, resets=True)
    assert capfd.readouterr().err == ""
