"""Remove secrets from logs and records: passwords and tokens in URLs, in flags and in the environment."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

HIDDEN = "***"
"""The text that replaces a secret."""
NAMES = re.compile(
    r"(^|[-_.])(token|secret|password|passwd|pwd|passphrase|credentials?|authorization|bearer|api[-_]?key|key)$", re.I
)
"""Names of flags, keys and environment variables that hold a secret; ``max_new_tokens`` does not match."""
SIGNED = re.compile(r"^(sig|signature|auth|code)$", re.I)
"""Other names of secrets in the query of a URL."""
SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+|(?:gsk|r8|npm)_[A-Za-z0-9]{20,}|(?:xai|nvapi|pypi)-[\w-]{20,}"
    r"|ms-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22})|(?<=\bBearer )(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}"
)
"""Tokens recognised by their prefix: Hugging Face, OpenAI, GitHub, GitLab, Slack, Amazon, Google, JWT, Groq,
Replicate, npm, xAI, NVIDIA, PyPI, ModelScope; and the token after ``Bearer``."""
URL = re.compile(r"\b(judge:)?((?:https?:|[a-z][a-z0-9+.-]*://)[^\s'\"<>]+)", re.I)
"""A URL. The fragment of a judge's URL is its model and no secret."""
SHORTEST = 8
"""Minimal length of a secret in the environment, in characters; shorter values may be ordinary words."""


def redact(value: Any) -> Any:
    """Return a value without secrets: a string, or lists, tuples and mappings of them. Anything else is returned as it is.

    Removed: the user and password of a URL and every value in its query; tokens of a known form (``hf_...``); the values of
    environment variables such as ``HF_TOKEN``, anywhere; and the values of a mapping's keys such as ``api_key``. The names
    stay.
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


def redact_printed(text: str) -> str:
    """Return a text for the terminal without secrets. Unlike `redact`, it keeps the values in a URL's query whose names are
    harmless, because texts of models and data contain such URLs.
    """
    return _text(text, only_named=True)


def holds_secret(text: str) -> bool:
    """Whether a text to be published holds a token of a known form, a URL with a user or password, or the value of a secret
    environment variable. A query or a fragment alone is not a secret."""
    users = any("@" in re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0] for _, url in URL.findall(text))
    return users or SHAPES.search(text) is not None or any(secret in text for secret in _in_environment())


class WithoutSecrets:
    """A text stream that passes texts through `redact_printed` before it writes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without secrets."""
        self._stream.write(redact_printed(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts without secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def without_secrets_of(settings: Any) -> Callable[[str], str]:
    """Return a function that removes from a text the secrets that occur in a setting (by their form or the environment).

    For records of a run: they repeat settings such as ``--system-prompt``; everything else in them is data and is unchanged.

    Args:
        settings: a dataclass.
    """
    texts = [value for value in vars(settings).values() if isinstance(value, str)]
    found = {one.group() for text in texts for one in SHAPES.finditer(text)}
    found |= {one for one in _in_environment() if any(one in text for text in texts)}

    def hide(text: str) -> str:
        for secret in sorted(found, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    return hide


_command: list[str] = []


def remember_command(words: Sequence[str]) -> None:
    """Store the words that a user typed after ``heedful``, without secrets."""
    _command[:] = redacted_argv(words)


def command() -> list[str]:
    """The words stored by `remember_command`; empty if heedful was called from Python."""
    return list(_command)


def redacted_argv(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments without secrets: `redact`, and the values of flags such as ``--wandb-key``."""
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


def _text(text: str, *, only_named: bool = False) -> str:
    for secret in sorted(_in_environment(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return SHAPES.sub(HIDDEN, URL.sub(lambda found: _url(found, only_named), text))


def _in_environment() -> set[str]:
    names = [name for name in os.environ if NAMES.search(name) and name != "PWD"]  # which is the working folder
    return {value for value in map(os.environ.__getitem__, names) if len(value) >= SHORTEST}


def _url(found: re.Match[str], only_named: bool) -> str:
    judge, url = found[1] or "", found[2]
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL after all, such as http://[
        before, mark, _ = url.partition("?")
        return judge + before + (mark and f"?{HIDDEN}")
    _, at, host = parts.netloc.rpartition("@")
    netloc = f"{HIDDEN}@{host}" if at else host
    fragment = parts.fragment if judge else _values(parts.fragment, only_named)
    query = _values(parts.query, only_named)
    if not netloc and url[len(parts.scheme) :].startswith("://"):  # of which geturl makes sqlite:/x
        end = "".join(sign + text for sign, text in (("?", query), ("#", fragment)) if text)
        return f"{judge}{parts.scheme}://{parts.path}{end}"
    return judge + parts._replace(netloc=netloc, query=query, fragment=fragment).geturl()


def _values(query: str, only_named: bool) -> str:
    """A query with every value hidden, because any may be a secret, or only the values with a secret's name."""
    if not only_named:
        return re.sub(r"[^&=]+(?=&|$)", HIDDEN, query)
    pairs = (part.partition("=") for part in query.split("&"))
    return "&".join(
        f"{name}={HIDDEN}" if value and (NAMES.search(name) or SIGNED.search(name)) else name + equals + value
        for name, equals, value in pairs
    )
