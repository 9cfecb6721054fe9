"""Runs in the simulation that a test drives as it drives real ones: wait for a step, kill, resume."""

import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
import yaml

from run_files import T, TestedRun
from stretto.assembly.compose import compose
from stretto.assembly.logs import printable_fields
from stretto.cli.make.operate import numbers_of, scale_request, stop_request
from stretto.errors import ConfigError, StrettoError, one_error
from stretto.kernel.durable.changes import assemble_in_force, compose_changes, put_into_force
from stretto.runs import life
from stretto.simulation import Tape
from stretto.simulation.loop import SimulatedProcess, current_process
from stretto.simulation.search import enter_fork
from stretto.simulation.universe import Universe
from stretto.user_code import importable

_SLICE_S = 0.02
"""Virtual seconds between two looks at a condition."""
_UNTIL_S, _END_S, _SETTLED_S = 60.0, 90.0, 2.0
"""Virtual seconds after which a condition, the end of a run, and that of its processes is late."""
_STATUS = {"completed": 0, "failed": 1, "raised": 1, "refused": 2, "interrupted": 130}


# ------------------------------------------------------------------------- in the universe's process


class _Driver:
    """Carries out what the test asks, in the forked process of a universe."""

    def __init__(self, universe: Universe, references: Mapping[str, str]) -> None:
        self._universe = universe
        self._references = references
        """What the run file says in the place of values, such as `${steps}`."""
        self._told = 0
        self._kernel: SimulatedProcess | None = None
        self._text: list[str] = []
        """What the kernels have printed."""
        self._console = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, sort_keys=False)
        self._json = structlog.processors.JSONRenderer()

    @property
    def _folder(self) -> Path:
        return self._universe.folder / "run"

    def begin(self) -> None:
        if self._references:
            (self._folder / "references.yaml").write_text(yaml.safe_dump(dict(self._references)))
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                self._log,
                *structlog.get_config()["processors"],
            ]
        )

    def _log(self, logger: object, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Log a line as the process would do: in its file, and the kernel's in its terminal, too."""
        process = current_process()
        if process is None or process.status is not None:
            return event
        line = structlog.processors.add_log_level(logger, name, {**event})
        line = structlog.processors.TimeStamper(fmt="iso", utc=True)(logger, name, line)
        line = structlog.processors.format_exc_info(logger, name, line)
        file = self._folder / "logs" / f"{process.name}.jsonl"
        with open(file, "a") as opened:  # noqa: PTH123 - not the simulated one, which ends and fills disks
            opened.write(f"{self._json(logger, name, {**line})}\n")
        if line["event"] == "worker failed":
            with open(file.with_suffix(".out"), "a") as opened:  # noqa: PTH123 - as above
                opened.write(f"{process.name}: {line['error']}\n")  # what the worker prints
        if process is self._kernel:
            fields = printable_fields(line)
            fields.pop("exception", None)
            self._text += str(self._console(logger, name, fields)).splitlines()
        return event

    def start(self, *overrides: str, accept_dataset: bool = False, expire_batch: bool = False) -> None:
        self._universe.server.calm()
        first = self._kernel is None
        kernels = self._first_kernels if first else partial(self._resumed_kernels, overrides, expire_batch)
        self._kernel = self._universe.start_kernel(kernels, accept_dataset=accept_dataset)

    def _first_kernels(self) -> life.Kernels:
        return life.kernels_to_the_end(assemble_in_force(self._folder), None, None)

    def _resumed_kernels(self, overrides: Sequence[str], expire_batch: bool) -> life.Kernels:
        assembly = assemble_in_force(self._folder)
        if overrides:
            assembly = compose_changes(assembly, overrides)
            put_into_force(self._folder, assembly.composed)
            run = dict(assembly.composed.document)
            self._universe.tape = msgspec.structs.replace(self._universe.tape, run=run)
        checkpoint = life.checkpoint_to_resume(assembly)
        return life.kernels_to_the_end(assembly, checkpoint, None, expire_batch=expire_batch)

    def advance(self, seconds: float) -> tuple[list[str], int | None]:
        """Let time pass. Return the new lines of what was printed, and the kernel's exit status."""
        loop = self._universe.loop
        if self._kernel is None or self._kernel.status is None:
            loop.run_until_complete(anyio.sleep(seconds))
            self._print_end()
        new, self._told = self._text[self._told :], len(self._text)
        return new, self._exit_status()

    def _print_end(self) -> None:
        summary = self._universe.summary
        if summary is None:
            return
        if summary["status"] == "refused":
            lines = "\n".join(f"error: {line}" for line in summary["reason"].splitlines())
        elif summary["status"] == "raised":
            lines = summary["reason"]
        else:
            lines = life.last_lines(summary, self._folder)
        self._text += lines.splitlines()

    def _exit_status(self) -> int | None:
        if self._kernel is None or self._kernel.status is None:
            return None
        summary = self._universe.summary
        return self._kernel.status if summary is None else _STATUS[summary["status"]]

    def now(self) -> float:
        return self._universe.loop.time()

    def stop_server(self) -> None:
        """Let the server be away until a kernel is started."""
        self._universe.server.go_down(1e6)

    def operate(self, verb: str, *arguments: str) -> tuple[int, str]:
        """Do what `stretto scale` or `stretto stop` does; exit status, and what it prints."""
        try:
            if verb == "scale":
                lines = self._answer(scale_request(self._folder, numbers_of(arguments))).done
            else:
                lines = (self._answer(stop_request(self._folder, now="--now" in arguments)).state,)
        except StrettoError as error:
            return (2 if isinstance(error, ConfigError) else 1), f"error: {error}\n"
        return 0, "".join(f"{line}\n" for line in lines)

    def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        with one_error():
            return self._universe.loop.run_until_complete(ask())

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        if self._exit_status() is not None:
            self._universe.server.calm()
        return self._universe.loop.run_until_complete(function(*args))

    def settle(self, seconds: float) -> list[str]:
        """Let time pass, and return the workers that live."""
        self._universe.loop.run_until_complete(anyio.sleep(seconds))
        return [each.name for each in self._universe.machine.alive()]

    def signal(self, name: str, number: int) -> None:
        process = self._kernel if name == "kernel" else self._named(name)
        assert process is not None
        process.context().run(self._signal, process, number)

    def _signal(self, process: SimulatedProcess, number: int) -> None:
        if number == signal.SIGKILL:
            process.end(-number)
            for each in [name for name in sys.modules if name.partition(".")[0] in importable.FILES]:
                del sys.modules[each]  # the process that takes its place runs the files of users again
        elif number == signal.SIGSTOP:
            process.stop(1e6)
        elif number == signal.SIGCONT:
            process.resume()
        else:
            process.signal(number)

    def pid(self, name: str) -> int | None:
        """Process id of a worker; None if it does not live."""
        process = self._named(name)
        return process.pid if process is not None else None

    def _named(self, name: str) -> SimulatedProcess | None:
        return next((each for each in reversed(self._universe.machine.alive()) if each.name == name), None)

    def violations(self) -> list[str]:
        assert self._universe.summary is not None
        return [*self._universe.judge(self._universe.summary), *self._universe.loop.errors]


def _serve(tape: Tape, references: Mapping[str, str], folder: Path, pipe: Connection) -> None:
    """Body of the forked process, which never returns."""
    try:
        enter_fork()
        universe = Universe(tape, folder)
        with universe.opened():
            driver = _Driver(universe, references)
            driver.begin()
            while True:
                verb, args, named = pipe.recv()
                try:
                    answer = getattr(driver, verb)(*args, **named)
                except Exception:  # noqa: BLE001 - the test gets it
                    pipe.send((False, traceback.format_exc()))
                else:
                    pipe.send((True, answer))
    except EOFError:
        pass
    except BaseException:  # noqa: BLE001 - the test gets it in place of its answer
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)


