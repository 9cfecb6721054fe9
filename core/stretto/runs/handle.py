"""Runs from Python: `stretto.run` starts one, and its `RunHandle` follows, awaits and stops it.

The kernel of the run is a separate process, as with `stretto run`, so its signals, fork server and event loop
do not disturb those of a notebook. The handle reads the files in the run's folder. The run belongs to its
handle: when the handle is dropped or the program ends in any way, the run finishes the step under way, writes
a checkpoint and ends.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, cast

from stretto.errors import ConfigError, PluginError, RunError, StrettoError
from stretto.runs.request import RunAccepted, RunNotice, RunRefused, RunRequest, message_of

if TYPE_CHECKING:
    from stretto.records.run_folder import RunFolder, State
    from stretto.records.samples.store import SampleStore
    from stretto.records.status import Status

__all__ = ["RunHandle", "run"]

_LOOK_S = 0.1
"""Seconds between two checks of the run's files and process."""
_DRAIN_S = 600.0
"""A program that ends waits this many seconds for the last step and the checkpoint of each of its runs."""
_HURRY_S = 30.0
"""A run that is stopped at once has this many seconds to end; then its kernel is killed."""
_LAST_LINES = 20
"""Lines of a kernel's output that an error quotes if the kernel ended without a reason."""

_kernels: set[_KernelProcess] = set()
"""The kernels that this program has started and that had not ended at their last `poll`."""


def run(config: str | os.PathLike[str] | Mapping[str, Any], /, **overrides: Any) -> RunHandle:
    """Start a run. Return its handle when the run is checked and starts its processes.

    Checking takes a few seconds, as with `stretto check`. A program whose event loop must continue meanwhile
    calls `await asyncio.to_thread(stretto.run, …)`.

    Args:
        config: path of a run file, or its content as nested mappings.
        overrides: values that override keys of the run file: `steps=3`, `training={"lr": 1e-4}`, or
            `**{"training.lr": 1e-4}`. A mapping overrides the keys that it has.

    Raises:
        ConfigError: for a wrong key, value or path, and if this machine has too few resources for the run.
            The text is the same as on the command line; `path` is the key.
        PluginError: for a component that is not installed or cannot be loaded.
    """
    is_file = isinstance(config, (str, os.PathLike))
    request = RunRequest(
        file=os.fspath(config) if is_file else "config",
        document=None if is_file else _plain(config, ""),
        overrides=list(_override_texts(overrides)),
    )
    kernel = _KernelProcess(request)
    try:
        folder = kernel.accepted()
    except BaseException:
        kernel.stop()
        raise
    return RunHandle(kernel, folder)


class RunHandle:
    """A run that `stretto.run` has started.

    `await run` and `run.wait()` wait for the end of the run and return its summary. `async for step in run`
    yields the metrics of each step when the step ends. As a context manager, also an asynchronous one, the
    handle stops the run at the end of the block and waits for the end of the run.

    A handle must not be used from several threads.
    """

    def __init__(self, kernel: _KernelProcess, folder: Path) -> None:
        self._kernel = kernel
        self._kept_record: RunFolder | None = None
        weakref.finalize(self, kernel.stop)
        self.folder = folder
        """The run's folder. The commands of stretto, such as `stretto ui`, also read this folder."""
        self.notices = tuple(kernel.notices)
        """Notes and warnings of the check, as texts. Warnings are also Python warnings."""

    def __repr__(self) -> str:
        return f"<stretto run in {self.folder}: {self.state}, step {len(self.metrics)}>"

    # -------------------------------------------------------------------------------- what it does

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` of the steps so far, in order (see docs/metrics.md)."""
        record = self._record()
        return [] if record is None else record.steps

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` of the evaluations so far, in order."""
        record = self._record()
        return [] if record is None else record.evaluations

    @property
    def samples(self) -> SampleStore:
        """The kept samples: `run.samples.find(limit=10, order="-reward")` returns dicts (docs/samples.md)."""
        from stretto.records.samples.store import SampleStore

        return SampleStore(self.folder)

    @property
    def status(self) -> Status | None:
        """The current status of the run, as in `stretto status`; None in its first seconds."""
        from stretto.records.status import read_status

        return read_status(self.folder)

    @property
    def state(self) -> State:
        """`running`, `completed`, `interrupted`, `failed`, or `stopped` if the run's kernel was killed."""
        if self._kernel.poll() is None:
            return "running"
        record = self._record()
        return "stopped" if record is None else record.state

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None before the end of the run."""
        record = self._record() if self._kernel.poll() is not None else None
        return None if record is None else record.summary

    # ------------------------------------------------------------------------------------- its end

    def stop(self, *, now: bool = False) -> None:
        """Ask the run to end, as Ctrl-C does: the run finishes the step and writes a checkpoint, from which
        `stretto resume` continues. With `now`, as with a second Ctrl-C, the run ends at once and a resume
        repeats the step."""
        self._kernel.stop(now=now)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run, and return its summary. Ctrl-C stops the run, and KeyboardInterrupt is
        raised when the run has ended. A second Ctrl-C ends the run at once.

        Args:
            timeout_s: wait at most this many seconds; None for no limit.

        Raises:
            TimeoutError: if the run has not ended in time. The run continues.
            RunError: if the run failed; `reason` says why.
            StrettoError: if the run was refused when its kernel began.
        """
        begun = time.monotonic()
        interrupt: KeyboardInterrupt | None = None
        running = True
        while running:
            try:
                running = self._kernel.poll() is None
                if running and timeout_s is not None and time.monotonic() - begun > timeout_s:
                    raise TimeoutError(f"the run in {self.folder} is still running after {timeout_s:g} s")
                time.sleep(_LOOK_S if running else 0)
            except KeyboardInterrupt as error:
                self.stop(now=interrupt is not None)
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return self._result()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self._until_the_end().__await__()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the metrics of each step, from the first step to the end of the run. Raises as `wait`."""
        from anyio import sleep

        seen = 0
        while True:
            ended = self._kernel.poll() is not None
            for line in self.metrics[seen:]:
                seen += 1
                yield line
            if ended:
                break
            await sleep(_LOOK_S)
        self._result()

    def __enter__(self) -> RunHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.stop()
        while self._kernel.poll() is None:
            time.sleep(_LOOK_S)

    async def __aenter__(self) -> RunHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        from anyio import CancelScope, sleep

        self.stop()
        with CancelScope(shield=True):
            while self._kernel.poll() is None:
                await sleep(_LOOK_S)

    def _record(self) -> RunFolder | None:
        """Return the current content of the run's files; None while the folder has no files of a run."""
        from stretto.records.run_folder import RunFolder, is_run

        if self._kept_record is not None:
            self._kept_record.refresh()
        elif is_run(self.folder):
            self._kept_record = RunFolder(self.folder)
        return self._kept_record

    async def _until_the_end(self) -> dict[str, Any]:
        from anyio import sleep

        while self._kernel.poll() is None:
            await sleep(_LOOK_S)
        return self._result()

    def _result(self) -> dict[str, Any]:
        """Return the summary of a run that has ended. Raises as `wait`."""
        if self._kernel.refusal is not None:
            raise self._kernel.refusal
        summary = self.summary
        if summary is None:
            raise RunError(f"the run in {self.folder} has no summary: {self._kernel.last_words}")
        if summary["status"] == "failed":
            raise RunError(summary["reason"])
        return summary


