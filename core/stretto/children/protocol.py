"""The protocol between a verifier worker and its child processes, over the child's standard pipes.

Each frame is 4 bytes of length (big-endian), then msgpack. The first frame sets the child up, and the child
answers with `Started`. Then the child answers each question, one at a time, until its input ends.
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
    """The child is ready, or failed to start."""

    error: str = ""
    """Why the child failed to start; empty if it is ready."""
    data: bytes = b""
    """What the child reports at its start, such as the schemas of the tools."""


class Pipes:
    """The child's side. Standard input and output carry only frames: output of the user's code goes to
    stderr."""

    def __init__(self) -> None:
        self._read, self._write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123

    def receive(self) -> bytes | None:
        """Return the content of the next frame; None at the end of the input."""
        head = self._read.read(HEAD.size)
        return self._read.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message as one frame."""
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
    """Run a child that holds one piece of the user's code until its input or its parent ends.

    Args:
        make: makes the user's code from the first frame.
        answer: answers one question with the user's code.
        failure: makes the answer if `answer` raised; gets the reason.
        cannot: start of the error text if `make` raises.
        name: name of the user's code in the reason if `answer` raises.
    """
    die_with_parent()
    pipes = Pipes()
    first = pipes.receive()
    if first is None:
        return
    try:
        user_code = make(first)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; `Started` reports it
        traceback.print_exc()
        pipes.send(Started(f"{cannot}: {error if isinstance(error, StrettoError) else place_of(error)}"))
        return
    pipes.send(Started())
    reasons: set[str] = set()
    while (data := pipes.receive()) is not None:
        try:
            pipes.send(answer(user_code, data))
        except RewardError as error:
            pipes.send(failure(str(error)))
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the answer reports it
            reason = place_of(error)
            if reason not in reasons:  # print each traceback once to the verifier's output
                reasons.add(reason)
                traceback.print_exc()
            pipes.send(failure(f"{name} raised {reason}"))


def framed(data: bytes) -> bytes:
    """Return bytes as a frame."""
    return HEAD.pack(len(data)) + data


def die_with_parent() -> None:
    """End this process when its parent ends: hung code must not outlive a killed verifier. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit()


def try_to_start(
    argv: Sequence[str],
    setup: bytes,
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Started:
    """Start a child, return its `Started`, and let it end.

    Args:
        setup: the content of the child's first frame.

    Raises:
        TimeoutError: if the child does not end within `timeout_s`.
    """
    return try_to_ask(argv, setup, (), timeout_s, env=env, folder=folder)[0]


def try_to_ask(
    argv: Sequence[str],
    setup: bytes,
    questions: Sequence[msgspec.Struct],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Started, list[bytes]]:
    """Start a child, ask it some questions, and let it end. Return its `Started` and its answers. There
    are no answers if the child failed to start, or did not answer all questions.

    Raises:
        TimeoutError: if the child does not end within `timeout_s`; the child is then killed.
    """
    frames_in = b"".join(map(framed, [setup, *map(msgspec.msgpack.encode, questions)]))
    done = run_child(argv, frames_in, timeout_s, env=env, folder=folder)
    frames = list(_unframed(done.stdout))
    started = msgspec.msgpack.decode(frames[0], type=Started) if frames else None
    if started is None or (len(frames) <= len(questions) and not started.error):
        return Started(f"its process ended with status {done.returncode}: {last_line(done)}"), []
    return started, frames[1:]


def _unframed(data: bytes) -> Iterator[bytes]:
    """Yield the contents of the complete frames."""
    while len(data) >= HEAD.size and len(data) >= (end := HEAD.size + HEAD.unpack(data[: HEAD.size])[0]):
        yield data[HEAD.size : end]
        data = data[end:]