# ------------------------------------------------------------------------------------ in the test


class _Process:
    """A simulated process, with the part of psutil's interface that tests use."""

    def __init__(self, run: "SimulatedRun", name: str, pid: int = 0) -> None:
        self._run, self._name, self.pid = run, name, pid

    def send_signal(self, number: int) -> None:
        self._run.ask("signal", self._name, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """A kernel that was killed has ended at once."""


class SimulatedRun(TestedRun):
    def __init__(self, folder: Path, ask: Callable[..., Any]) -> None:
        super().__init__(folder)
        self.ask = ask
        self.process = _Process(self, "kernel")
        self._printed: list[str] = []
        self.ask("start")

    def resume(self, arguments: Sequence[str]) -> "SimulatedRun":
        overrides = [each for each in arguments if not each.startswith("--")]
        self.ask(
            "start",
            *overrides,
            accept_dataset="--accept-dataset" in arguments,
            expire_batch="--expire-batch" in arguments,
        )
        return self

    def worker(self, name: str) -> _Process | None:
        pid = self.ask("pid", name)
        return None if pid is None else _Process(self, name, pid)

    def until(self, condition: Callable[[], Any]) -> Any:
        for _ in range(round(_UNTIL_S / _SLICE_S)):
            if result := condition():
                return result
            assert self._advance() is None, f"ended early:\n{self.text()}"
        raise AssertionError(f"waited too long:\n{self.text()}")

    def end(self) -> int:
        for _ in range(round(_END_S / _SLICE_S)):
            if (status := self._advance()) is not None:
                return status
        raise AssertionError(f"does not end:\n{self.text()}")

    def _advance(self) -> int | None:
        new, status = self.ask("advance", _SLICE_S)
        self._printed += new
        return status

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._printed)

    def clock(self) -> float:
        return self.ask("now")

    def stop_server(self) -> None:
        self.ask("stop_server")

    def operate(self, verb: str, *arguments: str, status: int = 0) -> str:
        found, text = self.ask("operate", verb, *arguments)
        assert found == status, text
        return text

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        return self.ask("call", function, *args)

    def assert_nothing_is_left(self) -> None:
        assert self.ask("settle", _SETTLED_S) == []

    def assert_audit_is_clean(self) -> None:
        """Neither the audit nor an oracle of the universe finds anything wrong."""
        violations = self.ask("violations")
        assert violations == [], violations

    def assert_completed(self, steps: int, batch_size: int = 4, bound: int = 2) -> dict[str, Any]:
        summary = super().assert_completed(steps, batch_size, bound)
        self.assert_audit_is_clean()
        return summary


