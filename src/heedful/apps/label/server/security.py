"""Checks before a request's body is read: host and origin, session, CSRF token.

Nothing here knows about labelling. The store compares tokens as hashes; comparisons here take constant time.
"""

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from heedful.display import say
from heedful.files import private_opener
from heedful.hosts import Refusal, host_refusal

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Headers of every answer; static files set their own cache time."""
MOST_KEYS = 10_000
"""Most sessions or addresses in a rate limit; beyond it the least recently used are forgotten."""


@dataclass(frozen=True)
class Access:
    """The names of the server and its session cookie."""

    hosts: tuple[str, ...]
    """Host names, besides those of this machine's loopback, in lower case."""
    public_url: str | None
    """Public address at a reverse proxy, such as https://label.example.org; None without one."""
    cookie: str
    """Name of the session cookie: one per project, because a browser sends a host's cookies to all ports."""
    any_address: bool = False
    """Always False here: a numeric address must be listed like any other name."""

    @property
    def is_encrypted(self) -> bool:
        """Browsers reach it by https only."""
        return (self.public_url or "").startswith("https://")

    def set_cookie(self, session: str, seconds: int) -> str:
        """The Set-Cookie header of a session; 0 seconds removes the cookie."""
        secure = "; Secure" if self.is_encrypted else ""
        return f"{self.cookie}={session}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def access_of(folder: Path, host: str, allowed_hosts: tuple[str, ...], public_url: str | None) -> Access:
    """Return the access to a project's server. An address such as 0.0.0.0 adds no name."""
    names = [name.lower().strip("[]") for name in (host, *allowed_hosts)]
    public = [] if public_url is None else [urlsplit(public_url).hostname or ""]
    hosts = tuple(name for name in (*names, *public) if name not in ("0.0.0.0", "::"))
    mark = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return Access(hosts=hosts, public_url=public_url, cookie=f"heedful_session_{mark}")


def page_refusal(headers: Mapping[str, str], access: Access) -> Refusal | None:
    """Refuse a request with an unknown Host, or from a page of another site."""
    if headers.get("host") is None:
        return 400, "the request has no Host header"
    refusal = host_refusal(headers, access)
    if refusal is None and access.is_encrypted and headers.get("origin", "https:").lower().startswith("http:"):
        return 403, "this server accepts https only, and the request comes from a page without it"
    return refusal


def post_refusal(headers: Mapping[str, str]) -> Refusal | None:
    """Refuse a POST that a form of another site could send: only our scripts send JSON from our origin."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return 403, "requests from pages of other sites are refused"
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        return 415, f"the Content-Type must be application/json, got {kind[:80]!r}"
    return None


def csrf_token(session: str) -> str:
    """The token that a session's pages send with each POST; it does not reveal the session's token."""
    return hmac.new(session.encode(), b"heedful csrf", hashlib.sha256).hexdigest()


def csrf_refusal(headers: Mapping[str, str], session: str) -> Refusal | None:
    """Refuse a POST without the CSRF token of its session."""
    given = headers.get("x-csrf-token", "")
    if hmac.compare_digest(given.encode(), csrf_token(session).encode()):
        return None
    wrong = "with another one" if given else "without it"
    return 403, f"the header X-CSRF-Token must hold the token of /api/me, and the request came {wrong}; reload the page"


def client_address(headers: Mapping[str, str], peer: str, access: Access) -> str:
    """The client's address, for rate limits and the audit: as seen by a reverse proxy on this machine, or the peer's.

    Only the last part of ``X-Forwarded-For`` is used, which the proxy added, and only with a public URL.
    """
    forwarded = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    try:
        if access.public_url is not None and forwarded and ip_address(peer).is_loopback:
            return str(ip_address(forwarded))
    except ValueError:
        pass
    return peer


class RateLimit:
    """A token bucket per key: a rate of requests, and a burst.

    Args:
        per_second: refill rate of a key's allowance.
        burst: the most that the allowance holds.
    """

    def __init__(self, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = burst
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}
        """Allowance of each key and its time; the least recently used key is first."""

    def seconds_to_wait(self, key: str, *, take: bool = True) -> float:
        """Take one request from a key's allowance, or only look; returns 0, or the seconds until one is free."""
        now = time.monotonic()
        with self._lock:
            left, then = self._left.pop(key, (self.burst, now))
            left = min(self.burst, left + (now - then) * self.per_second)
            is_allowed = left >= 1
            self._left[key] = (left - 1 if is_allowed and take else left, now)
            while len(self._left) > MOST_KEYS:
                del self._left[next(iter(self._left))]
        return 0.0 if is_allowed else (1 - left) / self.per_second


class Audit:
    """Log of sign-ins, their addresses and owners' actions: JSON lines in PROJECT/audit.jsonl. No tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def note(self, what: str, *, person: str | None, address: str, **more: str) -> None:
        """Write a line. A full disk is reported on standard error and locks nobody out."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "what": what, "person": person, "address": address, **more}, ensure_ascii=False)
        try:
            with self._lock, open(self.path, "a", encoding="utf-8", newline="\n", opener=private_opener) as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"{self.path} could not be written ({error.strerror}); lost: {line}")
