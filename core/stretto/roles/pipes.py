"""What a verifier worker and its child processes speak over their standard pipes.

Each frame is 4 bytes of length and then msgpack. First the child is told what it is for, and answers with a
`Started`; then it answers each question, one at a time, until its input ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

__all__ = ["HEAD", "Pipes", "Started", "die_with_parent", "framed", "try_to_start"]

HEAD = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The child is ready, or why it cannot be."""

    error: str = ""
    data: bytes = b""
    """What it found at its start."""


class Pipes:
    """The child's side. Standard input and output are for frames alone: whatever the user's code prints goes
    where errors go."""

    def __init__(self) -> None:
        self._read, self._write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123

    def receive(self) -> bytes | None:
        """The next frame; None at the end."""
        head = self._read.read(HEAD.size)
        return self._read.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else None

    def send(self, message: msgspec.Struct) -> None:
        """One frame."""
        self._write.write(framed(msgspec.msgpack.encode(message)))
        self._write.flush()


def framed(data: bytes) -> bytes:
    """Bytes as a frame."""
    return HEAD.pack(len(data)) + data


def die_with_parent() -> None:
    """Code that hangs must not outlive a verifier that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit()


def try_to_start(
    argv: Sequence[str],
    told: bytes,
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Started:
    """Start a child only to see what it says; its input ends, and so does it.

    Raises:
        TimeoutError: if it says nothing in time.
    """
    try:
        done = subprocess.run(
            argv, input=framed(told), capture_output=True, timeout=timeout_s, check=False, env=env, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    if len(done.stdout) < HEAD.size:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Started(f"its process ended with status {done.returncode}: {last}")
    return msgspec.msgpack.decode(done.stdout[HEAD.size :], type=Started)