@contextmanager
def simulated_runs_in(tmp_path: Path, file: Path) -> Generator[Callable[..., SimulatedRun]]:
    """What `runs_in` of conftest.py gives, in the simulation."""
    forks: list[tuple[Connection, int]] = []

    def start_run(*overrides: str, resume: SimulatedRun | None = None, out: str = "out") -> SimulatedRun:
        if resume is not None:
            return resume.resume(overrides)
        world = tmp_path / f"{out}-world"
        world.mkdir()
        composed = compose(file, [*overrides, f"out={tmp_path}/{out}"])
        tape = Tape(seed=0, run=dict(composed.document), faults=(), may_fail=True)
        ask, pipe, pid = _fork(tape, dict(composed.references), world)
        forks.append((pipe, pid))
        return SimulatedRun(world / "run", ask)

    yield start_run
    for pipe, pid in forks:
        pipe.close()
        os.kill(pid, signal.SIGKILL)  # it may not see the end of the pipe, which later universes have, too
        os.waitpid(pid, 0)


def _fork(
    tape: Tape, references: Mapping[str, str], folder: Path
) -> tuple[Callable[..., Any], Connection, int]:
    """Start a universe in a forked process, and return how to ask it."""
    ours, its = Pipe()
    if not (pid := os.fork()):
        ours.close()
        _serve(tape, references, folder, its)
    its.close()

    def ask(verb: str, *args: Any, **named: Any) -> Any:
        ours.send((verb, args, named))
        fine, answer = ours.recv()
        assert fine, answer
        return answer

    return ask, ours, pid
