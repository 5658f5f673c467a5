"""heedful.json: what it may say, and that a Hub that cannot be asked is not one that has nothing to say."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from heedful import CheckpointError
from heedful.models.reward_model import RewardFacts, load_facts, save_facts


@pytest.mark.parametrize(
    ("facts", "written"),
    [
        (RewardFacts(), None),
        (RewardFacts(0.5), {"offset": 0.5}),
        (RewardFacts(0.0, "template"), {"reads": "template"}),
        (RewardFacts(-2.0, "turn-end"), {"offset": -2.0, "reads": "turn-end"}),
    ],
)
def test_what_is_written_is_read(tmp_path, facts, written):
    save_facts(tmp_path, facts)
    path = tmp_path / "heedful.json"
    assert (json.loads(path.read_text(encoding="utf-8")) if path.exists() else None) == written
    if facts != RewardFacts(0.5):
        assert load_facts(str(tmp_path)) == facts


@pytest.mark.parametrize("content", ['{"reads": "whole"}', '{"reads": 1, "offset": 0.0}', '{"reads": ["template"]}'])
def test_a_reading_that_there_is_not(tmp_path, content):
    (tmp_path / "heedful.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"reads in its heedful\.json is .*; expected turn-end or template"):
        load_facts(str(tmp_path))


class Hub(BaseHTTPRequestHandler):
    """Knows of no heedful.json in org/foreign, one in org/ours, and hangs up when asked for that of org/away."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if "away" in self.path:
            self.close_connection = True
            return
        body = json.dumps({"offset": 3.0, "reads": "template"}).encode()
        self.send_response(404 if "foreign" in self.path else 200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("X-Error-Code" if "foreign" in self.path else "ETag", "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


ASK = """
import sys
from heedful.models.reward_model import load_facts
from heedful.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        print(load_facts(name))
    except CheckpointError as error:
        print("refused:", error)
"""


def ask(home, *names, **environment):
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.exhaustive
def test_the_hub(tmp_path):
    """There is none, there is one, and nobody knows; then without a connection, what was learned from it before."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        foreign, ours, away = ask(tmp_path, "org/foreign", "org/ours", "org/away", HF_ENDPOINT=endpoint)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert foreign == str(RewardFacts())
    assert ours == str(RewardFacts(3.0, "template"))
    said = "refused: org/away: its heedful.json cannot be fetched from the Hub, so its score offset and end of text"
    assert away.startswith(said)
    assert "hf download org/away --local-dir FOLDER" in away
    offline = ask(tmp_path, "org/foreign", "org/ours", "org/away", HF_HUB_OFFLINE="1")
    assert offline[:2] == [foreign, ours]
    assert offline[2].startswith(said)
