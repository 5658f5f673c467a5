"""The process that receives requests, as the process that scores them sees it."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

from heedful.serving.channel import READY, receive, send
from heedful.serving.limits import Limits

END_SECONDS = 3.0
"""How long the process has to end by itself."""


class FrontProcess:
    """A process that receives requests at a socket, checks and queues them; used as a context.

    It has a process group of its own, so Ctrl-C in a terminal does not reach it. It ends with the context, and with the
    process that made it, however that one ends.

    Args:
        listening: a bound socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.channel, self._theirs = socket.socketpair()

    def __enter__(self) -> "FrontProcess":
        descriptors = (self._theirs.fileno(), self.listening.fileno())
        code = f"import sys; sys.path[:] = {sys.path!r}; from heedful.serving.front import main; main{descriptors}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            process_group=0,
        )
        self._theirs.close()
        return self

    def open(self, limits: Limits) -> None:
        """Let it receive requests. Raises OSError if it cannot."""
        self.listening.listen()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(limits.to_json())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        message = receive(self.channel)
        if message is None or message[0] != READY:
            raise self._died()

    def requests(self) -> Iterator[bytearray]:
        """Yield the bodies of requests, one at a time; each must be answered before the next. Raises OSError if it dies."""
        while (message := receive(self.channel)) is not None:
            yield message[1]
        raise self._died()

    def answer(self, status: int, content: bytes) -> None:
        """Answer the latest request. If nobody is there any more, `requests` says so."""
        send(self.channel, status, content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.channel.close()

    def _died(self) -> OSError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        return OSError(f"the process that receives requests has ended by itself, with status {self.process.returncode}")
