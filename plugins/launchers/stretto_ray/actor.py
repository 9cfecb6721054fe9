"""The actor that runs one worker's program on a node of the cluster, and returns the program's output."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_CHUNK = 2**16  # bytes of output in an answer
_READ_S = 20.0
"""Seconds after which a call of `read` returns without new output."""
_DRAIN_S = 1.0
"""Seconds to wait for more output after the worker's end: a process of another session may keep it open."""
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")
"""Prefixes of Ray's variables in an actor, one of which has a login. A worker needs none of them."""
# Ray kills an actor with its job or its node, but not always the actor's children. So the system kills the
# worker when the actor's thread ends (PR_SET_PDEATHSIG). The mask is cleared because Ray blocks SIGINT.
_BEGIN = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the actor is gone")
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.execv(sys.argv[2], sys.argv[2:])
"""


class WorkerActor:
    """The actor of one worker on this node. Both end together."""

    _process: subprocess.Popen[bytes]
    _output: asyncio.StreamReader
    _ending: asyncio.Task[int]

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def start(
        self, command: Sequence[str], env: Mapping[str, str], text: bytes, folder: str
    ) -> tuple[str, int]:
        """Start the worker and return the ids of node and process. An empty program in `command` means
        this Python. `text`: standard input. `folder`: working directory, if this node has it."""
        ray: Any = import_module("ray")
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids()["GPU"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        program = shutil.which(command[0] or sys.executable)
        if program is None:
            raise FileNotFoundError(f"no program {command[0]}")
        with os.fdopen(os.memfd_create("stdin"), "w+b") as stdin:
            stdin.write(text)
            stdin.seek(0)
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BEGIN, str(os.getpid()), program, *command[1:]],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**inherited, "CUDA_VISIBLE_DEVICES": ",".join(gpus), **env},
                cwd=folder if folder and Path(folder).is_dir() else None,
                start_new_session=True,
            )
        self._output = reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        self._ending = asyncio.create_task(asyncio.to_thread(self._until_ended))
        return context.get_node_id(), process.pid

    async def read(self) -> bytes | int | None:
        """Return new output, or the exit status at the end; None after some seconds without output."""
        async with self._turn:  # an earlier call, whose answer was lost on the network, may still wait
            reading = asyncio.create_task(self._output.read(_CHUNK))
            await asyncio.wait([reading, self._ending], timeout=_READ_S, return_when=asyncio.FIRST_COMPLETED)
            if self._ending.done():
                await asyncio.wait([reading], timeout=_DRAIN_S)
            if not reading.done():
                reading.cancel()
            elif data := reading.result():
                return data
            else:  # the worker has closed its output
                await asyncio.wait([self._ending], timeout=_READ_S)
            return self._ending.result() if self._ending.done() else None

    async def signal(self, number: int) -> None:
        """Send a signal to the worker; SIGKILL to all processes of its session."""
        if number != signal.SIGKILL:
            self._process.send_signal(number)
        elif not self._ending.done():
            self._kill_session()

    def _until_ended(self) -> int:
        status = self._process.wait()
        self._kill_session()
        return status

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
