"""`python -m stretto.kernel.fleet.fork_server FOLDER SOCKET MODULE ...`: import once, and fork processes.

The kernel's process starts the server with one end of a socket pair (see `stretto.kernel.fleet.forks`);
FOLDER is the run's folder, for `ps`. A forked process does what `python -m MODULE ARGUMENT ...` does in a new
interpreter: it has its own session, its log as output, and no state of other processes, because the server
only imports. A forked process becomes a child of the kernel. The server ends when the kernel closes the
socket or is gone; the forked processes continue.

Requests and answers are JSON, one a packet. `{"import": [...]}` names modules to import before the processes
that need them. `{"fork": ID, "module": ..., "arguments": [...], "needs": [...]}` comes with the file for the
process's output, and `{"output": true}` with the file for the server's own. The answers are
`{"id": ID, "pid": ...}` and `{"id": ID, "error": ...}`.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
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
    id: int
    module: str
    arguments: list[str]
    needs: list[str]
    output: int
    """File descriptor for stdout and stderr."""


class _ForkLoop:
    def __init__(self, connection: socket.socket, modules: list[str]) -> None:
        self._socket = connection
        self._to_import = modules
        self._orders: list[_ForkOrder] = []

    def run(self) -> _ForkOrder | None:
        """Serve until the kernel is gone; return None. In a forked process, return the order for it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            has_work = self._to_import or self._orders
            if select.select([self._socket], [], [], 0 if has_work else None)[0] and not self._read():
                return None
            for order in [each for each in self._orders if not {*each.needs} & {*self._to_import}]:
                self._orders.remove(order)
                if self._fork(order):
                    return order
            if self._to_import:
                _import(self._to_import[0])
                del self._to_import[0]

    def _read(self) -> bool:
        """Receive one packet. Return whether the kernel is still connected."""
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

    def _fork(self, order: _ForkOrder) -> bool:
        """Fork; return True in the new process. Refuse while threads run: a fork would keep their locks."""
        threads = len([*Path("/proc/self/task").iterdir()])
        if threads > 1:
            self._answer({"id": order.id, "error": f"the fork server has {threads} threads"})
            os.close(order.output)
            return False
        ours, theirs = socket.socketpair()
        if between := os.fork():
            with ours:  # the new process continues when this end is closed
                theirs.close()
                pid = int(ours.recv(_PACKET))
                os.waitpid(between, 0)
                self._answer({"id": order.id, "pid": pid})
            os.close(order.output)
            return False
        if os.fork():
            os._exit(0)  # makes the new process an orphan, which the kernel adopts
        os.setsid()  # before the kernel gets the pid: the kernel ends the process by its session
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ours.close()
        with theirs:
            theirs.send(str(os.getpid()).encode())
            theirs.recv(1)
        self._socket.close()
        for pending in self._orders:
            os.close(pending.output)
        return True

    def _answer(self, answer: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the kernel is gone
            self._socket.send(json.dumps(answer).encode())


def _import(module: str) -> None:
    """Import a module. If the import fails, the process that needs the module raises the error in its log."""
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - foreign modules may raise anything
        traceback.print_exc()
    gc.freeze()  # a collection in a forked process would copy every page with objects


def _write_to(file: int) -> None:
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _run(order: _ForkOrder) -> None:
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
    """Seed numpy again: `random` reseeds itself after a fork, and torch begins with a constant."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _show_command(command: list[str]) -> None:
    """Let `ps` show the process's own command instead of the server's, cut to the room of the server's."""
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
        os._exit(0)  # nothing is left to clean up, and an ordinary exit with torch takes a while
    _run(order)


if __name__ == "__main__":
    main()
