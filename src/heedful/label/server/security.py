"""What a request must have before its body is read: this server's name and origin, a session, a CSRF token.

Nothing here knows what is labelled. The store compares tokens as hashes; what is compared here is compared in constant time.
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
from heedful.serving.guard import Refusal, host_refusal

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
"""What every answer has; static files say themselves how long they may be kept."""
MOST_KEYS = 10_000
"""How many sessions or addresses a rate limit remembers; beyond it those that have asked least recently are forgotten."""


@dataclass(frozen=True)
class Access:
    """By which names the server may be called, and how its sessions are kept."""

    hosts: tuple[str, ...]
    """Host names, besides those of this machine's loopback, in lower case."""
    public_url: str | None
    """Where a reverse proxy serves it, such as https://label.example.org; None if there is none."""
    cookie: str
    """The name of the session's cookie: one per project, because a browser sends a host's cookies to all of its ports."""
    any_address: bool = False
    """Never true here: an address in digits has to be named like every other, so that only what was meant is answered."""

    @property
    def is_encrypted(self) -> bool:
        """Browsers reach it by https only."""
        return (self.public_url or "").startswith("https://")

    def set_cookie(self, session: str, seconds: int) -> str:
        """The header that gives a browser its session; 0 seconds takes it away."""
        secure = "; Secure" if self.is_encrypted else ""
        return f"{self.cookie}={session}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def access_of(folder: Path, host: str, allowed_hosts: tuple[str, ...], public_url: str | None) -> Access:
    """Return the access to a project's server. An address of all interfaces is the name of none of them."""
    names = [name.lower().strip("[]") for name in (host, *allowed_hosts)]
    public = [] if public_url is None else [urlsplit(public_url).hostname or ""]
    hosts = tuple(name for name in (*names, *public) if name not in ("0.0.0.0", "::"))
    mark = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return Access(hosts=hosts, public_url=public_url, cookie=f"heedful_session_{mark}")


def page_refusal(headers: Mapping[str, str], access: Access) -> Refusal | None:
    """Refuse a request that calls the server by a name that is not its own, or that comes from another site's page."""
    if headers.get("host") is None:
        return 400, "the request has no Host header"
    refusal = host_refusal(headers, access)
    if refusal is None and access.is_encrypted and headers.get("origin", "https:").lower().startswith("http:"):
        return 403, "this server is reached by https only, and the request comes from a page that was not"
    return refusal


def post_refusal(headers: Mapping[str, str]) -> Refusal | None:
    """Refuse a POST that a form of another site could send: only scripts of our own pages send JSON from our origin."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return 403, "requests of web pages from elsewhere are refused"
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        return 415, f"the Content-Type must be application/json, got {kind[:80]!r}"
    return None


def csrf_token(session: str) -> str:
    """The token that a session's pages send with each POST; it says nothing about the session's own token."""
    return hmac.new(session.encode(), b"heedful csrf", hashlib.sha256).hexdigest()


def csrf_refusal(headers: Mapping[str, str], session: str) -> Refusal | None:
    """Refuse a POST without the CSRF token of its session."""
    given = headers.get("x-csrf-token", "")
    if hmac.compare_digest(given.encode(), csrf_token(session).encode()):
        return None
    wrong = "with another one" if given else "without it"
    return 403, f"the header X-CSRF-Token must hold the token of /api/me, and the request came {wrong}; reload the page"


def client_address(headers: Mapping[str, str], peer: str, access: Access) -> str:
    """Who asks, for rate limits and the audit: the address that a reverse proxy on this machine has seen, or the peer's.

    Of ``X-Forwarded-For`` only the last part counts, which the proxy itself has added, and only with a public URL.
    """
    forwarded = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    try:
        if access.public_url is not None and forwarded and ip_address(peer).is_loopback:
            return str(ip_address(forwarded))
    except ValueError:
        pass
    return peer


class RateLimit:
    """So many requests per second and key, and some at once (a token bucket).

    Args:
        per_second: how fast a key's allowance grows back.
        burst: the most that it holds.
    """

    def __init__(self, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = burst
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}
        """What is left for a key, and when that was so; the key that has asked least recently is first."""

    def seconds_to_wait(self, key: str, *, take: bool = True) -> float:
        """Take one request from a key's allowance, or only look; 0 if there was one, else the seconds until there is."""
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
    """Who signed in, from where, and what owners did with people: a line of JSON each, in PROJECT/audit.jsonl. No tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def note(self, what: str, *, person: str | None, address: str, **more: str) -> None:
        """Write a line. A disk that is full is said on standard error: nobody is kept out by it."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "what": what, "person": person, "address": address, **more}, ensure_ascii=False)
        try:
            with self._lock, open(self.path, "a", encoding="utf-8", newline="\n", opener=private_opener) as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"{self.path} could not be written ({error.strerror}); lost: {line}")
