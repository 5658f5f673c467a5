"""``heedful label serve`` and ``heedful label invite``."""

import asyncio
import contextlib
import gc
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import uvicorn
import yaml

from heedful.apps.label.people import OWNER_LINK_MINUTES, make_owner_link
from heedful.apps.label.project import Project
from heedful.apps.label.records import Standing
from heedful.apps.label.server.app import Application
from heedful.apps.label.server.policy import Buffer, PolicyWorker
from heedful.apps.label.server.request import Site
from heedful.apps.label.server.security import access_of
from heedful.apps.label.settings_file import read_settings
from heedful.apps.serving.connections import BACKLOG, Server, bound
from heedful.configs.label_server import EVERY_INTERFACE, InviteConfig, LabelServeConfig
from heedful.configs.parse import plain_value
from heedful.configs.tools import SampleWorkerConfig
from heedful.data.messages import as_dict
from heedful.data.schemas import read_prompts
from heedful.display import Screen, harmless, say
from heedful.errors import ConfigError, HeedfulError
from heedful.files import make_private, write_text
from heedful.hosts import is_loopback
from heedful.hub import MODELSCOPE
from heedful.types import Prompt

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MOST_CONNECTIONS = 1024
RECEIVE_SECONDS = 60.0
"""Seconds to receive a request or send an answer: enough for 64 MB over a slow line."""
END_SECONDS = 5.0
"""Seconds for open requests once the server stops."""
UNSEEN_SECONDS = 60.0
"""Seconds for which a server that stops by itself waits for a page to ask for the next item (its tab may be closed)."""
LOOK_SECONDS = 0.1
"""Seconds between checks whether it may stop."""


def show(text: str) -> None:
    """Print a line."""
    Screen(soft_wrap=True).print(harmless(text), markup=False, highlight=False)


def serve(config: LabelServeConfig, announce: Callable[[str], None] = show) -> None:
    """Serve a project's page until Ctrl-C.

    Args:
        config: the project, the address, and the policy if one writes answers.
        announce: called with each line for the user. The first has the owner's one-time link, only if standard output is a
            terminal: a log would keep the link.

    Raises ConfigError if the server cannot listen at the address or a policy does not exist; DataError if there is no such
    project, or another process writes to it.
    """
    _check_policies(config.policy)
    with bound(config.host, config.port) as listening, Project.open(config.project) as project:
        access = access_of(config.project, config.host, config.allowed_hosts, config.public_url)
        host = config.allowed_hosts[0] if config.host in EVERY_INTERFACE else config.host
        host = f"[{host}]" if ":" in host else host
        address = config.public_url or f"http://{host}:{listening.getsockname()[1]}"
        with _policy(config, project) as (worker, buffer):
            closing = None if config.until_done is None else Closing(project, config.until_done)
            app = Application(Site(project, access, worker, buffer, closing))
            gc.freeze()  # loaded objects stay: collecting them would block everybody
            listening.listen(BACKLOG)  # a link opened at once waits and is not refused
            if sys.stdout.isatty():
                announce(f"{project.settings.name}: sign in as the owner, {_owners_link(config.project, address)}")
            else:
                command = f"heedful label invite {shlex.quote(str(config.project))} --owner --url {address}"
                announce(
                    f"{project.settings.name}: {address}; no link is printed, because the output is no terminal. Get one for "
                    f"the owner, on this machine, with: {command}"
                )
            if worker is None and (chats := project.chats_left()):
                count = f"{chats} chats are" if chats > 1 else "1 chat is"
                say(f"warning: {count} not assigned, because there is no model to talk to; name one with --policy")
            itself = "" if closing is None else "the server stops by itself once everything is labelled; "
            announce(f"{itself}Ctrl-C stops it; a label is on disk as soon as the page confirms it")
            if not is_loopback(config.host) and not access.is_encrypted:
                say("warning: others can reach this server, and connections are not encrypted; see docs/labelling.md")
            _run(make_server(app), listening, closing)
    announce("the server has ended")


