"""The protocol between a verifier worker and its child processes, over the child's standard pipes.

A frame is 4 bytes of length, 8 bytes with the question's number, both big-endian, and msgpack. The first
frame sets up the child. The child answers with `Started`, and then answers one question at a time until its
input ends. Numbers are random: code in the child cannot answer a later question.
"""

import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

import stretto.user_code.importable  # noqa: F401 # type: ignore[reportUnusedImport] - pools find modules by it
from stretto.errors import PolicyError, RewardError, StrettoError, place_of
from stretto.machine.child_process import last_line, run_child
from stretto.user_code.faults import SampleFault
from stretto.user_code.guard import end_with_parent

T = TypeVar("T")

HEAD = struct.Struct(">IQ")
"""Length of the content in bytes, and number of the question."""
MAX_FRAME = 64 * 2**20
"""Bytes of the largest content of a frame. Scores of a group and conversations have a few MiB at most."""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The child is ready, or failed to start."""

    error: str = ""
    """Why the child failed to start; empty if it is ready."""
    data: bytes = b""
    """What the child reports, such as the schemas of the tools."""


class Pipes:
    """The child's side. Its standard input and output carry only frames: users' output goes to stderr."""

    def __init__(self) -> None:
        self._read, self._write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
        self._number = 0

    def receive(self) -> bytes | None:
        """Return the content of the next frame; None at the end of the input."""
        head = self._read.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        size, self._number = HEAD.unpack(head)
        _check_size(size)
        return self._read.read(size)

    def send(self, message: msgspec.Struct) -> None:
        """Answer the latest frame."""
        self._write.write(framed(self._number, msgspec.msgpack.encode(message)))
        self._write.flush()


def serve(
    make: Callable[[bytes], T],
    answer: Callable[[T, bytes], msgspec.Struct],
    failure: Callable[[SampleFault], msgspec.Struct],
    *,
    cannot: str,
    name: str,
) -> None:
    """Run a child that holds one piece of the user's code until its input or its parent ends.

    `make` makes the user's code from the first frame; if it raises, the error begins with `cannot`. If
    `answer` raises, `failure` makes the answer from the fault, which calls the user's code `name`.
    """
    die_with_parent()
    pipes = Pipes()
    first = pipes.receive()
    if first is None:
        return
    try:
        user_code = make(first)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        traceback.print_exc()
        reason = str(error) if isinstance(error, StrettoError) else place_of(error)
        pipes.send(Started(f"{cannot}: {encodable(reason)}"))
        return
    pipes.send(Started())
    reasons: set[str] = set()
    while (data := pipes.receive()) is not None:
        try:
            pipes.send(answer(user_code, data))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            fault = SampleFault.of(error, name)
            if not isinstance(error, (RewardError, PolicyError)) and fault.error not in reasons:
                reasons.add(fault.error)  # print each traceback once to the verifier's output
                traceback.print_exc()
            pipes.send(failure(fault))


def framed(number: int, data: bytes) -> bytes:
    _check_size(len(data))
    return HEAD.pack(len(data), number) + data


def _check_size(size: int) -> None:
    if size > MAX_FRAME:
        raise ValueError(f"a frame has {size} bytes; at most {MAX_FRAME} are allowed")


def encodable(text: str) -> str:
    """Return text without lone surrogates, which UTF-8 and so msgpack cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def die_with_parent() -> None:
    """End this process when its parent ends: hung code must not outlive a killed verifier."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit()


def try_to_ask(
    argv: Sequence[str],
    setup: bytes,
    questions: Sequence[msgspec.Struct],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Started, list[bytes]]:
    """Run a child with these frames. Return `Started` and all answers, or no answers if the child fails to
    start or to answer all questions. After `timeout_s`, kill the child and raise TimeoutError."""
    contents = [setup, *map(msgspec.msgpack.encode, questions)]
    frames_in = b"".join(framed(number, content) for number, content in enumerate(contents))
    process = run_child(argv, frames_in, timeout_s, env=env, folder=folder)
    frames = list(unframed(process.stdout))
    started = msgspec.msgpack.decode(frames[0], type=Started) if frames else None
    if started is None or (len(frames) <= len(questions) and not started.error):
        text = f"its process ended with status {process.returncode}"
        return Started(": ".join(filter(None, (text, last_line(process.stderr))))), []
    return started, frames[1:]


def unframed(data: bytes, expected: int = 0) -> Iterator[bytes]:
    """Yield the contents of the complete frames whose numbers count up from `expected`."""
    start = 0
    while len(data) >= start + HEAD.size:
        size, number = HEAD.unpack_from(data, start)
        start += HEAD.size + size
        if len(data) < start or number != expected:
            return
        yield data[start - size : start]
        expected += 1
