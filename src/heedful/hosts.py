"""Host names that a server accepts, so that pages of other sites cannot reach it."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
"""A valid Host header: a name or an address, and a port."""
Refusal = tuple[int, str]
"""The status and the message of an answer that refuses a request."""


class OwnNames(Protocol):
    """Names of a server, besides those of this machine's loopback."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, in lower case."""

    @property
    def any_address(self) -> bool:
        """Accept any numeric address."""


def host_refusal(headers: Mapping[str, str], own: OwnNames) -> Refusal | None:
    """Refuse a request with an unknown Host, or made by a page of another web site.

    A foreign page can reach a server on this machine if its site's name resolves to this machine (DNS rebinding). Its
    requests then have that name as their Host. All other requests of foreign pages have an Origin.
    """
    host = headers.get("host")
    if host is None:  # HTTP/1.0, which browsers do not use
        return None
    name = _name(f"//{host}") if HOST.fullmatch(host) else None  # no user@: allowed in URLs, not in Host
    if not _is_own(name, own):
        return 421, (
            f"this server does not accept the host {host[:80]!r}: use the address given as --host, or "
            "start it with --allowed-hosts and this name"
        )
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        return 403, f"requests from pages of other sites are refused; the Origin is {origin[:80]!r}"
    return None


def is_loopback(name: str) -> bool:
    """Whether a host name can only mean this machine."""
    return name == "localhost" or name.endswith(".localhost") or (_is_address(name) and ip_address(name).is_loopback)


def _is_own(name: str | None, own: OwnNames) -> bool:
    if name is None:
        return False
    return is_loopback(name) or name in own.hosts or (own.any_address and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _name(url: str) -> str | None:
    """Return the host name in a URL, in lower case, without port and brackets."""
    try:
        name = urlsplit(url).hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def _netloc(origin: str) -> str | None:
    """Return host and port of an Origin, in lower case; None for one that has none, such as ``null``."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() or None