class _KernelProcess:
    """The process that runs `stretto.cli.start.child`. Any thread may call `poll`."""

    def __init__(self, request: RunRequest) -> None:
        import msgspec

        self.notices: list[str] = []
        self.refusal: StrettoError | None = None
        """The error that ended the process, if the run has no summary that contains the error."""
        self.last_words = ""
        """How the process ended, with the last lines of its output."""
        self._lock = threading.Lock()
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - as long as the process
        reader, writer = os.pipe()
        self._messages = os.fdopen(reader, "rb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto.cli.start.child", str(writer)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,  # Ctrl-C reaches the run through the handle alone
            )
        except OSError as error:  # this machine has no process left
            self._messages.close()
            self._output.close()
            raise RunError(f"the kernel of the run cannot be started: {error}") from error
        finally:
            os.close(writer)
        _kernels.add(self)
        with suppress(BrokenPipeError):  # the process has ended; `accepted` raises its error
            self._input.write(msgspec.json.encode(request) + b"\n")
            self._input.flush()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def accepted(self) -> Path:
        """Wait until the run is accepted, and return its folder. Raises as `run`."""
        while line := self._messages.readline():
            if folder := self._take_in(line):
                return folder
        self._process.wait()
        self.poll()
        raise self.refusal or RunError(f"the run was not checked: {self.last_words}")

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        with self._lock:
            status = self._process.poll()
            if status is not None and self in _kernels:
                _kernels.discard(self)
                self._take_leave(status)
            return status

    def stop(self, *, now: bool = False) -> None:
        """Ask the process to drain the run, or to end it at once."""
        with suppress(BrokenPipeError):
            self._input.close()
        if now:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        for now, seconds in ((False, _DRAIN_S), (True, _HURRY_S)):
            self.stop(now=now)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(seconds)
        if self._process.poll() is None:
            self._process.kill()  # the kernel's workers and server notice this, and end
        self._process.wait()
        self.poll()

    def _take_in(self, line: bytes) -> Path | None:
        """Record a message of the process. Return the run's folder if the message is `RunAccepted`."""
        match message_of(line):
            case RunAccepted(folder):
                return Path(folder)
            case RunNotice(level, text):
                self.notices.append(text)
                if level == "warning":
                    warnings.warn(text, stacklevel=4)
            case refusal:
                self.refusal = _error_of(refusal)
        return None

    def _take_leave(self, status: int) -> None:
        with self._messages:
            for line in self._messages:
                self._take_in(line)
        with self._output:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        self.last_words = "\n".join([f"its kernel ended with {how}", *lines])
        self.stop()


def _error_of(refused: RunRefused) -> StrettoError:
    match refused.error:
        case "ConfigError":
            return ConfigError(refused.text, path=refused.path, value=refused.value)
        case "PluginError" | "ContractError":
            return PluginError(refused.text, kind=refused.kind, name=refused.name)
        case _:
            return RunError(refused.text)


def _override_texts(overrides: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `dotted.key=value` for each value of nested mappings, in JSON, which is valid YAML."""
    for key, value in overrides.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _override_texts(cast("Mapping[str, Any]", value), f"{path}.")
        else:
            yield f"{path}={json.dumps(_plain(value, path))}"


def _plain(value: Any, path: str) -> Any:
    """Return a value of a run file with types of JSON; raise ConfigError if JSON has no such value."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): _plain(item, f"{path}.{key}" if path else str(key)) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}.{index}") for index, item in enumerate(cast("list[Any]", value))]
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    raise ConfigError(f"{path}: {value!r} is no value of a run file", path=path, value=value)


@atexit.register
def _end_all() -> None:
    """Stop all runs when the program ends, and wait for their end."""
    kernels = list(_kernels)
    for kernel in kernels:
        kernel.stop()  # all at the same time
    for kernel in kernels:
        kernel.end()
