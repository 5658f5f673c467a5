"""How processes of a server talk: a status and bytes, over a pair of sockets.

One side of a worker's channel waits for its socket, the other is an event loop. None means that the other process has ended.
"""

import asyncio
import socket
import struct

HEADER = struct.Struct("!HQ")
"""The status of an answer (0 for a request), and the number of bytes that follow."""
READY = 1
"""The status of the message that says that a process has all that it needs."""
FAILED = 2
"""The status of the message that says why it has not."""
WORKER = b"w"
"""What goes with the socket of a worker to the process that receives requests."""

Message = tuple[int, bytearray]


def send(channel: socket.socket, status: int, content: bytes | bytearray) -> bool:
    """Send a message; False if the other process has ended."""
    try:
        channel.sendall(HEADER.pack(status, len(content)))
        channel.sendall(content)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive(channel: socket.socket) -> Message | None:
    """Wait for a message."""
    header = _read(channel, HEADER.size)
    if header is None:
        return None
    status, size = HEADER.unpack(header)
    content = _read(channel, size)
    return None if content is None else (status, content)


async def exchange(channel: socket.socket, content: bytes | bytearray) -> Message | None:
    """Send a request and wait for its answer, in an event loop. The socket does not block."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(channel, HEADER.pack(0, len(content)))
        await loop.sock_sendall(channel, content)
        header = await _read_in_loop(loop, channel, HEADER.size)
        if header is None:
            return None
        status, size = HEADER.unpack(header)
        answer = await _read_in_loop(loop, channel, size)
    except (BrokenPipeError, ConnectionResetError):
        return None
    return None if answer is None else (status, answer)


def _read(channel: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    left = memoryview(content)
    while left:
        try:
            count = channel.recv_into(left)
        except ConnectionResetError:
            return None
        if not count:
            return None
        left = left[count:]
    return content


async def _read_in_loop(loop: asyncio.AbstractEventLoop, channel: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    left = memoryview(content)
    while left:
        count = await loop.sock_recv_into(channel, left)
        if not count:
            return None
        left = left[count:]
    return content
