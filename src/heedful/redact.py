"""Take secrets out of what is written down: passwords and tokens in URLs, in flags, and those of the environment."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
"""What stands in the place of a secret."""
NAMES = re.compile(
    r"(^|[-_.])(token|secret|password|passwd|pwd|passphrase|credentials?|authorization|bearer|api[-_]?key|key)$", re.I
)
"""Names of flags, keys and environment variables that hold a secret. ``max_new_tokens`` is none."""
SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
"""Tokens that are known by their beginning: Hugging Face, OpenAI, GitHub, GitLab, Slack, Amazon, Google, JWT."""
URL = re.compile(r"\b(judge:)?((?:https?:|[a-z][a-z0-9+.-]*://)[^\s'\"<>]+)", re.I)
"""A URL; that of a judge has its model as fragment, which is no secret."""
SHORTEST = 8
"""Characters of the shortest value in the environment that is taken for a secret; shorter ones are words."""


def redact(value: Any) -> Any:
    """Return a value without secrets: a string, or lists, tuples and mappings of them. Anything else is returned as it is.

    What goes: the user and password of a URL and every value in its query; tokens known by their shape (``hf_...``); what
    environment variables such as ``HF_TOKEN`` hold, wherever it stands; and what a mapping has under a name such as
    ``api_key``. The names stay, so that it can be seen what was there.
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Path):
        return type(value)(_text(str(value)))
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key, item) else redact(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(redact(item) for item in value)
    return value


def holds_secret(text: str) -> bool:
    """Whether a text that is to be published holds a token of a known shape, a URL with a user or password, or what a secret
    variable of the environment holds. A query or a fragment by itself is none."""
    users = any("@" in re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0] for _, url in URL.findall(text))
    return users or SHAPES.search(text) is not None or any(secret in text for secret in _in_environment())


_command: list[str] = []


def remember_command(words: Sequence[str]) -> None:
    """Take down, without secrets, what a user typed after ``heedful``."""
    _command[:] = redacted_argv(words)


def command() -> list[str]:
    """What `remember_command` took down; nothing if heedful was called from Python, whose arguments are not heedful's."""
    return list(_command)


def redacted_argv(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments without secrets: `redact`, and what follows flags such as ``--wandb-key``."""
    kept: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            hides_next = not equals and NAMES.search(name.lstrip("-")) is not None
            secret = bool(equals) and _is_secret(name.lstrip("-"), value)
            kept.append(f"{name}={HIDDEN}" if secret else _text(argument))
        elif equals and _is_secret(name, value):  # NAME=VALUE
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(HIDDEN if hides_next else _text(argument))
            hides_next = False
    return kept


def _is_secret(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, str) and value != "" and NAMES.search(name) is not None


def _text(text: str) -> str:
    for secret in sorted(_in_environment(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return SHAPES.sub(HIDDEN, URL.sub(_url, text))


def _in_environment() -> set[str]:
    names = [name for name in os.environ if NAMES.search(name) and name != "PWD"]  # which is the working folder
    return {value for value in map(os.environ.__getitem__, names) if len(value) >= SHORTEST}


def _url(found: re.Match[str]) -> str:
    judge, url = found[1] or "", found[2]
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL after all, such as http://[
        before, mark, _ = url.partition("?")
        return judge + before + (mark and f"?{HIDDEN}")
    _, at, host = parts.netloc.rpartition("@")
    netloc = f"{HIDDEN}@{host}" if at else host
    fragment = parts.fragment if judge else _values(parts.fragment)
    query = _values(parts.query)
    if not netloc and url[len(parts.scheme) :].startswith("://"):  # of which geturl makes sqlite:/x
        end = "".join(sign + text for sign, text in (("?", query), ("#", fragment)) if text)
        return f"{judge}{parts.scheme}://{parts.path}{end}"
    return judge + parts._replace(netloc=netloc, query=query, fragment=fragment).geturl()


def _values(query: str) -> str:
    """A query with every value hidden, as any of them may be the secret."""
    return re.sub(r"[^&=]+(?=&|$)", HIDDEN, query)
