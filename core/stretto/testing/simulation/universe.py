"""One universe: a run, its faults, and what became of it. The same seed gives the same universe."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import structlog

from stretto.testing.simulation.loop import Deadlock, Livelock, Process, SimulatedLoop
from stretto.testing.simulation.patches import World, patched
from stretto.testing.simulation.processes import (
    InlineChildPool,
    InlineExecutor,
    Machine,
    SimulatedLauncher,
    heartbeats,
    start_exit_watchdog,
)
from stretto.testing.simulation.server import Server

_CPU_S = 120


class Outcome(msgspec.Struct):
    """What became of a universe."""

    status: str
    reason: str = ""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    callbacks: int = 0
    messages: int = 0
    kernels: int = 0
    digest: str = ""
    errors: list[str] = []
    log: list[str] = []


class Universe:
    """A run in the simulation."""

    def __init__(self, seed: int, folder: Path, document: dict[str, Any]) -> None:
        self.loop = SimulatedLoop(seed)
        self.world = World(self.loop, seed)
        self.server = Server(self.loop, seed)
        self.machine = Machine(self.world)
        self.server.folder = str(folder).encode()
        self.folder, self.document = folder, document
        self.log: list[str] = []
        self.kernels = 0
        InlineExecutor.world = InlineChildPool.world = self.world
        SimulatedLauncher.machine = self.machine

    def run(self, limit_s: float) -> Outcome:
        from stretto.kernel import life
        from stretto.assembly.compose import compose_mapping

        began = time.process_time()
        before = time.process_time
        result: dict[str, Any] = {}
        with patched(self.world), _seams():
            structlog.configure(processors=[structlog.contextvars.merge_contextvars, self._log])
            composed = compose_mapping(self.document)
            out = self.folder / "run"

            async def live() -> None:
                from stretto.bus.server import lock_run
                from stretto.kernel.durable.changes import write_values
                from stretto.kernel.setup import RunSetup
                from stretto.kernel.ending import Interruptions

                lock = lock_run(out / "bus")
                write_values(out, composed)
                self.kernels += 1
                setup = RunSetup(composed, out, resumed=None)
                kernel = Process(self.loop, "kernel")
                kernel.on_end.append(lock.close)

                async def main() -> None:
                    try:
                        summary, _ = await life._live_and_sum_up(setup, Interruptions())
                        result.update(summary)
                    except Exception as error:
                        result.update(status="raised", reason="".join(traceback.format_exception(error)))
                    kernel.end(0)

                self.task = self.loop.create_task(main(), context=kernel.context())
                done, _ = await asyncio.wait([kernel.ended], timeout=limit_s)
                if not done:
                    result.update(status="stuck", reason=f"not over after {limit_s:g} virtual seconds")

            try:
                self.loop.run_until_complete(live())
            except Deadlock as error:
                result.update(status="deadlock", reason=str(error))
            except Livelock as error:
                result.update(status="livelock", reason=str(error))
        return Outcome(
            result["status"],
            result.get("reason", ""),
            self.loop.time() - 1000,
            before() - began,
            self.loop.callbacks,
            self.server.messages,
            self.kernels,
            self.loop.digest,
            self.loop.errors,
            self.log,
        )

    def _log(self, logger: Any, name: str, event: dict[str, Any]) -> Any:
        text = f"{name} {event.pop('event')} " + " ".join(f"{key}={value}" for key, value in event.items())
        text = text.replace(str(self.folder), "FOLDER")
        self.loop.note("log", text)
        self.log.append(f"{self.loop.time() - 1000:9.3f} {text}")
        raise structlog.DropEvent


from contextlib import ExitStack, contextmanager
from unittest import mock


@contextmanager
def _seams():
    import stretto.workers.context
    import stretto.workers.scoring.verifier
    import stretto.workers.worker as worker
    import stretto.kernel.life as life
    import stretto_mock.inference

    import stretto.kernel.observe.report
    from stretto.base.cores import CoreUse

    class NoMeter:
        def read(self): return CoreUse(0.5, 0.5)

    class NoView:
        def __init__(self, *args: Any) -> None: ...
        async def run(self) -> None: ...
        def stop(self) -> None: ...

    with ExitStack() as stack:
        for owner, name, value in [
            (stretto.workers.context, "ThreadPoolExecutor", InlineExecutor),
            (stretto.workers.scoring.verifier, "ChildPool", InlineChildPool),
            (worker, "heartbeats", heartbeats),
            (worker, "_start_exit_watchdog", start_exit_watchdog),
            (life, "View", NoView),
            (stretto_mock.inference, "_TICK_S", 0.03),
            (stretto.kernel.observe.report, "CoreMeter", NoMeter),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
