"""What a verifier worker and its child processes speak over their standard pipes.

Each frame is 4 bytes of length and then msgpack. First the child is told what it is for, and answers with a
`Started`; then it answers each question, one at a time, until its input ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto.errors import RewardError, StrettoError, place_of
from stretto.user_code.child_process import last_line, run_child

__all__ = ["HEAD", "Pipes", "Started", "die_with_parent", "framed", "serve", "try_to_ask", "try_to_start"]

T = TypeVar("T")

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


def serve(
    make: Callable[[bytes], T],
    answer: Callable[[T, bytes], msgspec.Struct],
    failure: Callable[[str], msgspec.Struct],
    *,
    cannot: str,
    name: str,
) -> None:
    """Body of a child that has one piece of the user's code, and ends with its parent.

    Args:
        make: the user's code, from what the child was told.
        answer: the answer to a question.
        failure: the answer where that raised.
        cannot: what is said where it cannot be made.
        name: what it is called where it raises.
    """
    die_with_parent()
    pipes = Pipes()
    first = pipes.receive()
    if first is None:
        return
    try:
        made = make(first)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is told
        traceback.print_exc()
        pipes.send(Started(f"{cannot}: {error if isinstance(error, StrettoError) else place_of(error)}"))
        return
    pipes.send(Started())
    reasons: set[str] = set()
    while (data := pipes.receive()) is not None:
        try:
            pipes.send(answer(made, data))
        except RewardError as error:
            pipes.send(failure(str(error)))
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is told
            reason = place_of(error)
            if reason not in reasons:  # once in the verifier's output, with all frames
                reasons.add(reason)
                traceback.print_exc()
            pipes.send(failure(f"{name} raised {reason}"))


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
    return try_to_ask(argv, told, (), timeout_s, env=env, folder=folder)[0]


def try_to_ask(
    argv: Sequence[str],
    told: bytes,
    questions: Sequence[msgspec.Struct],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Started, list[bytes]]:
    """The same, with its answers to some questions; none, if it says why it cannot.

    Raises:
        TimeoutError: if it has not said all in time; it is killed.
    """
    asked = b"".join(map(framed, [told, *map(msgspec.msgpack.encode, questions)]))
    done = run_child(argv, asked, timeout_s, env=env, folder=folder)
    frames = list(_unframed(done.stdout))
    started = msgspec.msgpack.decode(frames[0], type=Started) if frames else None
    if started is None or (len(frames) <= len(questions) and not started.error):
        return Started(f"its process ended with status {done.returncode}: {last_line(done)}"), []
    return started, frames[1:]


def _unframed(data: bytes) -> Iterator[bytes]:
    """The contents of the whole frames."""
    while len(data) >= HEAD.size and len(data) >= (end := HEAD.size + HEAD.unpack(data[: HEAD.size])[0]):
        yield data[HEAD.size : end]
        data = data[end:]
