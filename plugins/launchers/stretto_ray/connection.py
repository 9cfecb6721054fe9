"""The kernel's end of the connection to the Ray client (see `stretto_ray.client`)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from stretto.errors import LaunchError
from stretto_ray.messages import (
    ClientAnswer,
    Ended,
    Event,
    Failed,
    Greeting,
    Request,
    Unconnected,
    WorkerOutput,
    WorkerStarted,
)

_CLOSE_S = 30.0
"""The client ends a cluster that it has started within some seconds."""
_REMARK = 2000
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}

Listener = Callable[[WorkerStarted | WorkerOutput | Ended], None]


class Connection:
    """A client process, and a thread that reads what it says. `close` ends both."""

    def __init__(self, greeting: Greeting, log: Path | None) -> None:
        """Start the client.

        Args:
            log: file for what Ray prints; None for a temporary one.
        """
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[ClientAnswer]] = {}
        self._listeners: dict[int, Listener] = {}
        self._at = f" at {greeting.address}" if greeting.address else ""
        self._fault = ""
        """Why the client has ended; empty while it runs."""
        self._errors: IO[bytes] = log.open("a+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = self._errors.seek(0, os.SEEK_END)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stretto_ray.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_QUIET},
            start_new_session=True,  # Ctrl-C is for the kernel
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._thread = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="ray client", daemon=True
        )
        self._thread.start()
        self.tell(greeting)

    @property
    def runs(self) -> bool:
        """Whether the client is there."""
        return not self._fault

    def number(self) -> int:
        """Return a new number, for a request or the start of a worker."""
        return next(self._numbers)

    def ask(self, id: int, request: Request) -> Future[ClientAnswer]:
        """Send a request. Its answer, or the LaunchError with which it fails, is in the future."""
        answer: Future[ClientAnswer] = Future()
        with self._lock:
            if self._fault:
                answer.set_exception(LaunchError(self._fault))
                return answer
            self._answers[id] = answer
        self.tell(request)
        return answer

    def tell(self, message: Any) -> None:
        """Send a message that has no answer. A client that has ended gets nothing."""
        with self._lock, suppress(BrokenPipeError, ValueError):  # its end is seen by the thread
            self._requests.write(msgspec.json.encode(message) + b"\n")
            self._requests.flush()

    def listen(self, run: int, listener: Listener) -> None:
        """Call `listener`, in a thread, with each event about a worker, `Ended` last."""
        with self._lock:
            self._listeners[run] = listener

    def close(self) -> None:
        """End the client, its actors, and a cluster that it has started."""
        with suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._errors.close()

    def _read(self, events: IO[bytes]) -> None:
        error = ""
        with events:
            for line in events:
                event: Event = msgspec.json.decode(line, type=Event)
                match event:
                    case ClientAnswer():
                        self._answers.pop(event.id).set_result(event)
                    case Unconnected():
                        error = event.error
                    case Failed():
                        failure = LaunchError(event.error, worker=event.worker)
                        self._answers.pop(event.id).set_exception(failure)
                    case Ended():
                        with self._lock:
                            listener = self._listeners.pop(event.run)
                        listener(event)
                    case WorkerStarted() | WorkerOutput():
                        self._listeners[event.run](event)
        self._end(error)

    def _end(self, error: str) -> None:
        """The client has ended: everything that waits for it fails."""
        fault = f"no connection to the Ray cluster{self._at}: {error or self._last_words()}"
        with self._lock:
            self._fault = fault
            answers, listeners = [*self._answers.values()], dict(self._listeners)
            self._answers.clear()
            self._listeners.clear()
        for answer in answers:
            answer.set_exception(LaunchError(fault))
        for run, listener in listeners.items():
            listener(Ended(run=run, status=1, remark=fault))

    def _last_words(self) -> str:
        self._errors.seek(self._begin)
        text = self._errors.read()[-_REMARK:].decode(errors="replace").strip()
        return text or "Ray's client has ended"
