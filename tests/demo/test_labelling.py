"""``heedful demo --label``: simulated labels from end to end on a few steps, the page and its server, refusals, going on."""

import contextlib
import io
import json
import socket
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from heedful import ConfigError, DemoConfig, run_demo
from heedful.configs.label_server import InviteConfig
from heedful.data import read_prompts, split_by_prompt
from heedful.demo import labelling
from heedful.demo.folder import CONTENTS, LABELS, check_output, make_beginning
from heedful.demo.pipeline import read_recipe
from heedful.demo.story import STORIES
from heedful.label import Project
from heedful.label.server.run import invite


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def demo(small_world, small_recipe, tmp_path_factory):
    """The settings of a demo with the labels of a simulated user, whose answers a random model wrote, and how many prefer."""
    folder = tmp_path_factory.mktemp("标注") / "演示"
    config = DemoConfig(output=folder, device="cpu", label=True, label_simulated=True, label_pairs=20)
    settings = read_recipe(config, small_recipe)
    with make_beginning(config, settings.tiny):
        ppo = replace(settings.ppo, model=str(folder / "base"))
        count = labelling.label_pairs(config, ppo, STORIES["en"], lambda text: None)
        assert labelling.label_pairs(config, ppo, STORIES["en"], lambda text: None) == count, "nothing is asked again"
    return config, count


def test_a_simulated_user_labels_every_pair(demo):
    config, count = demo
    folder = config.output / LABELS
    with Project.open(folder, read_only=True) as project:
        items, labels, instructions = project.items(), project.labels(), project.instructions()
    assert len(items) == len(labels) == 20
    assert instructions == (1, STORIES["en"]["instructions"])
    prefers = [one for one in labels if one.event.content["answer"]["preferred"] is not None]
    assert 0 < count == len(rows_of(folder / labelling.TRAIN)) == len(prefers)


def test_nobody_labels_what_is_held_out(demo):
    folder = demo[0].output
    prompts = read_prompts(str(folder / "world" / "prompts.jsonl"))
    held_out = {prompt.prompt[0].content for prompt in split_by_prompt(prompts, 0.12)[1]}
    labelled = {row["prompt"][0]["content"] for row in rows_of(folder / LABELS / labelling.TRAIN)}
    measured = {row["prompt"][0]["content"] for row in rows_of(folder / LABELS / labelling.EVAL)}
    assert not labelled & held_out
    assert measured == held_out


@pytest.mark.exhaustive
def test_from_end_to_end(small_world, small_recipe, tmp_path):
    """The reward model learns from the labels only, and the demo says so."""
    said = io.StringIO()
    config = DemoConfig(
        output=tmp_path / "演示", device="cpu", label=True, label_simulated=True, label_pairs=20, language="en"
    )
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        summary = run_demo(config, small_recipe)
    words = " ".join(said.getvalue().split())
    assert {path.name for path in config.output.iterdir()} == CONTENTS | {LABELS}
    assert f"From {len(rows_of(config.output / LABELS / labelling.TRAIN))} preferences" in words
    assert "A simulated labeller, who agrees with the gold judge on 73 % of pairs, says" in words
    assert f"agrees with the gold judge on {100 * summary['reward.accuracy']:.0f} of 100 pairs that nobody has" in words
    settings = (config.output / "reward" / "config.yaml").read_text("utf-8")
    assert f"{LABELS}/{labelling.TRAIN}" in settings
    assert "world/preferences.jsonl" not in settings


def test_an_unfinished_demo_goes_on_only_as_it_began(tmp_path):
    folder = tmp_path / "演示"
    folder.mkdir()
    (folder / "demo.json").write_text('{"seed": 0}')
    for name in ("world", "base", LABELS):
        (folder / name).mkdir()
    assert check_output(DemoConfig(output=folder, label=True))
    with pytest.raises(ConfigError, match="holds an unfinished demo with --label; use the same"):
        check_output(DemoConfig(output=folder))
    (folder / LABELS).rmdir()
    (folder / "reward").mkdir()
    assert check_output(DemoConfig(output=folder))
    with pytest.raises(ConfigError, match="holds an unfinished demo without --label; use the same"):
        check_output(DemoConfig(output=folder, label=True))


