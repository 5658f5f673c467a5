"""What a tracker has of a run, in ``tracking/NAME.json``: a run that goes on sends nothing twice and leaves nothing out."""

import contextlib
import json
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from heedful.files import write_json
from heedful.tracking.records import START, Place


@dataclass(frozen=True)
class Destination:
    """Where the points of a run go. If any of this is another, the tracker has none of them there."""

    run: str = ""
    """The run's own name (`identity_of`)."""
    address: str = ""
    """The server, store or folder, as `Client.destination` says it."""
    project: str = ""


@dataclass
class Progress:
    """What a tracker has at one destination. A file holds the last one that the run was sent to, and those before it."""

    to: Destination = field(default_factory=Destination)
    name: str = ""
    """Name of the run there."""
    known: str | None = None
    """What the tracker calls the run."""
    sent: Place = START
    where: str = ""
    later: str | None = None
    failures: int = 0
    complete: bool = False
    """True once the client has said that all has got out."""
    elsewhere: list[dict[str, Any]] = field(default_factory=list)
    """The same of the destinations before."""

    @classmethod
    def read(cls, path: Path) -> "Progress":
        """What a file says of the last destination; of a run that no process has followed, nothing."""
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return cls()

    @classmethod
    def at(cls, path: Path, to: Destination, name: str) -> "Progress":
        """What a file says of a destination, for a process that begins to feed it.

        Nothing is sent yet to one that the file does not know, nor if the file is that of another run, which was replaced.
        """
        last = cls.read(path)
        every = [last, *map(cls._of, last.elsewhere)] if last.to.run == to.run else []
        found = next((one for one in every if one.to == to), cls(to))
        others = [asdict(replace(one, elsewhere=[])) for one in every if one.to != to]
        return replace(found, name=name, failures=0, complete=False, elsewhere=others)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> "Progress":
        return cls(**{**content, "to": Destination(**content["to"]), "sent": Place(*content["sent"])})

    def write(self, path: Path) -> None:
        """Write the file; a full disk is no reason to send nothing."""
        with contextlib.suppress(OSError):
            write_json(path, asdict(self))


def identity_of(run: Path) -> str:
    """The name of a run's own that tells it from every other, 32 hexadecimal digits: that of its run.json.

    A run without one has a name that is made of its folder. Raises OSError if run.json is there and cannot be read.
    """
    try:
        return str(json.loads((run / "run.json").read_text(encoding="utf-8"))["run"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return uuid.uuid5(uuid.NAMESPACE_URL, run.resolve().as_uri()).hex
