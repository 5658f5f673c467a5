"""heedful watch: the page follows the files, which it only reads; other hosts and taken ports are refused."""

import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from heedful.apps.report.watch import Watched, bound
from heedful.configs.report import ReportConfig


@pytest.fixture
def served(log_run):
    """A run, and the address of its page."""
    run = log_run()
    watched = Watched(ReportConfig(runs=(str(run),)))
    with bound(0, watched) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield run, watched, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def asked(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_page_follows_the_files(served, monkeypatch):
    monkeypatch.setattr("heedful.apps.report.watch.SECONDS", 0.0)
    monkeypatch.setattr("heedful.apps.report.watch.TIMES", 0.0)
    run, _, url = served
    before = sorted(run.rglob("*"))
    status, page, headers = asked(url)
    version = asked(f"{url}/version")[1]
    assert status == 200
    assert f'data-version="{version}"' in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "Refresh" not in headers
    assert "connect-src 'self'" in page
    assert asked(url)[1] == page, "nothing has changed"
    assert sorted(run.rglob("*")) == before, "files are only read"
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 4, "reward/score_mean": 77.5}\n')
    assert asked(f"{url}/version")[1] != version
    assert "to 77.5" in asked(url)[1]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as log:
        log.write("not json\n")
    status, said, _ = asked(url)
    assert status == 503
    assert "metrics.jsonl:6 is damaged" in said
    shutil.rmtree(run)
    status, said, headers = asked(url)
    assert status == 503
    assert f"{run} does not exist" in said
    assert headers["Refresh"] == "3", "the browser asks again: the run may be started anew"


def test_a_page_is_kept_for_ten_times_as_long_as_it_takes(served):
    run, watched, _ = served
    watched.current()
    known, watched.took = watched.version(), 60.0
    (run / "summary.json").write_text("{}", encoding="utf-8")
    watched.made -= 599
    assert watched.version() == known
    watched.made -= 2
    assert watched.version() != known


def test_other_names_and_other_pages_are_refused(served):
    _, _, url = served
    assert asked(url, Host="evil.example")[0] == 421
    assert asked(url, Origin="http://evil.example")[0] == 403
    assert asked(f"{url}/../../etc/passwd")[0] == 404
    assert asked(url, Host="localhost:1")[0] == 200


def test_a_port_in_use_is_found_before_the_page_is_made(tmp_path, heedful):
    """Making a page of a large run takes minutes: the folder, which is none of a run, is not even read."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = heedful("watch", str(tmp_path), port=port)
    assert outcome.status == 2
    assert outcome.err == f"heedful: ConfigError: --port {port} is in use; choose another, or --port 0 for a free one\n"


def test_what_is_no_run_is_not_served(heedful, tmp_path):
    outcome = heedful("watch", str(tmp_path), port=0)
    assert outcome.status == 2
    assert "is not a run" in outcome.err


@pytest.mark.exhaustive
def test_ctrl_c_ends_it(log_run, forked_heedful):
    run = log_run()
    process = forked_heedful("watch", str(run), "--port", "0")
    until = time.monotonic() + 60
    while "Ctrl-C ends it" not in process.said()[0] and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate()
    assert process.returncode == 0
    assert complaints == ""
