"""The kernel's side of the fork server, which starts processes without repeated imports.

A process of a run spends most of its start on imports: half a second of processor time without torch, several
seconds with it. The fork server (`stretto.kernel.fleet.fork_server`) imports once and forks the processes.
Libraries read the environment when they are loaded, so only a process with exactly the server's environment
is forked. The kernel waits for the processes as for every other child.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from signal import Signals

import anyio
import structlog

from stretto.assembly.assembly import Assembly
from stretto.launcher import UNKNOWN_STATUS, Resources, process_environment
from stretto.user_code.guard import adopt_orphans

log = structlog.get_logger()

_SERVER = "stretto.kernel.fleet.fork_server"
_PACKET = 2**16
_MODULES = ("stretto.workers.worker",)
"""Modules that all workers need. The sample writer's are not here: pyarrow starts a thread."""
_ANSWER_S = 120.0
"""The server answers within this many seconds, imports from a cold disk included; otherwise it hangs."""
_KILLED_S = 5.0
"""Wait this many seconds for a killed server to end. It may hang in the system, where no signal ends it."""


class ForkedProcess:
    """A process that the fork server has started. It is a child of this process, and outlives the server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._status: int | None = None
        self._ended = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._end)

    async def wait(self) -> int:
        """Wait for the end, and return the exit status, negative for a signal."""
        await self._ended.wait()
        assert self._status is not None
        return self._status

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self._status

    def send_signal(self, signal: Signals) -> None:
        """Send a signal. Do nothing if the process has ended."""
        if self._status is None:
            os.kill(self.pid, signal)

    def terminate(self) -> None:
        self.send_signal(Signals.SIGTERM)

    def kill(self) -> None:
        self.send_signal(Signals.SIGKILL)

    def _end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the system made it a child of another process
            self._status = UNKNOWN_STATUS
        self._ended.set()


@contextmanager
def fork_server(assembly: Assembly) -> Generator[ForkServer | None]:
    """Yield a fork server that imports the workers' modules; None except on Linux with pidfds. The imports
    are the longest part of a start, so enter this as soon as the run file is read, before the checks."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        yield None
        return
    server = ForkServer(assembly.folder)
    try:
        with suppress(Exception):  # the run's checks report the errors of plugins
            forkable = [each for each in assembly.workers if server.suits(each.resources)]
            server.prepare([module for each in forkable for module in assembly.imports_of(each)])
        yield server
    finally:
        server.close()


class ForkServer:
    """A running fork server, until `close`; it imports `modules` first. `ps` shows the run's folder."""

    def __init__(self, folder: Path, modules: Sequence[str] = _MODULES) -> None:
        self._env = process_environment(Resources(), ())
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - until `close`; the server appends
        self._ids = count()
        self._answers: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_open = True
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", _SERVER, str(folder), str(theirs.fileno())]
        with theirs:
            self._server = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=self._env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def keep_output(self, file: Path) -> None:
        """Append the past and future output of the imports to a file."""
        with file.open("ab") as output:
            self._output.seek(0)
            shutil.copyfileobj(self._output, output)
            self._output.truncate(0)  # a later kernel of the run calls this again
            with suppress(ConnectionError):  # it has ended, which `fork` finds and logs
                socket.send_fds(self._socket, [json.dumps({"output": True}).encode()], [output.fileno()])

    def prepare(self, modules: Sequence[str]) -> None:
        """Ask the server to import modules now, for processes that are forked later."""
        with suppress(OSError):  # it has ended, which `fork` finds and logs
            self._socket.send(json.dumps({"import": list(modules)}).encode())

    def suits(self, resources: Resources) -> bool:
        """Return whether processes with these resources have the server's environment."""
        return not resources.gpus and process_environment(resources, ()) == self._env

    def can_fork(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether the server can start a command: `python -m MODULE` in the server's environment."""
        return self.is_open and [*command[:2]] == [sys.executable, "-m"] and env == self._env

    @property
    def pid(self) -> int:
        return self._server.pid

    async def fork(
        self, command: Sequence[str], log_file: Path, imports: Sequence[str]
    ) -> ForkedProcess | None:
        """Start a command in its own session, with output to `log_file`. Log a failure and return None."""
        if not self.is_open:
            return None  # a killed server takes requests until it has ended, but nobody reads its answers
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # each kernel of a run has its own event loop
            self._loop = loop
            loop.add_reader(self._socket, self._read)
        id = next(self._ids)
        answer = self._answers[id] = loop.create_future()
        adopt_orphans(True)
        request = {"fork": id, "module": command[2], "arguments": command[3:], "needs": list(imports)}
        try:
            with log_file.open("ab") as output, anyio.fail_after(_ANSWER_S):
                socket.send_fds(self._socket, [json.dumps(request).encode()], [output.fileno()])
                return await answer
        except (ConnectionError, TimeoutError, ForkRefused) as error:
            late = isinstance(error, TimeoutError)
            why = f"no answer within {_ANSWER_S:g} s" if late else str(error) or type(error).__name__
            log.warning("no process is forked any more", why=why)
            self.is_open = False
            return None

    def close(self) -> None:
        """End the server. Forked processes continue."""
        self._lose_server()
        self._socket.close()
        self._server.kill()
        try:
            self._server.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            log.warning("the fork server does not end after SIGKILL", pid=self.pid)
        self._output.close()

    def _read(self) -> None:
        try:
            packet = self._socket.recv(_PACKET)
        except ConnectionError:
            packet = b""
        if not packet:
            self._lose_server()
            return
        answer = json.loads(packet)
        waiting = self._answers.pop(answer["id"])
        adopt_orphans(bool(self._answers))
        if "error" in answer:
            if not waiting.done():
                waiting.set_exception(ForkRefused(answer["error"]))
        elif waiting.done():  # `fork` has given up, so nothing needs the process
            ForkedProcess(answer["pid"]).kill()
        else:
            waiting.set_result(ForkedProcess(answer["pid"]))

    def _lose_server(self) -> None:
        self.is_open = False
        adopt_orphans(False)
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the fork server has ended"))


class ForkRefused(Exception):
    """The fork server refuses to fork; the text is the reason."""