def test_simulated_labels_need_labels():
    with pytest.raises(ConfigError, match="--label-simulated belongs to --label, which is not given"):
        DemoConfig(label_simulated=True)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def ask(port, method, path, cookie="", csrf="", **body):
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    origin = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json", "X-CSRF-Token": csrf}
    headers = {"Cookie": cookie} | (origin if method == "POST" else {})
    connection.request(method, path, json.dumps(body) if method == "POST" else None, headers)
    answer = connection.getresponse()
    content, cookies = answer.read(), answer.getheader("Set-Cookie") or ""
    connection.close()
    assert answer.status == 200, content
    return json.loads(content), cookies.partition(";")[0]


def test_the_demo_waits_for_the_browser(demo, tmp_path, capfd, monkeypatch):
    """The real server in its process; a client in the browser's place labels with the left answer each time.

    The last label can be taken back; the server ends only after the page was told that nothing is left.
    """
    monkeypatch.setattr(labelling, "TAKE_BACK_SECONDS", 0.5)
    with Project.open(demo[0].output / LABELS, read_only=True) as other:
        items = other.items()[:3]
    folder, port = tmp_path / LABELS, free_port()
    with Project.create(folder, other.settings) as project:
        project.add_items(items)
    config = DemoConfig(output=tmp_path, label=True, label_port=port)
    waiting = threading.Thread(
        target=labelling._wait_for_labels, args=(config, folder, STORIES["en"]["waiting"], lambda text: None)
    )
    waiting.start()
    said, until = "", time.monotonic() + 120
    while f"--owner --url http://127.0.0.1:{port}" not in said:
        assert time.monotonic() < until, said
        assert waiting.is_alive(), said
        time.sleep(0.1)
        said += capfd.readouterr().out
    links = []
    invite(InviteConfig(project=folder, owner=True), links.append)
    _, cookie = ask(port, "POST", "/api/join", token=links[0].partition("/join#")[2])
    csrf = ask(port, "GET", "/api/me", cookie)[0]["csrf"]
    for number in range(4):
        item = ask(port, "GET", "/api/next", cookie)[0]["item"]
        answer = {"preferred": 0, "strength": 2, "both_bad": False}
        shown = {"item": item["id"], "assignment": item["assignment"]}
        sent = {"nonce": f"nonce-{number:04d}", **shown, "answer": answer, "seconds": 1}
        ask(port, "POST", "/api/label", cookie, csrf, **sent, comment="", flags=[])
        if number == 2:
            assert ask(port, "POST", "/api/undo", cookie, csrf, nonce="undo-0001")[0]["item"]["id"] == item["id"]
    time.sleep(0.8)
    assert waiting.is_alive(), "no page has been told yet"
    end = ask(port, "GET", "/api/next", cookie)[0]
    assert (end["item"], end["reason"]) == (None, "closing")
    waiting.join(timeout=120)
    assert not waiting.is_alive()
    with Project.open(folder, read_only=True) as project:
        assert len(project.labels()) == 3
    with Project.open(folder):
        pass  # the server has let it go


def test_a_server_that_cannot_start_is_said(demo, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = DemoConfig(output=tmp_path, label=True, label_port=taken.getsockname()[1])
        with Project.open(demo[0].output / LABELS, read_only=True) as other:
            item = other.items()[0]
        with Project.create(tmp_path / LABELS, other.settings) as project:
            project.add_items([item])
        with pytest.raises(ConfigError, match="the label server ended with status 2 before all pairs were labelled"):
            labelling._wait_for_labels(config, tmp_path / LABELS, STORIES["en"]["waiting"], lambda text: None)


def test_settings_are_the_recipes_but_for_the_reward_model(demo, small_recipe, tmp_path):
    """Its batches are no larger than the labels are many: most may be ties."""
    folder = demo[0].output
    plain = read_recipe(DemoConfig(output=folder, device="cpu"), small_recipe)
    labelled = read_recipe(demo[0], small_recipe)
    assert (labelled.sft, labelled.ppo, labelled.tiny) == (plain.sft, replace(plain.ppo, kl_coef=0.3), plain.tiny)
    assert labelled.reward.data == str(folder / LABELS / labelling.TRAIN)
    assert labelled.reward.batch_size == min(16, len(rows_of(folder / LABELS / labelling.TRAIN))) < 16
    assert read_recipe(DemoConfig(output=tmp_path, label=True), small_recipe).reward.batch_size == 16
