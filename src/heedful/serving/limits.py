"""What the process that receives requests is told when it starts."""

import json
from dataclasses import asdict, dataclass

SPARE_FILES = 96
"""File descriptors that are not for connections: the interpreter's, and connections that are about to be closed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Whom the server answers, and how much it holds for them."""

    name: str
    """The model's name, for ``/health``."""
    hosts: tuple[str, ...]
    """Names, besides those of this machine's loopback, by which requests may call the server, in lower case."""
    any_address: bool
    """It listens at every address of the machine, so a request may call it by an address in digits, whichever it is."""
    token: str | None
    """What a request for scores must bring; None is no token."""
    workers: int
    """How many processes score."""
    max_request_bytes: int
    """The largest body of one request."""
    max_held_bytes: int
    """The most bytes of bodies at a time: being received, waiting and being scored."""
    max_queue: int
    """The most requests that wait while every worker scores one."""
    max_connections: int
    """The most connections at a time."""
    receive_seconds: float
    """The most seconds from the start of a connection, or from its last answer, to the end of a request, or to the end of
    sending an answer."""

    @property
    def files(self) -> int:
        """The most files that are open at a time."""
        return self.max_connections + self.workers + SPARE_FILES

    def to_json(self) -> bytes:
        """Write the settings on one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_json(line: bytes) -> "Limits":
        """Read what `to_json` wrote."""
        content = json.loads(line)
        return Limits(**(content | {"hosts": tuple(content["hosts"])}))
