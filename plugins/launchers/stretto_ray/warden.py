"""`python warden.py PROGRAM ARGUMENT ...`: start a worker for its actor, and end it when the actor is gone.

Ray kills the processes of a node, of a job, and the children of an actor in its own ways; a worker's children
would then continue. So this process, which is no child of the actor any more, is the parent of the worker. It
needs nothing but Python's own library, because it starts for every worker.

It reads its standard input: eight bytes with the size of the worker's standard input, this text, and then a
byte for each signal to send. SIGKILL goes to all processes of the worker's session, and at the end of the
input, all of them are killed. Standard output gets one line of JSON when the worker has started
(`{"pid": 12}`) or cannot (`{"error": "..."}`), and one when it has ended (`{"status": 0}`). Standard error is
the output of the worker.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

_CONTROL, _REPORT, _OUTPUT = 0, 1, 2
_SIZE = 8


def main() -> None:
    """Body of the process."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT in its processes
    try:
        worker = subprocess.Popen(
            sys.argv[1:], stdin=_text_file(), stdout=_OUTPUT, stderr=_OUTPUT, start_new_session=True
        )
    except (OSError, EOFError) as error:
        _report({"error": str(error)})
        return
    os.close(_OUTPUT)
    _report({"pid": worker.pid})
    _serve(worker.pid)
    _kill_session(worker.pid)  # before its id is free for another process
    _report({"status": worker.wait()})


def _text_file() -> int:
    """Return a file in memory with the worker's standard input."""
    size = int.from_bytes(_read(_SIZE), "big")
    file = os.memfd_create("stdin")
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(_read(size))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(_CONTROL, size - len(data))
        if not part:
            raise EOFError("the actor is gone")
        data += part
    return data


def _serve(pid: int) -> None:
    """Send signals until the worker has ended, or the actor is gone."""
    process = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        for file in (process, _CONTROL):
            selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            if process in ready:
                return
            numbers = os.read(_CONTROL, 64)
            if not numbers:
                return
            for number in numbers:
                if number == signal.SIGKILL:
                    _kill_session(pid)
                else:
                    os.kill(pid, number)  # a process that has ended takes it until `wait`


def _kill_session(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _report(fact: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        os.write(_REPORT, json.dumps(fact).encode() + b"\n")


if __name__ == "__main__":
    main()
