"""The socket in a run's folder on which a Ray client waits for the run's next kernel. Needs no Ray."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NAMES = "ray-*.sock"
"""Each client has its own: one that no kernel uses any more may still wait for the end of its workers."""


@contextmanager
def listening_socket(folder: Path) -> Generator[socket.socket]:
    """Yield a socket that listens in a folder, and remove it at the end. Only the user can connect to it."""
    path = folder / NAMES.replace("*", secrets.token_hex(4))
    with socket.socket(socket.AF_UNIX) as listening:
        with _short(path) as address:
            listening.bind(address)
        path.chmod(0o600)
        listening.listen()
        try:
            yield listening
        finally:
            path.unlink(missing_ok=True)


def connect(path: Path) -> tuple[socket.socket, int]:
    """Return a connection to the process that listens on a socket, and its id.

    Raises:
        OSError: if no process listens.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as address:
            connected.connect(address)
    except OSError:
        connected.close()
        raise
    pid, _, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return connected, pid


@contextmanager
def _short(path: Path) -> Generator[str]:
    """Yield another name of a path: the address of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
