"""The kernel process of a run that was started from Python: `python -m stretto.cli.start.child DESCRIPTOR`.

It is `stretto run` for a program: it reads a `RunRequest` from stdin, and reports the run's progress
through the pipe DESCRIPTOR, one JSON object on each line. The end of stdin ends the run as Ctrl-C ends
`stretto run`: the system closes stdin however the program ends. SIGTERM after that acts as the second Ctrl-C.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.errors import StrettoError
from stretto.runs.request import RunAccepted, RunMessage, RunNotice, RunRefused, RunRequest


def main(descriptor: int) -> int:
    """Run the requested run to its end, and return the exit status that `stretto run` would return."""
    os.umask(0o077)
    os.set_inheritable(descriptor, False)  # the reader sees the end of the pipe when this process ends
    for number in (signal.SIGINT, signal.SIGTERM):  # until the run sets its own handlers
        signal.signal(number, lambda number, frame: sys.exit(130))
    encode = msgspec.json.Encoder(enc_hook=repr).encode

    def send(message: RunMessage) -> None:
        try:
            os.write(descriptor, encode(message) + b"\n")
        except BrokenPipeError:  # the program has ended; the end of stdin ends the run, too
            return

    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=RunRequest)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        return _run(request, send)
    except StrettoError as error:
        facts = {key: getattr(error, key) for key in ("path", "value", "kind", "name") if hasattr(error, key)}
        send(RunRefused(type(error).__name__, str(error), **facts))
        return 1


def _run(request: RunRequest, send: Callable[[RunMessage], None]) -> int:
    from stretto.assembly.assembly import Assembly
    from stretto.assembly.compose import compose
    from stretto.cli.start.acceptance import accepted_start
    from stretto.runs.life import run_to_end

    assembly = Assembly(compose(Path(request.file), request.overrides, document=request.document))
    with accepted_start(assembly, lambda level, text: send(RunNotice(level, text))) as forks:
        send(RunAccepted(str(assembly.folder)))
        return run_to_end(assembly, forks)


def _end_with_stdin() -> None:
    while os.read(0, 1024):  # not sys.stdin: the interpreter would wait for its lock at exit
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
