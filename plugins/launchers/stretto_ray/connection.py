"""The kernel's end of the connection to the Ray client (see `stretto_ray.client`)."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from stretto.base.former_process import FormerProcess
from stretto.errors import LaunchError
from stretto_ray.messages import (
    ClientAnswer,
    Close,
    Describe,
    Ended,
    Event,
    Failed,
    Greeting,
    Request,
    Unconnected,
    WorkerStarted,
)
from stretto_ray.sockets import NAMES, connect

_CLOSE_S = 30.0
"""The client ends a cluster that it has started within some seconds."""
_POLL_S = 0.05
_ANSWER_S = 10.0
"""The client of a former kernel answers within this many seconds."""
_REMARK = 2000
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}

Listener = Callable[[WorkerStarted | Ended], None]


class Connection:
    """A connection to a client process, and a thread that reads what the client says. `close` ends them."""

    def __init__(
        self,
        greeting: Greeting,
        connected: socket.socket,
        process: subprocess.Popen[bytes] | FormerProcess,
        output: IO[bytes],
    ) -> None:
        """Greet the client.

        Args:
            output: file with what Ray prints.
        """
        # Numbers of a former kernel are below this, and a client may have workers of both.
        self._numbers = itertools.count(time.time_ns())
        self._lock = threading.Lock()
        self._answers: dict[int, Future[ClientAnswer]] = {}
        self._listeners: dict[int, Listener] = {}
        self._at = f" at {greeting.address}" if greeting.address else ""
        self._fault = ""
        """Why the client has ended; empty while it runs."""
        self._socket, self._process, self._output = connected, process, output
        self._begin = output.seek(0, os.SEEK_END)
        self._thread = threading.Thread(target=self._read, name="ray client", daemon=True)
        self._thread.start()
        self.tell(greeting)

    @classmethod
    def start(cls, greeting: Greeting, log: Path | None, folder: Path | None) -> Connection:
        """Start a client.

        Args:
            log: file for what Ray prints; None for a temporary one.
            folder: where the run's next kernel finds the client; None if there will be none.
        """
        output = _open(log)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "stretto_ray.client", str(theirs.fileno()), str(folder or "")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_QUIET},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the kernel
            )
        return cls(greeting, ours, process, output)

    @classmethod
    def adopt(cls, greeting: Greeting, log: Path | None, folder: Path) -> Connection | None:
        """Return a connection to the client of a former kernel that was killed. None if there is none that
        wants this greeting."""
        for path in folder.glob(NAMES):
            try:
                connected, pid = connect(path)
                process = FormerProcess(pid)
            except (OSError, psutil.NoSuchProcess):  # it was killed, too
                path.unlink(missing_ok=True)
                continue
            connection = cls(greeting, connected, process, _open(log))
            id = connection.number()
            try:
                connection.ask(id, Describe(id=id)).result(_ANSWER_S)
            except (LaunchError, TimeoutError):
                connection._leave()
            else:
                return connection
        return None

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
        with self._lock, suppress(OSError):  # its end is seen by the thread
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def listen(self, run: int, listener: Listener) -> None:
        """Call `listener`, in a thread, with each event about a worker, `Ended` last."""
        with self._lock:
            self._listeners[run] = listener

    def forget(self, run: int) -> None:
        """Call a listener no more."""
        with self._lock:
            self._listeners.pop(run, None)

    def close(self) -> None:
        """End the client, its actors, and a cluster that it has started."""
        self.tell(Close())
        deadline = time.monotonic() + _CLOSE_S
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            time.sleep(_POLL_S)
        self._leave()

    def _leave(self) -> None:
        with suppress(OSError):  # the client may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._output.close()

    def _read(self) -> None:
        error = ""
        with suppress(ConnectionError), self._socket.makefile("rb") as events:
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
                            listener = self._listeners.pop(event.run, None)
                        if listener is not None:  # else nobody has adopted the worker
                            listener(event)
                    case WorkerStarted():
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
        self._output.seek(self._begin)
        text = self._output.read()[-_REMARK:].decode(errors="replace").strip()
        return text or "Ray's client has ended"


def _open(log: Path | None) -> IO[bytes]:
    return log.open("a+b") if log else tempfile.TemporaryFile()
