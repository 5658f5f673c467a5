"""The address at which a server listens."""

import socket

from heedful.errors import ConfigError


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--port {port} of --host {host} cannot be listened at: {error.strerror}; choose another, or --port 0 for a "
            "free one"
        ) from error
    return listening
