"""Runs in the simulation that a test drives as it drives real ones: wait for a step, kill, resume."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from run_files import TestedRun
from stretto.assembly.compose import compose
from stretto.testing.simulation import Tape
from stretto.testing.simulation.loop import SimulatedProcess
from stretto.testing.simulation.search import enter_fork
from stretto.testing.simulation.universe import Universe

_SLICE_S = 0.02
"""Virtual seconds between two looks at a condition."""
_STATUS = {"completed": 0, "failed": 1, "refused": 2, "interrupted": 130}


# ------------------------------------------------------------------------- in the universe's process


class _Driver:
    """Carries out what the test asks, in the forked process of a universe."""

    def __init__(self, universe: Universe) -> None:
        self._universe = universe
        self._told = 0
        self._kernel: SimulatedProcess | None = None

    def start(self) -> None:
        """Start a kernel."""
        self._kernel = self._universe.start_kernel()

    def advance(self, seconds: float) -> tuple[list[str], int | None]:
        """Let time pass. Return new lines of the log, and the kernel's exit status."""
        loop = self._universe.loop
        if self._kernel is None or self._kernel.status is None:
            loop.run_until_complete(anyio.sleep(seconds))
        new, self._told = self._universe.log[self._told :], len(self._universe.log)
        return new, self._exit_status()

    def _exit_status(self) -> int | None:
        if self._kernel is None or self._kernel.status is None:
            return None
        summary = self._universe.summary
        return self._kernel.status if summary is None else _STATUS[summary["status"]]

    def settle(self, seconds: float) -> list[str]:
        """Let time pass, and return the workers that live."""
        self._universe.loop.run_until_complete(anyio.sleep(seconds))
        return [each.name for each in self._universe.machine.alive()]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the newest process of that name."""
        process = self._kernel if name == "kernel" else self._named(name)
        assert process is not None
        if number == signal.SIGKILL:
            process.end(-number)
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
        """What oracles and audit find."""
        assert self._universe.summary is not None
        return [*self._universe.judge(self._universe.summary), *self._universe.loop.errors]


def _serve(tape: Tape, folder: Path, pipe: Connection) -> None:
    """Body of the forked process, which never returns."""
    try:
        enter_fork()
        universe = Universe(tape, folder)
        with universe.opened():
            driver = _Driver(universe)
            while True:
                verb, *args = pipe.recv()
                try:
                    answer = getattr(driver, verb)(*args)
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

    def __init__(self, run: SimulatedRun, name: str, pid: int = 0) -> None:
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
    """A run in a universe of its own."""

    def __init__(self, folder: Path, ask: Callable[..., Any], text: list[str]) -> None:
        super().__init__(folder)
        self.ask = ask
        self.process = _Process(self, "kernel")
        self._lines_of_log = text
        self.ask("start")

    def worker(self, name: str) -> _Process | None:
        """The process of a worker, if it lives."""
        pid = self.ask("pid", name)
        return None if pid is None else _Process(self, name, pid)

    def until(self, condition: Callable[[], Any], deadline_s: float = 60) -> Any:
        for _ in range(round(deadline_s / _SLICE_S)):
            if result := condition():
                return result
            assert self._advance() is None, f"ended early:\n{self.text()}"
        raise AssertionError(f"waited too long:\n{self.text()}")

    def end(self, deadline_s: float = 90) -> int:
        for _ in range(round(deadline_s / _SLICE_S)):
            if (status := self._advance()) is not None:
                return status
        raise AssertionError(f"does not end:\n{self.text()}")

    def _advance(self) -> int | None:
        new, status = self.ask("advance", _SLICE_S)
        self._lines_of_log += new
        return status

    def text(self) -> str:
        return "\n".join(self._lines_of_log)

    def assert_nothing_is_left(self, within_s: float = 2) -> None:
        assert self.ask("settle", within_s) == []

    def assert_audit_is_clean(self) -> None:
        assert self.ask("violations") == []

    def assert_completed(self, steps: int, batch_size: int = 4, bound: int = 2) -> dict[str, Any]:
        summary = super().assert_completed(steps, batch_size, bound)
        self.assert_audit_is_clean()
        return summary


@contextmanager
def simulated_runs_in(tmp_path: Path, file: Path) -> Generator[Callable[..., SimulatedRun]]:
    """What `runs_in` of conftest.py gives, in the simulation."""
    universes: dict[Path, tuple[Callable[..., Any], Connection, int]] = {}
    texts: dict[Path, list[str]] = {}

    def start_run(*overrides: str, resume: SimulatedRun | None = None, out: str = "out") -> SimulatedRun:
        if resume is not None:
            assert not overrides, "values do not change in the simulation"
            ask, _, _ = universes[resume.folder]
            return SimulatedRun(resume.folder, ask, texts[resume.folder])
        world = tmp_path / f"{out}-world"
        world.mkdir()
        document = compose(file, [*overrides, f"out={tmp_path}/{out}"]).document
        ask, pipe, pid = _fork(Tape(seed=0, run=dict(document), faults=()), world)
        universes[world / "run"] = ask, pipe, pid
        texts[world / "run"] = []
        return SimulatedRun(world / "run", ask, texts[world / "run"])

    yield start_run
    for _, pipe, pid in universes.values():
        pipe.close()
        os.kill(pid, signal.SIGKILL)  # it may not see the end of the pipe, which later universes have, too
        os.waitpid(pid, 0)


def _fork(tape: Tape, folder: Path) -> tuple[Callable[..., Any], Connection, int]:
    """Start a universe in a forked process, and return how to ask it."""
    ours, its = Pipe()
    if not (pid := os.fork()):
        ours.close()
        _serve(tape, folder, its)
    its.close()

    def ask(verb: str, *args: Any) -> Any:
        ours.send((verb, *args))
        fine, answer = ours.recv()
        assert fine, answer
        return answer

    return ask, ours, pid
