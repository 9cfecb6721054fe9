"""Runs the kernels of a run, from the command to the summary, and leaves no process behind.

`run` starts a run and `resume_to_end` continues one. Each kernel gets a server, a bus connection, observers
and, at its end, `summary.json`. Both functions lock the run's folder before they touch a file in it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import structlog

from stretto.assembly.assembly import Assembly
from stretto.assembly.logs import log_to
from stretto.bus.client import Bus, connect
from stretto.bus.server import Bootstrap, NatsServer, foreign_bootstrap, lock_run
from stretto.errors import ConfigError, RunError, StrettoError, leaves
from stretto.kernel.durable.changes import is_complete, newest_values, write_values
from stretto.kernel.durable.checkpoint import FORMAT, KernelState, newest_intact
from stretto.kernel.durable.clean import cleaner_of
from stretto.kernel.ending import Interruptions
from stretto.kernel.fleet.forks import ForkServer, fork_server
from stretto.kernel.ownership import own_run
from stretto.kernel.setup import RunSetup
from stretto.observe.observers import Observers
from stretto.observe.view import View, final_lines
from stretto.records.files import REPLAY
from stretto.records.living import listed
from stretto.records.metrics_file import MetricsFile
from stretto.records.origin import write_origin

log = structlog.get_logger()

_NO_ROOM = ("No space left", "no space left", "Disk quota", "insufficient resources", "insufficient storage")
"""Words in errors of the system and of nats-server about a disk without room."""
_LITTLE_ROOM = 2**20
"""Free bytes. With less room, workers fail or become silent with errors that do not name the disk."""


def run_to_end(assembly: Assembly, forks: ForkServer | None) -> int:
    """Train a run, print its final lines, and return the exit status. See `run`."""
    return _print_end(run(assembly, forks), assembly.folder)


def run(assembly: Assembly, forks: ForkServer | None) -> dict[str, Any]:
    """Train a run, and return its summary. Raise ConfigError if the run's folder cannot be used."""
    folder, composed = assembly.folder, assembly.composed
    with lock_run(folder / "bus"):
        if (folder / "config.yaml").exists():
            raise ConfigError(f"{composed.place('out')}: {folder} already holds a run", path="out")
        try:
            write_values(folder, composed)
            write_origin(folder, composed.config, composed.written)
        except OSError as error:
            raise ConfigError(f"{composed.place('out')}: cannot write there: {error}", path="out") from error
        with listed(folder), Interruptions() as interruptions:
            return _live_in_turn(kernels_to_the_end(assembly, None, forks), interruptions)


@contextmanager
def owned(folder: Path) -> Generator[None]:
    """Own the run in a folder during the block. Without owning a run, do not change its files."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds no run: it has no config.yaml")
    if (folder / REPLAY).exists():
        raise ConfigError(
            f"{folder} is a replay, and generates nothing; continue the run that {REPLAY} there names, or "
            "replay that run again"
        )
    with lock_run(folder / "bus"):
        yield


def resume_to_end(assembly: Assembly, *, accept_dataset: bool = False, expire_batch: bool = False) -> int:
    """Continue a run, which this process owns, and return the exit status. With `accept_dataset`, the rows of
    datasets may have changed. With `expire_batch`, the groups of the batch under way expire."""
    checkpoint = checkpoint_to_resume(assembly)
    with listed(assembly.folder), Interruptions() as interruptions, fork_server(assembly) as forks:
        kernels = kernels_to_the_end(assembly, checkpoint, forks, expire_batch=expire_batch)
        summary = _live_in_turn(kernels, interruptions, accept_dataset)
    return _print_end(summary, assembly.folder)


Checkpoint = tuple[Path | None, KernelState]
"""The folder of a checkpoint, and its state; None and the initial state for the beginning of a run."""
Kernels = Generator[RunSetup, dict[str, Any], dict[str, Any]]
"""The kernels of a run in turn. The generator gets the summary of each, and returns that of the run."""


def checkpoint_to_resume(assembly: Assembly) -> Checkpoint:
    """Return an incomplete run's newest checkpoint. If values have changed, print the steps to repeat."""
    folder = assembly.folder
    if is_complete(folder, assembly.config.steps):
        raise ConfigError(
            f"the run in {folder} is complete; to train it for more steps: stretto resume {folder} steps=…"
        )
    checkpoint = newest_checkpoint(folder)
    version, values = checkpoint[1].version, checkpoint[1].values
    if values != newest_values(folder):
        reached = max((line["step"] for line in MetricsFile(folder).read()), default=0)
        again = "no step is" if reached <= version else f"steps {version + 1} to {reached} are"
        where = f"checkpoint {checkpoint[0].name}" if checkpoint[0] else "initial model"
        _print(f"other values begin with the {where}: {again} trained again")
    return checkpoint


def kernels_to_the_end(
    assembly: Assembly, checkpoint: Checkpoint | None, forks: ForkServer | None, *, expire_batch: bool = False
) -> Kernels:
    """Yield kernels until the run ends; `checkpoint` is None for a new run. To change the number of trainers,
    a kernel writes a checkpoint and ends, and the next continues (`stretto.kernel.fleet.worker_scaling`)."""
    values = newest_values(assembly.folder)
    while True:
        summary = yield RunSetup(
            assembly, resumed=checkpoint, forks=forks, values=values, expires_batch=expire_batch
        )
        if summary["status"] != "repeated":
            return summary
        expire_batch = False
        assembly, checkpoint = assembly.renewed(), newest_checkpoint(assembly.folder)


def exit_status(summary: Mapping[str, Any]) -> int:
    """Return the exit status of a command whose run ended with this summary."""
    return {"completed": 0, "interrupted": 130}.get(summary["status"], 1)


