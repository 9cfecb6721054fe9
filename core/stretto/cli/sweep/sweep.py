"""`stretto sweep`: a run for every combination of values and seeds, as many at once as the machine carries.

Each run is a process of its own, `stretto run` or `stretto resume`, and has its own folder:

    manifest.json      the runs: the name of each, and its values
    lr-1e-4_seed-1/    a run
    lr-1e-4_seed-1.txt what its process printed
    sweep.json         the report

The command can be repeated: it skips the runs that are complete, resumes those that ended early, and begins
the others. Other values extend the sweep.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from stretto.assembly.assembly import Assembly, Worker
from stretto.assembly.compose import compose
from stretto.assembly.worker_numbers import EVALUATOR
from stretto.base.cores import available_cores
from stretto.base.private_file import write_private
from stretto.cli.start.checks import faults_and_warnings
from stretto.cli.sweep.sweep_grid import PlannedRun
from stretto.cli.sweep.sweep_view import SweepView
from stretto.errors import ConfigError, StrettoError
from stretto.kernel.durable.changes import differences, is_complete
from stretto.launcher import visible_gpus
from stretto.run_folder import RunFolder

_ASSUMED_GB = 1.0
"""Memory of a process whose section does not set `memory_gb`, in GiB."""
_LOOK_S = 0.25
"""Seconds between two looks at the processes."""
_MANIFEST = "manifest.json"


class ManifestRun(msgspec.Struct, frozen=True):
    """One run in the manifest."""

    combination: str
    values: dict[str, str]
    seed: str | None
    overrides: tuple[str, ...]


class SweepManifest(msgspec.Struct, frozen=True):
    """The content of `manifest.json`: every run that the folder has, or will have."""

    file: str
    runs: dict[str, ManifestRun]


@dataclass(frozen=True)
class Needs:
    """What one run needs of a machine while it is under way."""

    cores: int
    memory_gb: float
    gpus: int


@dataclass(frozen=True)
class Machine:
    """What a machine has for runs."""

    cores: float
    memory_gb: float
    gpus: tuple[str, ...]
    """Names, as in CUDA_VISIBLE_DEVICES."""

    def fits(self, needs: Needs) -> bool:
        """Return whether this is enough for a run."""
        return (
            self.cores >= needs.cores and self.memory_gb >= needs.memory_gb and len(self.gpus) >= needs.gpus
        )

    def without(self, needs: Needs, gpus: Sequence[str]) -> Machine:
        """Return what is left beside a run that has these GPUs."""
        return Machine(
            self.cores - needs.cores,
            self.memory_gb - needs.memory_gb,
            tuple(gpu for gpu in self.gpus if gpu not in gpus),
        )


def this_machine() -> Machine:
    """Return what this machine has now."""
    cores = available_cores()
    return Machine(cores, psutil.virtual_memory().available / 2**30, tuple(visible_gpus(os.environ)))


def needs_of(assembly: Assembly) -> Needs:
    """Return what a run needs: the threads of its engines, the memory of its processes, its GPUs."""
    every = assembly.workers
    computing = [each for each in every if each.role in ("trainer", "inference") and each.id != EVALUATOR]
    engines = [worker.resources.threads for worker in computing]
    memory_gb = sum(worker.resources.memory_gb or _ASSUMED_GB for worker in every) + _ASSUMED_GB
    return Needs(sum(engines), memory_gb, _gpus_of(every))


def _gpus_of(run_workers: Sequence[Worker]) -> int:
    """Return the number of GPUs that hold these workers. As with the launcher, workers share a GPU if the sum
    of their shares allows it, and large shares come first."""
    free: list[float] = []
    for worker in sorted(run_workers, key=lambda worker: -worker.resources.share):
        share = worker.resources.share
        fitting = [index for index, left in enumerate(free) if left >= share - 1e-9]
        missing = worker.resources.gpus - len(fitting)
        if missing > 0:
            fitting += range(len(free), len(free) + missing)
            free += [1.0] * missing
        for index in fitting[: worker.resources.gpus]:
            free[index] -= share
    return len(free)


@dataclass(frozen=True)
class _Running:
    """A run under way."""

    process: subprocess.Popen[bytes]
    needs: Needs
    gpus: tuple[str, ...]


class Sweep:
    """A sweep and its folder.

    Args:
        file: the run file.
        runs: the runs of this command's grid.
        folder: the sweep's folder.

    Raises:
        ConfigError: if a run is wrong, or if the folder holds a run of this name with other values.
    """

    def __init__(self, file: Path, runs: Sequence[PlannedRun], folder: Path) -> None:
        self.file = file
        self.folder = folder
        self.runs = {run.name: run for run in runs}
        self.assemblies = {run.name: self._assemble(run) for run in runs}
        self._running: dict[str, _Running] = {}
        self._interrupts = self._obeyed = 0

    def check(self) -> list[str]:
        """Check every combination, once for all its seeds, and the values of the runs that exist already.
        Return the warnings.

        Raises:
            ConfigError: for all errors of the first combination that has any; the text names the combination.
        """
        documents: dict[str, str] = {}
        warnings: dict[str, None] = {}
        checked: set[str] = set()
        for name, assembly in self.assemblies.items():
            self._check_existing(name, assembly.composed.document)
            key = repr({**assembly.composed.document, "out": None})
            if key in documents:
                raise ConfigError(f"{documents[key]} and {name} are the same run: their values are equal")
            documents[key] = name
            if (combination := self.runs[name].combination) in checked or self.is_complete(name):
                continue
            checked.add(combination)
            resumed = (self.folder / name / "config.yaml").exists()
            faults, found = faults_and_warnings(assembly, starting=True, resumed=resumed)
            if faults:
                raise ConfigError("\n".join(f"{name}: {fault}" for fault in faults))
            warnings |= dict.fromkeys(found)
        return list(warnings)

    def run(self, jobs: int | None, view: SweepView) -> int:
        """Do all runs that are not complete, and return the exit status: 0 if all are complete at the end,
        130 after an interrupt, else 1.

        Args:
            jobs: the most runs at once; None for as many as this machine has cores, memory and GPUs for.

        Raises:
            ConfigError: if another process works on the sweep, or owns one of its runs.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._owned(), self._signals():
            self._write_manifest()
            waiting = [name for name in self.runs if not self.is_complete(name)]
            if busy := next((name for name in waiting if self._state(name) == "running"), None):
                raise ConfigError(f"{busy}: another process has this run under way in {self.folder / busy}")
            machine = this_machine()
            with view.shown():
                while (waiting and not self._interrupts) or self._running:
                    if not self._interrupts:
                        self._start_fitting(waiting, machine, jobs, view)
                    self._pass_interrupts_on(view)
                    self._reap(view)
                    view.draw(self._running.keys())
                    time.sleep(_LOOK_S)
        if self._interrupts:
            return 130
        return 0 if all(self.is_complete(name) for name in self.runs) else 1

    def is_complete(self, name: str) -> bool:
        """Return whether a run has done all its steps."""
        return is_complete(self.folder / name, self.assemblies[name].config.steps)

    def planned(self) -> dict[str, ManifestRun]:
        """Return every run of the sweep, also those of earlier commands, by name."""
        file = self.folder / _MANIFEST
        try:
            former = msgspec.json.decode(file.read_bytes(), type=SweepManifest).runs if file.exists() else {}
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file} is not the manifest of a sweep: {error}") from error
        present = {
            name: ManifestRun(run.combination, dict(run.values), run.seed, run.overrides)
            for name, run in self.runs.items()
        }
        return {**former, **present}

    # ------------------------------------------------------------------------------------ private

    def _assemble(self, run: PlannedRun) -> Assembly:
        try:
            return Assembly(compose(self.file, [*run.overrides, f"out={_quoted(self.folder / run.name)}"]))
        except StrettoError as error:
            raise ConfigError(f"{run.name}: {error}") from error

    def _check_existing(self, name: str, document: Mapping[str, Any]) -> None:
        """Refuse a folder that holds a run with other values."""
        file = self.folder / name / "config.yaml"
        if not file.exists():
            return
        changes = differences(yaml.safe_load(file.read_text()), document)
        changes.pop("out", None)  # the folder may have been moved
        if changes:
            listed = ", ".join(f"{key} is {former}, now {new}" for key, (former, new) in changes.items())
            raise ConfigError(
                f"{name}: {file.parent} holds a run with other values ({listed}); give the sweep another "
                "folder with --out, or the previous values"
            )

    def _state(self, name: str) -> str:
        folder = self.folder / name
        return RunFolder(folder).state if (folder / "config.yaml").exists() else ""

    def _write_manifest(self) -> None:
        manifest = SweepManifest(str(self.file.absolute()), self.planned())
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_private(self.folder / _MANIFEST, data + b"\n")

    def _start_fitting(self, waiting: list[str], machine: Machine, jobs: int | None, view: SweepView) -> None:
        """Start the next runs, in order, as long as they fit beside those under way."""
        while waiting and (jobs is None or len(self._running) < jobs):
            free = machine
            for running in self._running.values():
                free = free.without(running.needs, running.gpus)
            needs = needs_of(self.assemblies[waiting[0]])
            if jobs is not None:  # the user knows what cores and memory allow; GPUs are exclusive
                needs = replace(needs, cores=0, memory_gb=0.0)
            if self._running and not free.fits(needs):
                return
            name = waiting.pop(0)
            gpus = free.gpus[: needs.gpus]
            self._running[name] = _Running(self._start(name, gpus), needs, gpus)
            view.started(name)

    def _start(self, name: str, gpus: Sequence[str]) -> subprocess.Popen[bytes]:
        folder = self.folder / name
        if (folder / "config.yaml").exists():
            arguments = ["resume", str(folder)]
        else:
            arguments = ["run", str(self.file), *self.runs[name].overrides, f"out={_quoted(folder)}"]
        with folder.with_name(f"{name}.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "stretto", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})},
                start_new_session=True,  # the terminal's signals reach the runs through this process, once
            )

    def _reap(self, view: SweepView) -> None:
        for name, running in list(self._running.items()):
            if (status := running.process.poll()) is not None:
                del self._running[name]
                view.ended(name, status)

    @contextmanager
    def _owned(self) -> Generator[None]:
        """Own the sweep's folder for the duration of the block."""
        with (self.folder / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another `stretto sweep` works in {self.folder}; wait for its end"
                ) from None
            yield

    @contextmanager
    def _signals(self) -> Generator[None]:
        """Count the signals that end the sweep, for the duration of the block."""

        def note(number: int, frame: Any) -> None:
            del number, frame
            self._interrupts += 1

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it stays ignored
            numbers.append(signal.SIGHUP)
        former = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _pass_interrupts_on(self, view: SweepView) -> None:
        """Send each interrupt to the runs: the first drains them, the second ends them at once."""
        while self._obeyed < self._interrupts:
            self._obeyed += 1
            for running in self._running.values():
                running.process.send_signal(signal.SIGINT)
            if self._running:
                view.interrupted(len(self._running), again=self._obeyed > 1)


def _quoted(folder: Path) -> str:
    """Return a path as a YAML text."""
    return "'" + str(folder.absolute()).replace("'", "''") + "'"
