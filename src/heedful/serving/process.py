"""The process that receives requests, as the one that started it sees it."""

import contextlib
import socket
import subprocess
import sys
from types import TracebackType

from heedful.serving.channel import READY, WORKER, receive
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
        self.control, self._theirs = socket.socketpair()

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
            raise self.died() from None
        message = receive(self.control)
        if message is None or message[0] != READY:
            raise self.died()

    def add(self, channel: socket.socket) -> None:
        """Give it a worker: the socket at whose other end a process takes requests. It is closed here.

        If the process that receives requests has died, its control socket says so.
        """
        with channel, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [WORKER], [channel.fileno()])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                with contextlib.suppress(BrokenPipeError):  # it has ended, and what it was to read is still here
                    self.process.stdin.close()
                self.process.wait(END_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.control.close()

    def died(self) -> OSError:
        """Return the error that says so, when its control socket has no other end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        return OSError(f"the process that receives requests has ended by itself, with status {self.process.returncode}")