@dataclass
class Closing:
    """Stops a server once everything is labelled (``--until-done``) and a page has shown it."""

    project: Project
    seconds: float
    """Seconds in which the last label can be taken back after a page was told that nothing is left."""
    over_at: float | None = None
    """Time at which everything was labelled."""
    told_at: float | None = None
    """Time at which a page was told."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self) -> float | None:
        """Return for how many seconds the last label can be taken back; None if something is left to label."""
        is_over, now = self.project.is_over(), time.monotonic()
        with self.lock:
            if not is_over:
                return None
            self.told_at = now if self.told_at is None else self.told_at
            return max(0.0, self.seconds - (now - self.told_at))

    def watch(self, server: uvicorn.Server) -> None:
        """Stop a server when it may stop; returns then. An unreadable disk is reported once."""
        reported = ""
        while not server.should_exit:
            try:
                if self._has_ended():
                    server.should_exit = True
                reported = ""
            except HeedfulError as error:
                if str(error) != reported:
                    say(f"cannot check whether everything is labelled: {error}")
                reported = str(error)
            time.sleep(LOOK_SECONDS)

    def _has_ended(self) -> bool:
        is_over, now = self.project.is_over(), time.monotonic()
        with self.lock:
            if not is_over:
                self.over_at = self.told_at = None
                return False
            self.over_at = now if self.over_at is None else self.over_at
            is_told = self.told_at is not None and now - self.told_at >= self.seconds
            return is_told or now - self.over_at >= self.seconds + UNSEEN_SECONDS


def _run(server: uvicorn.Server, listening: socket.socket, closing: Closing | None) -> None:
    """Serve until Ctrl-C, or with ``closing`` until everything is labelled."""
    watching = None if closing is None else threading.Thread(target=closing.watch, args=(server,), name="closing")
    if watching is not None:
        watching.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(server.serve(sockets=[listening]))
    finally:
        server.should_exit = True
        if watching is not None:
            watching.join()


def _check_policies(policies: Sequence[str]) -> None:
    """Refuse a policy that cannot be a model; its process would try to load it again and again."""
    for name in policies:
        folder = Path(name)
        if folder.is_dir():
            if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
                raise ConfigError(
                    f"--policy {name} is a folder without a config.json, so it is not a model; name a model's folder"
                )
        elif not name.startswith(MODELSCOPE) and (not HUB_NAME.fullmatch(name) or Path(folder.parts[0]).is_dir()):
            raise ConfigError(
                f"--policy {name}: there is no such folder, and it is not ORG/NAME, the name of a model on the Hub (gpt2 is "
                "openai-community/gpt2)"
            )


def invite(config: InviteConfig, announce: Callable[[str], None] = show) -> None:
    """Add a person, if the name is new, and print the link. Raises ConfigError if another process writes.

    The owner's link only needs write access to the folder, and also works while a server runs.
    """
    if config.owner:
        read_settings(config.project)
        announce(f"the owner signs in, {_owners_link(config.project, config.url)}")
        return
    assert config.name is not None
    with Project.open(config.project) as project:
        same = [person for person in project.people() if person.name == config.name and person.standing != "removed"]
        if same and same[0].role != config.role:
            raise ConfigError(
                f"--name {config.name!r} is {same[0].role} already, not {config.role}; change the role on the page People, "
                "or give another name"
            )
        standing: Standing | None = "held-out" if config.held_out else None
        person = same[0] if same else project.add_person(config.name, config.role, standing)
        announce(
            f"{person.name} ({person.role}) signs in, once, with {config.url}/join#{project.invite(person.person_id)}"
        )


def make_server(app: Application) -> Server:
    """Return a server for an application, with limits on connections and on their time."""
    return Server(app, most_connections=MOST_CONNECTIONS, receive_seconds=RECEIVE_SECONDS, end_seconds=END_SECONDS)


def _owners_link(project: Path, address: str) -> str:
    return f"once and within {OWNER_LINK_MINUTES:g} minutes, with {address}/join#{make_owner_link(project)}"


@contextlib.contextmanager
def _policy(config: LabelServeConfig, project: Project) -> Iterator[tuple[PolicyWorker, Buffer] | tuple[None, None]]:
    """Start the policy's process and fill the buffer, if there is a policy."""
    if not config.policy:
        yield None, None
        return
    options = {one.name for one in fields(SampleWorkerConfig)} & {one.name for one in fields(config)}
    settings = {name: plain_value(getattr(config, name)) for name in sorted(options)}
    content = yaml.safe_dump({"models": list(config.policy), **settings}, sort_keys=False, allow_unicode=True)
    write_text(config.project / "policy.yaml", content)
    make_private(config.project)
    prompts = [] if config.prompts is None else [_as_json(one) for one in read_prompts(config.prompts)]
    worker = PolicyWorker(config.project / "policy.yaml", config.project / "policy.log")
    buffer = Buffer(project, worker, prompts, config.answers, config.buffer)
    with buffer, worker:  # the worker stops first, so that the buffer does not wait for its answers
        yield worker, buffer


def _as_json(prompt: Prompt) -> Any:
    return prompt.prompt if isinstance(prompt.prompt, str) else [as_dict(message) for message in prompt.prompt]
