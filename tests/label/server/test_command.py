"""``heedful label serve`` and ``invite`` as a user meets them: what is refused, what is said, what is loaded."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from heedful import ConfigError
from heedful.apps.label import Item, Project
from heedful.apps.label.server.run import invite, serve
from heedful.apps.label.server.security import access_of
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from heedful.configs.label_server import InviteConfig, LabelServeConfig


@pytest.fixture
def project(tmp_path):
    Project.create(tmp_path / "项目", ProjectSettings(name="标注")).close()
    return tmp_path / "项目"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "--allowed-hosts"),
        ({"host": "::"}, "DNS rebinding"),
        ({"allowed_hosts": ("http://x",)}, "only a host name"),
        ({"allowed_hosts": ("*",)}, "only a host name"),
        ({"public_url": "label.example.org"}, "https://label.example.org"),
        ({"public_url": "https://label.example.org/path"}, "without a path"),
        ({"public_url": "https://user:pw@label.example.org"}, "without a path"),
        ({"port": 70000}, "--port"),
        ({"prompts": "x.jsonl"}, "--policy"),
        ({"buffer": 5}, "--policy"),
    ],
)
def test_settings_that_make_no_sense_are_refused(project, settings, message):
    with pytest.raises(ConfigError, match=message):
        LabelServeConfig(project=project, **settings)


def test_an_open_address_is_fine_with_its_names(project):
    config = LabelServeConfig(project=project, host="0.0.0.0", allowed_hosts=("label-box",))
    access = access_of(project, config.host, config.allowed_hosts, config.public_url)
    assert access.hosts == ("label-box",), "all interfaces are no name"


def test_what_is_no_project_is_said(tmp_path):
    with pytest.raises(ConfigError, match="heedful label new"):
        serve(LabelServeConfig(project=tmp_path, port=0))
    with pytest.raises(ConfigError, match="not a labelling project"):
        invite(InviteConfig(project=tmp_path, owner=True), print)


def test_a_policy_that_can_be_no_model_is_said(project, tmp_path, monkeypatch):
    """Before anything is served: its process would try again and again, and people would wait for it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "there", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    for name in ("nope", "./没有", "runs/sft/final", "标注/模型", "empty", "there/model"):
        with pytest.raises(ConfigError, match=f"--policy {re.escape(name)}"):
            serve(LabelServeConfig(project=project, port=0, policy=("model", "org/name", "modelscope:org/name", name)))


def test_a_port_that_is_taken_is_said(project, served):
    with pytest.raises(ConfigError, match="--port 0"):
        serve(LabelServeConfig(project=project, port=served().port))


def test_an_invitation_is_a_link(project):
    said = []
    invite(InviteConfig(project=project, name="Ada 😀", url="https://label.example.org/"), said.append)
    invite(InviteConfig(project=project, name="Bo", held_out=True), said.append)
    invite(InviteConfig(project=project, name="Ada 😀"), said.append)
    assert said[0].startswith("Ada 😀 (annotator) signs in, once, with https://label.example.org/join#")
    with Project.open(project) as opened:
        people = {person.name: person for person in opened.people()}
        assert len(people) == len(opened.people()) == 3
        assert people["Bo"].standing == "held-out"
        assert opened.redeem(said[0].partition("#")[2]) is None, "the newer link replaces the older one"
        assert opened.session(opened.redeem(said[2].partition("#")[2])).name == "Ada 😀"


def test_another_role_under_the_same_name_is_refused(project):
    invite(InviteConfig(project=project, name="Ada"), print)
    with pytest.raises(ConfigError, match="page People"):
        invite(InviteConfig(project=project, name="Ada", role="owner"), print)
    with pytest.raises(ConfigError, match="--held-out"):
        InviteConfig(project=project, name="Ada", role="viewer", held_out=True)


def owners_link(project, **settings):
    """What the command prints, in one line."""
    said = []
    invite(InviteConfig(project=project, owner=True, **settings), said.append)
    return " ".join(" ".join(said).split())


def test_the_server_loads_no_torch_and_tells_its_log_only_how_to_get_the_owners_link(project, new_client, capsys):
    """It ends when it is asked to, and says what it keeps back."""
    with Project.open(project) as opened:
        opened.add_items([Item("c" * 20, "chat", "聊聊😀")])
    code = (
        "import sys, heedful.cli.main as cli; status = cli.main(sys.argv[1:]); "
        "print('torch' in sys.modules or 'transformers' in sys.modules, status)"
    )
    words = ["label", "serve", str(project), "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = process.stdout.readline()
        assert "join" not in said
        address = re.search(r"heedful label invite (\S+) --owner --url (http://127.0.0.1:(\d+))$", said.strip())
        assert address[1] == f"'{project}'"
        assert main(words) == 2
        assert "open in another process" in capsys.readouterr().err.replace("\n", " ")
        first, link = owners_link(project), owners_link(project, url=address[2])
        assert "within 15 minutes" in link
        assert f"{address[2]}/join#" in link
        ada = new_client(int(address[3]))
        assert ada.join(first.partition("/join#")[2]).status == 401, "a newer link replaces it"
        token = link.partition("/join#")[2]
        assert ada.join(token).status == 200
        assert ada.get("/api/people").status == 200
        assert new_client(int(address[3])).join(token).status == 401, "once"
        process.send_signal(signal.SIGINT)
        said, warned = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert said.splitlines()[-1] == "False 0"
    assert "1 chat is not assigned, because there is no model to talk to" in " ".join(warned.split())
    assert token not in (project / "audit.jsonl").read_text(encoding="utf-8")


def test_a_terminal_gets_the_owners_link(project):
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "heedful", "label", "serve", str(project), "--port", "0"]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE)
    try:
        os.close(theirs)
        said = b""
        while b"Ctrl-C" not in said:
            said += os.read(ours, 1000)
        assert b"/join#" in said
        assert (project / "owner-link.json").stat().st_mode & 0o077 == 0
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    os.close(ours)


def test_the_owners_link_ends_soon(project, monkeypatch):
    said = []
    invite(InviteConfig(project=project, owner=True), said.append)
    token = said[0].partition("/join#")[2]
    now = time.time()
    for late in (16 * 60, -3600):  # also with a clock that was set back
        invite(InviteConfig(project=project, owner=True), said.append)
        monkeypatch.setattr(time, "time", lambda late=late: now + late)
        with Project.open(project) as opened:
            assert opened.redeem(said[-1].partition("/join#")[2]) is None
            assert opened.redeem(token) is None
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--name is missing"),
        ({"owner": True, "name": "Ada"}, "--name"),
        ({"owner": True, "role": "viewer"}, "--role"),
        ({"owner": True, "held_out": True}, "--held-out"),
    ],
)
def test_an_invitation_is_for_somebody_or_for_the_owner(project, settings, message):
    with pytest.raises(ConfigError, match=message):
        InviteConfig(project=project, **settings)
