"""Finds the admin socket of a state file, and connects to it however long the path is.

docs/adr/0116-the-admin-socket.md. This module must not create a socket.
"""

import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Longer addresses of Unix sockets do not fit `sockaddr_un` everywhere.
_ADDRESS_BYTES_MAX = 100
_ANSWER_SECONDS_MAX = 30.0


def admin_path(state_path: Path) -> Path:
    """Return the socket beside a state file."""
    return state_path.with_name(state_path.name + ".admin")


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Give an address that fits, valid while the context lasts. Raises OSError when there is no such folder."""
    if len(os.fsencode(path)) <= _ADDRESS_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class AdminConnection(http.client.HTTPConnection):
    """HTTP over the socket of a state file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS_MAX)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket. Raises OSError when no process listens."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with socket_address(self._path) as address:
            self.sock.connect(address)
