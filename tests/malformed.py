"""Requests that are none, for every server of heedful: each is answered with 4xx or by closing the connection."""

import contextlib
import socket

HEAD = b"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BOTH = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
MALFORMED = {
    "the issue's chunk": CHUNKED + b"ZZZ",
    "a bad chunk with a line": CHUNKED + b"ZZZ\r\n\r\n",
    "a good chunk and a bad one": CHUNKED + b"2\r\n{}\r\nZZZ\r\n",
    "a chunk that is longer than it says": CHUNKED + b"2\r\n{}{}{}\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-1\r\n{}\r\n",
    "a huge chunk": CHUNKED + b"f" * 30 + b"\r\n{}",
    "bad trailers": CHUNKED + b"2\r\n{}\r\n0\r\n: :\x00\r\n\r\n",
    "both lengths": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "both lengths, turned round": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "both lengths, with a request inside": HEAD + BOTH % (5 + len(GET)) + b"0\r\n\r\n" + GET,
    "both lengths, with a request behind chunks": HEAD + BOTH % 2 + b"2\r\n{}\r\n0\r\n\r\n" + GET,
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"2\r\n{}\r\n0\r\n\r\n",
    "another encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\nx",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": HEAD + b"Content-Length: -2\r\n\r\n{}",
    "a length in letters": HEAD + b"Content-Length: two\r\n\r\n{}",
    "a length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a length of many digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "no request": b"\r\n\r\n\r\nhello\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "any bytes": bytes(range(256)) * 4 + b"\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n",
    "a host that is no name": b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "a host in Latin-1": b"GET / HTTP/1.1\r\nHost: \xe4\xb8\xad.de\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nnonsense\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n",
    "a header with NUL": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
    "a header's name with a blank": b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    "a huge header": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 300_000 + b"\r\n\r\n",
    "thousands of headers": b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 30_000 + b"\r\n",
    "a huge path": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a path that is no UTF-8": b"GET /%ff%fe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a path with raw bytes": b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a whole address as a path": b"GET http://[::1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a tunnel": b"CONNECT evil:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nhello",
    "an upgrade": b"GET / HTTP/1.1\r\nHost: evil\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhello",
    "a body that is no UTF-8": HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe\x00{",
    "a body that is compressed": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    "garbage behind a request": b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n\x00\xff garbage\r\n\r\n",
    "garbage behind a body": HEAD + b"Content-Length: 2\r\n\r\n{}ZZZ\r\n\r\n",
    "an early end in the head": HEAD,
    "an early end in the body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "an early end in a chunk": CHUNKED + b"64\r\n{",
    "nothing": b"",
}  # fmt: skip


def send(port, request, path, *, resets=False):
    """What a server answers before it closes the connection, or says nothing for a while.

    ``resets``: the connection is reset at once, and nothing is read.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        client.sendall(request.replace(b"{path}", path.encode()))
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            return b""
        received = b""
        try:
            with contextlib.suppress(OSError):  # the server has answered and closed already
                client.shutdown(socket.SHUT_WR)
            while piece := client.recv(2**16):
                received += piece
        except ConnectionError:
            pass
    return received


def statuses(received):
    """The status of each answer."""
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]