def newest_checkpoint(folder: Path) -> Checkpoint:
    """Return a run's newest intact checkpoint."""
    checkpoint = newest_intact(folder / "checkpoints")
    if checkpoint is not None and checkpoint[1].format != FORMAT:
        raise ConfigError(
            f"{checkpoint[0]} was written by a stretto whose runs this one cannot continue: resume the run "
            "with that version, or start a new run from the weights (`stretto export`)"
        )
    return checkpoint or (None, KernelState.initial())


def last_lines(summary: Mapping[str, Any], folder: Path) -> str:
    """Return what a command prints when its run has ended."""
    lines = final_lines(summary, folder)
    if summary["status"] == "interrupted":
        lines += f"\nto continue the run: stretto resume {shlex.quote(str(folder))}"
    return lines


def _print_end(summary: Mapping[str, Any], folder: Path) -> int:
    _print(last_lines(summary, folder))
    return exit_status(summary)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the process that read the output has ended; the run is not affected
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _live_in_turn(
    kernels: Kernels, interruptions: Interruptions, accept_dataset: bool = False
) -> dict[str, Any]:
    with closing(kernels):
        try:
            setup = next(kernels)
            while True:
                setup = kernels.send(live(setup, interruptions, accept_dataset))
        except StopIteration as end:
            return end.value


def live(setup: RunSetup, interruptions: Interruptions, accept_dataset: bool = False) -> dict[str, Any]:
    """Run one kernel, and return its summary."""
    log_to(setup.logs / "kernel.jsonl", console=not sys.stderr.isatty(), run=setup.run, role="kernel")
    log.info("run", folder=str(setup.folder))
    setup.check_inputs(accept=accept_dataset)
    interruptions.hold()
    return anyio.run(live_and_sum_up, setup, interruptions)


async def live_and_sum_up(setup: RunSetup, interruptions: Interruptions) -> dict[str, Any]:
    """Run one kernel with its server. Write its summary, and return the summary."""
    ending = setup.facts.ending
    observers = Observers(setup)
    with interruptions.obeyed_by(ending):  # before the first process starts
        error = await _live(setup, observers)
        if error is None and not setup.facts.begun:  # the kernel has found a newer checkpoint
            return {"status": "repeated"}
        status, reason = ending.status, ending.reason
        if ending.replaced:
            await observers.trackers.finish(lambda: True)
            raise RunError(f"another kernel owns the run in {setup.folder} now; this one ended: {reason}")
        if status == "failed":
            if not setup.folder.exists():
                await observers.trackers.finish(lambda: True)
                raise RunError(
                    f"the run's folder {setup.folder} is gone: it was removed or renamed; the first error: "
                    f"{reason}"
                )
            reason += _full_disk(setup.folder, reason)
        summary = observers.report.finish(status, reason)
        observers.status.write_end()
        before = len(interruptions.received)
        await observers.trackers.finish(lambda: ending.forced or len(interruptions.received) > before)
    observers.report.add_late_problems(summary)
    return summary


async def _live(setup: RunSetup, observers: Observers) -> BaseException | None:
    """Run one kernel with its server. Return the error that ended the kernel, if there was one."""
    ending, view = setup.facts.ending, View(observers.status.status)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(view.run)
            try:
                async with served(setup) as bus:
                    log.info("bus connected", url=bus.server)
                    async with observers.beside(bus):
                        await own_run(setup, bus, ending)
            finally:
                view.stop()
            tasks.cancel_scope.cancel()
    except Exception as raised:
        error = leaves(raised)[0]
        if isinstance(error, StrettoError) and not setup.facts.begun:
            raise error from raised
        ending.end("failed", setup.composed.explain(error, setup.logs / "kernel.jsonl"))
        log.error("run failed", exc_info=error)
        return error
    return None


def _full_disk(folder: Path, reason: str) -> str:
    """Return a message about a full disk, if that ended the run or may have; else empty. The disk is that of
    the file that `reason` names, or else the disk of the run."""
    is_named = any(words in reason for words in _NO_ROOM)
    named = [Path(text) for text in re.findall(r"(?<!\S)['\"]?(/[^\s'\":;,]+)", reason)] if is_named else []
    disk = (named or [folder])[0]
    while not disk.exists():
        disk = disk.parent
    size = shutil.disk_usage(disk)
    if not reason or (size.free >= _LITTLE_ROOM and not is_named):
        return ""
    while not disk.is_mount():
        disk = disk.parent
    return (
        f"; the run writes to the disk at {disk}, which has {size.free / 2**20:,.0f} MiB free of "
        f"{size.total / 2**20:,.0f} MiB; make room, then: stretto resume {folder}"
    )


@asynccontextmanager
async def served(setup: RunSetup) -> AsyncGenerator[Bus]:
    """Run the bundled server during the block, unless `bus.url` names another server, and yield a connection
    to it. Then stop it and remove published weights, but keep the weights if another kernel owns the run now.
    If this kernel has not begun, keep a former kernel's server and weights: its workers wait for the next."""
    folder, bus = setup.folder / "bus", setup.bus
    server = None
    try:
        async with anyio.create_task_group() as tasks:
            if bus.url is None:
                server = await NatsServer.start(folder, setup.run, bus, setup.logs, cleaner_of(setup.folder))
                tasks.start_soon(server.look_after_guard)
            else:
                foreign_bootstrap(folder, setup.run, bus, setup.logs)
            async with connect(Bootstrap.read(folder / "kernel.json")) as connection:
                yield connection
            tasks.cancel_scope.cancel()
    finally:
        if setup.facts.begun or (server is not None and not server.is_former):
            with anyio.CancelScope(shield=True):
                if server is not None:
                    await server.stop()
            if not setup.facts.ending.replaced:
                setup.transport.clean()
