"""`python -m stretto.kernel.fleet.fork_server FOLDER SOCKET MODULE ...`: import once, and fork processes.

The kernel's process starts it with one end of a socket pair (see `stretto.kernel.fleet.forks`); the run's
folder is there for `ps`. A forked process does what `python -m MODULE ARGUMENT ...` does in a new
interpreter: it has its own session, its log as output, and no part of another one's work, because the server
only imports. It ends when the kernel closes the socket or is gone; the processes continue, and look after
themselves.

Requests and answers are JSON, one a packet. `{"import": [...]}` names modules to import before the processes
that need them. `{"fork": ID, "module": ..., "arguments": [...], "needs": [...]}` comes with the file for the
process's output, and `{"output": true}` with the file for the server's own. The answers are
`{"id": ID, "pid": ...}` with the process's pidfd, `{"id": ID, "error": ...}`, and
`{"pid": ..., "status": ...}` when a process has ended.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKET = 2**16


@dataclass
class _ForkOrder:
    """A process to fork."""

    id: int
    module: str
    arguments: list[str]
    needs: list[str]
    output: int
    """File descriptor for stdout and stderr."""


class _ForkLoop:
    """Imports, forks, and reports to the kernel which processes have ended."""

    def __init__(self, connection: socket.socket, modules: list[str]) -> None:
        self._socket = connection
        self._to_import = modules
        self._orders: list[_ForkOrder] = []
        self._wakeup, self._wakes = socket.socketpair()
        for end in (self._wakeup, self._wakes):
            end.setblocking(False)

    def run(self) -> _ForkOrder | None:
        """Serve until the kernel is gone, and return None. In each forked process, return its order."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                ready = {
                    key.fileobj for key, _ in selector.select(0 if self._to_import or self._orders else None)
                }
                if self._socket in ready and not self._read():
                    return None
                if self._wakeup in ready:
                    self._wakeup.recv(_PACKET)
                    self._report_ended()
                for order in [each for each in self._orders if not {*each.needs} & {*self._to_import}]:
                    self._orders.remove(order)
                    if self._fork(order) == 0:
                        return order
                if self._to_import:
                    _import(self._to_import[0])
                    del self._to_import[0]

    def _read(self) -> bool:
        """Take one packet. Return whether the kernel is still there."""
        packet, descriptors, _, _ = socket.recv_fds(self._socket, _PACKET, 1)
        if not packet:
            return False
        request = json.loads(packet)
        if "fork" in request:
            id, module, arguments = request["fork"], request["module"], request["arguments"]
            self._orders.append(_ForkOrder(id, module, arguments, request["needs"], descriptors[0]))
        elif "output" in request:
            _write_to(descriptors[0])
        modules = request.get("import", request.get("needs", []))
        self._to_import += [each for each in modules if each not in (*self._to_import, *sys.modules)]
        return True

    def _fork(self, order: _ForkOrder) -> int:
        """Fork a process and report it to the kernel. Return 0 in the process, and otherwise its pid, or -1
        if this process must not be forked: of its threads, the new one would have only one, and all their
        locks."""
        threads = len([*Path("/proc/self/task").iterdir()])
        if threads > 1:
            self._send({"id": order.id, "error": f"the fork server has {threads} threads"})
            os.close(order.output)
            return -1
        session, has_session = os.pipe()
        if pid := os.fork():
            os.close(has_session)
            os.read(session, 1)  # until it has its own session, which the kernel ends it by
            os.close(session)
            descriptor = os.pidfd_open(pid)
            self._send({"id": order.id, "pid": pid}, [descriptor])
            os.close(descriptor)
            os.close(order.output)
            return pid
        os.setsid()
        os.close(session)
        os.close(has_session)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._socket, self._wakeup, self._wakes):
            end.close()
        for other in self._orders:
            os.close(other.output)
        return 0

    def _report_ended(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _send(self, answer: dict[str, Any], descriptors: list[int] | None = None) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # of a kernel that is gone
            socket.send_fds(self._socket, [json.dumps(answer).encode()], descriptors or [])


def _import(module: str) -> None:
    """Import a module. If that fails, the process that needs it raises the same error, to its own log."""
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - foreign modules may raise anything
        traceback.print_exc()
    gc.freeze()  # a collection in a forked process would copy every page that it looks at


def _write_to(file: int) -> None:
    """Use an open file for stdout and stderr."""
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _run(order: _ForkOrder) -> None:
    """Be the process that was ordered."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _write_to(order.output)
    _draw_new_random_state()
    _show_command([sys.executable, "-m", order.module, *order.arguments])
    gc.enable()
    sys.argv = [order.module, *order.arguments]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def _draw_new_random_state() -> None:
    """Draw the state of numpy's generator again, as a new interpreter does. `random` does it by itself, and
    torch begins with a constant."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _show_command(command: list[str]) -> None:
    """Have `ps` show the process's own command, as far as there is room, instead of the server's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # where the arguments are: fields 48 and 49 of all
    text = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    """Body of the server, and of the processes forked from it."""
    gc.disable()  # imports make hundreds of thousands of objects that stay
    connection = socket.socket(fileno=int(sys.argv[2]))
    order = _ForkLoop(connection, sys.argv[3:]).run()
    if order is None:
        os._exit(0)  # it has nothing to clean up, and an ordinary end with torch takes a while
    _run(order)


if __name__ == "__main__":
    main()
