"""`stretto watch`: the live view of a run that another process owns, from its folder or over the bus. A
status may be forged: the view draws its texts as plain text, and shortens long ones."""

import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskStatus

from stretto.assembly.logs import log_nothing
from stretto.bus.client import connect
from stretto.bus.messages.membership import RunStatus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import VIEWER, Bootstrap
from stretto.bus.tls import TlsIdentity
from stretto.config import TlsConfig
from stretto.errors import ConfigError, leaves, printable
from stretto.observe.view import View, final_lines
from stretto.records.figures import FIGURES
from stretto.records.metrics import MAIN_FIGURES
from stretto.records.run_folder import RunFolder
from stretto.records.status import LATE_S, Status, decode_status, standstill

_LOOK_S = 0.5  # the kernel writes its status about once in a second


def watch_folder(folder: Path) -> int:
    """Show the run in a folder until it ends, or until the user ends the view. Return the exit status."""
    run = RunFolder(folder)

    def source() -> Status | None:
        status = run.status
        if status is None or run.state != "running" or not (remark := standstill(folder, status)):
            return status
        return msgspec.structs.replace(status, now=remark)

    async def until_the_end() -> None:
        while run.state == "running":
            await anyio.sleep(_LOOK_S)
            run.refresh()

    exit_status = anyio.run(_watch, source, until_the_end)
    if run.summary is not None:
        print(final_lines(run.summary, folder))
    elif run.state == "stopped":
        print(f"no kernel owns the run; to continue it: stretto resume {printable(str(folder))}")
    return exit_status


def watch_bus(viewer: Bootstrap) -> int:
    """Show a run as `watch_folder` does, from the status that its kernel sends over the bus."""
    # The view shows errors of the connection.
    log_nothing()
    listener = _Listener()

    async def until_the_end() -> None:
        async with connect(viewer) as bus:
            await bus.subscribe(Subjects(viewer.run).status, RunStatus, listener.accept)
            await listener.ended.wait()

    return anyio.run(_watch, listener.status, until_the_end)


def bootstrap_elsewhere(
    file: Path, url: str | None, credentials: str | None, certificate: Path | None
) -> Bootstrap:
    """Read the bootstrap file of a viewer on another machine. A certificate's key is beside it: NAME.key."""
    bootstrap = Bootstrap.read(file)
    if bootstrap.role != VIEWER:
        raise ConfigError(
            f"{file} is not a file for the party {VIEWER!r}; `stretto invite RUN {VIEWER}` says where it is"
        )
    bootstrap = bootstrap.reached(url, credentials)
    if certificate is None:
        return bootstrap
    tls = TlsIdentity.of(TlsConfig(certificate=str(certificate), key=str(certificate.with_suffix(".key"))))
    ca = bootstrap.tls.ca if bootstrap.tls is not None else ""
    return msgspec.structs.replace(bootstrap, tls=msgspec.structs.replace(tls, ca=ca))


class _Listener:
    def __init__(self) -> None:
        self._newest: Status | None = None
        self._heard = time.monotonic()
        self._fault = ""
        self.ended = anyio.Event()

    def accept(self, message: RunStatus) -> None:
        """Store the kernel's newest status. If a message is not a status, keep the status before it."""
        self._heard = time.monotonic()
        try:
            self._newest = decode_status(message.content)
            self._fault = ""
        except msgspec.DecodeError as error:
            self._fault = f"the kernel sent what is not a status: {error}"
            return
        if self._newest.state not in ("running", "repeated"):
            self.ended.set()

    def status(self) -> Status | None:
        silent_s = time.monotonic() - self._heard
        remark = f"no news from the run for {silent_s:.0f} s" if silent_s > LATE_S else self._fault
        if self._newest is None or not remark:
            return self._newest
        return msgspec.structs.replace(self._newest, now=remark)


async def _watch(source: Callable[[], Status | None], until_the_end: Callable[[], Awaitable[None]]) -> int:
    """Draw the view until the run or the user ends it. Without a terminal, print a line for each step."""
    view = View(source)
    received: list[int] = []

    async def draw() -> None:
        await (view.run() if sys.stderr.isatty() else _print_steps(source))
        tasks.cancel_scope.cancel()

    async def obey_signals(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                received.append(number)
                tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(obey_signals)
            tasks.start_soon(draw)
            await until_the_end()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise leaves(group)[0] from group
    finally:
        view.stop()
    return 128 + received[0] if received else 0


async def _print_steps(source: Callable[[], Status | None]) -> None:
    shown = -1
    while True:
        status = source()
        if status is not None and status.version != shown:
            shown = status.version
            figures = "".join(
                f"   {FIGURES[key].label} {FIGURES[key].text(status.newest[key])}"
                for key in MAIN_FIGURES
                if status.newest.get(key) is not None
            )
            print(printable(f"step {status.version} of {status.steps}{figures}   {status.now}"), flush=True)
        await anyio.sleep(_LOOK_S)
