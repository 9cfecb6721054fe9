"""The actor that starts one worker's process on a node of the cluster, and passes on its output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

_BUFFER = 2**20
"""Bytes of output that wait for the launcher at most; the worker waits beyond that."""
_CHUNK = 2**16
_READ_S = 20.0
"""A call of `read` without news is answered after this many seconds."""
_DRAIN_S = 1.0
"""A process that has left the worker's session may hold its output open: do not wait for it any longer."""
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")
"""Variables with which Ray starts an actor, a login of the cluster among them. A worker needs none."""


class WorkerActor:
    """One worker on this node. Lives until the worker has ended, and ends the worker when it ends."""

    def __init__(self) -> None:
        self._control: int | None = None
        """Pipe to the process that started the worker (see `stretto_ray.warden`)."""
        self._output = bytearray()
        self._begin = 0
        """Number of bytes of the output before those in `_output`."""
        self._status: int | None = None
        self._complete = False
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        text: bytes,
        folder: str,
    ) -> tuple[str, int]:
        """Start the worker, and return the id of this node and that of the process.

        Args:
            command: program and arguments; this process's Python takes the place of an empty program.
            env: environment variables to set.
            text: standard input of the worker.
            folder: working directory, if this node has it.

        Raises:
            OSError: if it cannot be started.
        """
        ray: Any = import_module("ray")
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids()["GPU"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        control, report, output = os.pipe(), os.pipe(), os.pipe()
        warden = str(Path(__file__).with_name("warden.py"))
        first = subprocess.Popen(
            [sys.executable, "-I", warden, command[0] or sys.executable, *command[1:]],
            stdin=control[0],
            stdout=report[1],
            stderr=output[1],
            env={**inherited, "CUDA_VISIBLE_DEVICES": ",".join(gpus), **env},
            cwd=folder if folder and Path(folder).is_dir() else None,
        )
        for end in (control[0], report[1], output[1]):
            os.close(end)
        self._control = control[1]
        first.wait()  # the warden is its child, which is no child of this process then
        reports, outputs = await _reader(report[0]), await _reader(output[0])
        with os.fdopen(os.dup(control[1]), "wb") as writer:
            writer.write(len(text).to_bytes(8, "big") + text)
        fact = _fact(await reports.readline())
        if "pid" not in fact:
            raise OSError(fact.get("error", "the process that starts the worker has ended"))
        copying = asyncio.create_task(self._copy(outputs))
        self._tasks = [copying, asyncio.create_task(self._await_end(reports, copying))]
        return context.get_node_id(), fact["pid"]

    async def read(self, offset: int) -> tuple[bytes, int | None]:
        """Return the output from an offset on, and the exit status once the output ends there; None before.
        Wait until there is something, for some seconds at most. What is before the offset is forgotten."""
        async with self._changed:
            del self._output[: offset - self._begin]
            self._begin = offset
            self._changed.notify_all()
            try:
                async with asyncio.timeout(_READ_S):
                    await self._changed.wait_for(lambda: self._output or self._complete)
            except TimeoutError:
                return b"", None
            return bytes(self._output), self._status if self._complete and not self._output else None

    async def signal(self, number: int) -> None:
        """Send a signal to the worker; SIGKILL to all processes of its session."""
        if self._status is None and self._control is not None:
            os.write(self._control, bytes([number]))

    async def _copy(self, outputs: asyncio.StreamReader) -> None:
        while data := await outputs.read(_CHUNK):
            async with self._changed:
                self._output += data
                self._changed.notify_all()
                await self._changed.wait_for(lambda: len(self._output) < _BUFFER)

    async def _await_end(self, reports: asyncio.StreamReader, copying: asyncio.Task[None]) -> None:
        fact = _fact(await reports.readline())
        self._status = fact.get("status", 1)
        while not copying.done():  # unread output takes as long as the launcher needs to read it
            seen = self._begin + len(self._output)
            await asyncio.wait([copying], timeout=_DRAIN_S)
            if seen == self._begin + len(self._output) < self._begin + _BUFFER:
                copying.cancel()
                break
        async with self._changed:
            self._complete = True
            self._changed.notify_all()


def _fact(line: bytes) -> dict[str, Any]:
    """Return what a line of the warden says; nothing if it has ended without one."""
    return json.loads(line) if line else {}


async def _reader(file: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(file, "rb", 0))
    return reader
