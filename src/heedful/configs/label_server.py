"""Settings of the server on which people label, and of invitations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from heedful.configs.options import MachineOptions, RawTextOptions, SamplingOptions, TemplateOptions, TrustOptions
from heedful.configs.settings import NOT_NEGATIVE, POSITIVE, Range, Settings, refuse
from heedful.errors import ConfigError

EVERY_INTERFACE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class LabelServeConfig(SamplingOptions, TemplateOptions, RawTextOptions, TrustOptions, MachineOptions):
    """Serve the page on which people label a project: heedful label serve PROJECT. Ctrl-C ends it."""

    project: Path
    """Folder of the project (heedful label new)."""
    host: str = "127.0.0.1"
    """Address to listen at. Anything else but this machine's own (127.0.0.1, ::1) can be reached by others: put a reverse
    proxy with TLS in front of it instead."""
    port: Annotated[int, Range(at_least=0, below=65536)] = 8765
    """Port to listen at. 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Other names of the server in browsers. Required with --host 0.0.0.0, against pages that let their name point to
    this machine (DNS rebinding)."""
    public_url: str | None = None
    """Where a reverse proxy on this machine serves it, such as https://label.example.org. Links are made with it, its name is
    allowed, and with https the session's cookie is never sent unencrypted."""
    policy: tuple[str, ...] = ()
    """Models that write answers while people label: folders or Hub names (ORG/NAME). None serves only what was imported."""
    prompts: str | None = None
    """Prompts for --policy to answer, as heedful sample reads them. None answers only in chats."""
    answers: Annotated[int, Range(at_least=2, at_most=9)] = 2
    """Answers to each prompt: 2 make a pair, more a ranking."""
    buffer: Annotated[int, POSITIVE] = 20
    """Items kept ready, so that nobody waits for a model. Raise it if many people label at once."""
    until_done: Annotated[float | None, NOT_NEGATIVE] = None
    """Seconds after which the server ends by itself once everything is labelled or skipped; until then the last label
    can be undone. None serves until Ctrl-C."""
    micro_batch_size: Annotated[int, POSITIVE] = 32
    """Rows that --policy has in memory at a time."""

    POSITIONAL = ("project",)

    def check(self) -> None:
        super().check()
        for name in self.allowed_hosts:
            if not name or any(sign in name for sign in "/:@ *") or not name.isascii():
                raise ConfigError(
                    f"--allowed-hosts {name!r} must be only a host name, such as label-box or label.example.org: no port, "
                    "no http://, no wildcard"
                )
        if self.host in EVERY_INTERFACE and not self.allowed_hosts:
            raise ConfigError(
                f"--host {self.host} listens at every interface and needs --allowed-hosts with this machine's names in "
                "people's browsers (such as label-box or its address): without them, any other site could reach the server "
                "through a labeller's browser under its own name (DNS rebinding)"
            )
        if self.public_url is not None:
            _check_url(self.public_url)
            object.__setattr__(self, "public_url", self.public_url.rstrip("/"))
        if not self.policy:
            refuse(self, "prompts", "answers", "buffer", because="belongs to --policy, which is not given")


@dataclass(frozen=True, kw_only=True)
class InviteConfig(Settings):
    """Print a sign-in link for a person, who is added if need be: heedful label invite PROJECT --name Ada. While the
    project is served, do that on its page People; --owner works always."""

    project: Path
    """Folder of the project."""
    name: str | None = None
    """The person's name. One who has it already gets a new link, and earlier sign-ins of theirs end."""
    owner: bool = False
    """Print a link for the project's owner in place of --name. It works once, within 15 minutes, also while the project is
    served. Signing in with it ends the owner's other sign-ins."""
    role: Literal["owner", "annotator", "viewer"] = "annotator"
    """owner: all pages, people, import and export. annotator: labels. viewer: statistics and rounds."""
    held_out: bool = False
    """Labels of this person are for evaluation only: they never go into training files."""
    url: str = "http://127.0.0.1:8765"
    """Where people reach the server: the beginning of the link."""

    POSITIONAL = ("project",)

    def check(self) -> None:
        super().check()
        if self.owner:
            refuse(self, "name", "role", "held_out", because="does not go with --owner; leave one of them out")
        elif self.name is None:
            raise ConfigError(
                "--name is missing: name the person for the link (or add --owner for the project's owner)"
            )
        if self.held_out and self.role != "annotator":
            raise ConfigError(f"--held-out is about annotators, and --role is {self.role}; leave one of them out")
        _check_url(self.url, "--url")
        object.__setattr__(self, "url", self.url.rstrip("/"))


def _check_url(url: str, name: str = "--public-url") -> None:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable, parts = False, urlsplit("")
    if not is_usable or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"{name} {url!r} must be an address without a path, such as https://label.example.org or http://127.0.0.1:8765"
        )
