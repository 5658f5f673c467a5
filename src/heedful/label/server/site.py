"""What every handler works with: the project, the access, the chats, the policy's worker, the pages."""

from dataclasses import dataclass

from heedful.label.project import Project
from heedful.label.server.buffer import Buffer
from heedful.label.server.chat import Turns
from heedful.label.server.closing import Closing
from heedful.label.server.security import Access, Audit
from heedful.label.server.worker import PolicyWorker


@dataclass(frozen=True)
class Site:
    """A project, as it is served."""

    project: Project
    access: Access
    audit: Audit
    turns: Turns
    """Answers of chats that wait for a choice."""
    worker: PolicyWorker | None
    """The process that writes answers; None if the project has only imported ones."""
    buffer: Buffer | None
    """What keeps items ready for it."""
    closing: Closing | None = None
    """What ends the server once everything is labelled; None if it serves until somebody ends it."""
