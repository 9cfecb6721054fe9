"""One universe: a run, its faults, and its outcome. The same tape always gives the same outcome."""

import asyncio
import hashlib
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import structlog
import torch

import stretto.kernel.kernel
import stretto.kernel.step_meter
from stretto.assembly.assembly import Assembly, new_run_id
from stretto.assembly.compose import Composed, compose_mapping
from stretto.bus.joining import operator_bootstrap
from stretto.bus.messages.events import Event
from stretto.bus.messages.operation import ScaleRun
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import lock_run
from stretto.cli.audit.audit import audit_run
from stretto.errors import RequestError, StrettoError
from stretto.kernel.durable.changes import write_values
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.ending import Interruptions
from stretto.machine.cores import CoreUse
from stretto.models import version_files
from stretto.models.tokenizer import load_tokenizer
from stretto.runs import life
from stretto.serving.intake import Intake
from stretto.simulation import processes
from stretto.simulation.faults import Tape, inject
from stretto.simulation.folds import FoldOracle
from stretto.simulation.loop import Deadlock, Livelock, SimulatedLoop, SimulatedProcess
from stretto.simulation.oracles import PLANTED, Oracle
from stretto.simulation.patches import World, patched, replaced
from stretto.simulation.run_file import simulated
from stretto.simulation.server import SimulatedServer
from stretto.user_code import environment, reward
from stretto.workers import context

_STANDS_STILL = ("stuck", "deadlock", "livelock")  # statuses of a run that makes no progress
_MOST_KERNELS = 10  # a universe ends after this many kernels
_PAUSES_S = (0.2, 3.0, 15.0)  # from the end of a kernel to the resumption of its run
_BETWEEN_KERNELS_S = 0.5  # time that a process needs to make its next kernel
_NUM_ROWS = 200  # of the default dataset
_PROGRESS = (b"BatchStarted", b"VersionPublished", b"EvaluationEnded")
"""Events that show progress: a run is stuck if none of them comes within the tape's `patience_s`."""


class Outcome(msgspec.Struct):
    """The result of a universe."""

    status: str
    reason: str
    violations: list[str] = []
    errors: list[str] = []
    """Unhandled exceptions."""
    digest: str = ""
    model: str = ""
    """Digest of the last version."""
    virtual_s: float = 0.0
    longest_wait_s: float = 0.0
    """Longest virtual time between events: a batch, version or evaluation in the journal, or a fault."""
    cpu_s: float = 0.0
    steps: int = 0
    callbacks: int = 0
    messages: int = 0
    kernels: int = 0
    log: list[str] = []
    waiting: list[str] = []
    """What each task waits for, if the run stands still; see `SimulatedLoop.waiting`."""

    @property
    def failed(self) -> bool:
        """Whether the outcome shows a bug of stretto."""
        return self.status != "completed" or bool(self.violations or self.errors)


class Universe:
    """A run in the simulation. Its `folder` is empty at first."""

    def __init__(self, tape: Tape, folder: Path) -> None:
        seed = tape.seed
        self.tape, self.folder = tape, folder
        self.loop = SimulatedLoop(seed)
        self.world = World(self.loop, seed)
        self.server = SimulatedServer(self.loop, seed)
        self.machine = processes.SimulatedMachine(self.world)
        self.log: list[str] = []
        self._rng = Random(f"pauses {seed}")
        self._kernels = 0
        self._has_lease: SimulatedProcess | None = None  # the kernel that last wrote its lease
        self._owner: SimulatedProcess | None = None
        """The newest kernel; None while another kernel is about to replace it."""
        self.at_next_lease: list[Callable[[], None]] = []
        """Functions to call as soon as a kernel owns the run."""
        self.summary: dict[str, Any] | None = None
        """Summary of the newest kernel; None while that kernel runs, or if it was killed."""
        self._began = self._expects_from = self.loop.time()  # the run should make progress from then on
        self._longest_wait_s = 0.0
        self.on_progress = lambda: None
        """Called at each batch, version and evaluation in the journal, and at each fault."""

    def be_patient(self, seconds: float) -> None:
        """Expect no progress of the run for `seconds`, and update the longest wait."""
        now = self.loop.time()
        self._longest_wait_s = max(self._longest_wait_s, now - self._expects_from)
        self._expects_from = max(self._expects_from, now + seconds)
        self.on_progress()

    def _watch(self, sender: str, subject: str, data: bytes, head: bytes) -> None:
        if any(kind in data for kind in _PROGRESS) and subject.endswith(".events"):
            self.be_patient(0)
        elif subject.endswith(".leases"):
            self._has_lease = self._owner
            due, self.at_next_lease = self.at_next_lease, []
            for call in due:
                call()

    def report(self, *words: object) -> None:
        """Add a line to the log and the trace."""
        text = " ".join(map(str, words))
        self.loop.note("log", text)
        self.log.append(f"{self.loop.time() - self._began:9.3f} {text}")

    def run(self) -> Outcome:
        """Run the universe until its run has ended for good or is stuck."""
        cpu_clock = time.process_time  # the real clock, which `opened` replaces
        cpu_began = cpu_clock()
        with self.opened():
            summary = self._live(self._kernels_in_turn())
            waiting = self.loop.waiting() if summary["status"] in _STANDS_STILL else []
            violations = self.judge(summary)
            self._note_files()
        return Outcome(
            status=summary["status"],
            reason=summary.get("reason", ""),
            violations=violations,
            errors=self.loop.errors,
            digest=self.loop.digest,
            model=self.oracle.model,
            virtual_s=round(self.loop.time() - self._began, 3),
            longest_wait_s=round(self._longest_wait_s, 3),
            cpu_s=round(cpu_clock() - cpu_began, 3),
            steps=self.oracle.steps,
            callbacks=self.loop.callbacks,
            messages=self.server.messages,
            kernels=self._kernels,
            log=self.log,
            waiting=waiting,
        )

    @contextmanager
    def opened(self) -> Generator[None]:
        """Put the simulated world in the place of the real one, and prepare the run."""
        torch.set_num_threads(1)  # a fork of a process with torch's threads waits for them for ever
        load_tokenizer(self.tape.run.get("model"))  # before `patched`: an import here starts a process
        processes.SimulatedLauncher.machine = self.machine
        streams = self.server.streams
        self.folds = FoldOracle(lambda run, number: streams[Subjects(run).log_stream].messages[number].data)
        with (
            patched(self.world),
            _replaced(self.server, self.folds),
            replaced([(version_files, "SHARED_MEMORY", self.folder / "weights")]),
            _logged(self.report),
        ):
            self._composed = compose_mapping(self._document())
            out = self.folder / "run"
            self._run = new_run_id(out)
            self.oracle = Oracle(self._composed.config.queue.max_staleness)
            self.server.observers += [self.oracle, self.folds, self._watch]
            inject(self, self.tape.faults)
            with lock_run(out / "bus"):
                write_values(out, self._composed)
            yield

    def judge(self, summary: dict[str, Any]) -> list[str]:
        """Return the violations that the oracles and the audit find in a run that has ended."""
        self.oracle.end(summary, self._ledgers(), self.tape)
        self.oracle.violations += self.server.strangers + self.folds.violations
        if summary["status"] == "completed":
            self.oracle.violations += self._audit()
            if (version := life.newest_checkpoint(self.folder / "run")[1].version) != self.oracle.steps:
                self.oracle.violations.append(f"completed with a checkpoint of version {version}")
        return self.oracle.violations

    def _ledgers(self) -> Iterator[dict[str, int]]:
        metrics = self.folder / "run" / "metrics.jsonl"
        for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
            values = msgspec.json.decode(line)
            if "ledger" in values:  # else the line is of an evaluation
                yield values["ledger"]

    def _note_files(self) -> None:
        for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            data = file.read_bytes()
            name = file.relative_to(self.folder)
            self.loop.note("file", name, len(data), hashlib.blake2b(data, digest_size=8).hexdigest())

    def _document(self) -> dict[str, Any]:
        (self.folder / "weights").mkdir()
        run = dict(self.tape.run)
        if "dataset" not in run:  # the default dataset: sums with 1
            rows = self.folder / "rows.jsonl"
            lines = (f'{{"prompt": "{row}+1=", "answer": "{row + 1}"}}\n' for row in range(_NUM_ROWS))
            rows.write_text("".join(lines))
            run["dataset"] = dataset = {"use": "jsonl", "path": str(rows)}
            if "evaluation" in run:
                run["evaluation"] = {**run["evaluation"], "dataset": dataset}
        return simulated(run, self.folder)

    def _live(self, life: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            return self.loop.run_until_complete(life)
        except Deadlock as error:
            return {"status": "deadlock", "reason": str(error)}
        except Livelock as error:
            return {"status": "livelock", "reason": str(error)}

    async def _kernels_in_turn(self) -> dict[str, Any]:
        """Start kernels in turn until the run has ended for good or is stuck; return the run's summary."""
        while True:
            kernel = self.start_kernel()
            while self._owner is kernel and not kernel.ended.done():
                left_s = self._expects_from + self.tape.patience_s - self.loop.time()
                if left_s <= 0:
                    reason = f"nothing new in the journal for {self.tape.patience_s:g} virtual seconds"
                    return {"status": "stuck", "reason": reason}
                futures = [kernel.ended, self._replaced]
                await asyncio.wait(futures, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            summary = self.summary
            if summary is not None and not _resumable(summary, first=self._kernels == 1):
                for replaced_kernel in self.machine.alive("kernel"):
                    if not (await asyncio.wait([replaced_kernel.ended], timeout=self.tape.patience_s))[0]:
                        return {"status": "stuck", "reason": "a kernel that was replaced does not end"}
                return summary
            if self._kernels == _MOST_KERNELS:
                return summary or {"status": "killed", "reason": "each kernel was killed"}
            if self._owner is None:
                continue
            self.report("RESUME", summary["reason"] if summary else "killed")
            full_until = max(self.world.files.full_until, self.server.weather.full_until)
            await anyio.sleep(max(self._rng.choice(_PAUSES_S), full_until - self.loop.time()))

    def start_kernel(
        self, kernels: Callable[[], life.Kernels] | None = None, *, accept_dataset: bool = False
    ) -> SimulatedProcess:
        """Do in a simulated process what `stretto run` or `stretto resume` does. `summary` is set when the
        process ends by itself. By default, `kernels` begin the run or continue from the newest checkpoint."""
        out, self.summary = self.folder / "run", None
        kernel = self._owner = SimulatedProcess(self.loop, "kernel")
        self._lock, self._replaced = lock_run(out / "bus"), self.loop.create_future()
        kernel.on_end.append(self._lock.close)
        self._kernels += 1
        self.be_patient(0)
        interruptions = Interruptions()
        kernel.on_signal.append(partial(self._interrupt, kernel, interruptions))
        self.oracle.batches_left = None

        async def live() -> dict[str, Any]:
            kernel_setups = (kernels or self._kernels_of_run)()
            try:
                setup = next(kernel_setups)
                while True:
                    setup.check_inputs(accept=accept_dataset)
                    self.folds.samples = setup.graph.samples
                    kernel_summary = await life.live_and_sum_up(setup, interruptions)
                    if kernel_summary["status"] == "repeated":
                        await anyio.sleep(_BETWEEN_KERNELS_S)
                    setup = kernel_setups.send(kernel_summary)
            except StopIteration as end:
                return end.value

        async def main() -> None:
            try:
                summary = await live()
            except StrettoError as error:
                summary = {"status": "refused", "reason": str(error)}
            except Exception as error:  # noqa: BLE001 - a bug of stretto, which the outcome shows
                summary = {"status": "raised", "reason": "".join(traceback.format_exception(error))}
            if self._owner is kernel:
                self.summary = summary
            else:
                self.report("REPLACED", summary["status"], summary["reason"])
            kernel.end(0)

        self._task = self.loop.create_task(main(), context=kernel.context())
        return kernel

    def _kernels_of_run(self) -> life.Kernels:
        out = self.folder / "run"
        resumed = None if self._kernels == 1 else life.newest_checkpoint(out)
        return life.kernels_to_the_end(Assembly(self._composed, folder=out, run=self._run), resumed, None)

    def replace(self, kernel: SimulatedProcess, seconds: float) -> None:
        """Stop a kernel for `seconds` while another one resumes the run, as if the lock did not work."""
        kernel.stop(seconds)
        if self._owner is kernel is self._has_lease:
            self._lock.close()
            self._owner = None
            self._replaced.set_result(None)

    def _audit(self) -> list[str]:
        report = audit_run(self.folder / "run")
        # A kernel replaced after a step's event may add the step's line after its rival has added the line.
        rival = any(fault.kind == "rival" for fault in self.tape.faults)
        checks = [check for check in report.checks if not (rival and check.name == "metrics.jsonl")]
        return [f"audit, {check.name}: {violation}" for check in checks for violation in check.violations]

    def _interrupt(self, kernel: SimulatedProcess, interruptions: Interruptions, number: int) -> None:
        """Send a signal to a kernel. A second signal ends the process if no kernel obeys signals by then."""
        if self._owner is kernel:
            self.oracle.batches_left = 1
        if interruptions.received and not interruptions.obeyed:
            kernel.end(-number)
        else:
            interruptions.receive(number, None)

    def scale(self, role: str, number: int) -> None:
        """Ask the kernel for another number of processes, as `stretto scale` does."""
        try:
            bootstrap = operator_bootstrap(self.folder / "run" / "bus")
        except StrettoError:
            return  # no kernel has begun yet
        names = Subjects(bootstrap.run)
        subject = names.kernel("operator", "scale")
        reply = f"{names.answers('operator', 'kernel')}.simulation.{self.loop.callbacks}"
        data = msgspec.msgpack.encode(ScaleRun(bootstrap.token, {role: number}))
        self.server.send("operator", subject, reply, b"", data)


def _resumable(summary: dict[str, Any], *, first: bool) -> bool:
    """Return whether a run ended because of an injected fault, so that it is resumed: a signal, a full disk,
    planted failures, or a trainer that the first kernel lost while the run was starting."""
    reason = summary["reason"]
    is_full = "No space left" in reason or "insufficient resources" in reason
    is_by_fault = (first and "was lost while the run was starting" in reason) or is_full or PLANTED in reason
    return summary["status"] == "interrupted" or (summary["status"] != "completed" and is_by_fault)


def _replaced(server: SimulatedServer, folds: FoldOracle) -> AbstractContextManager[None]:
    engine = import_module("stretto_mock.inference")  # by its name, because core knows no plugin
    composed: dict[bytes, Composed] = {}

    def compose_once(mapping: Mapping[str, Any]) -> Composed:
        """Compose each mapping only once: all workers have the same run."""
        if (key := msgspec.msgpack.encode(mapping)) not in composed:
            composed[key] = compose_mapping(mapping)
        return composed[key]

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if server.happens(server.weather.failing):
                raise RequestError(PLANTED)
            return function(*args)

        return call

    def hear(writer: JournalWriter, event: Event) -> None:
        folds.hear(writer, event)  # a bound method of the oracle would not get the writer as an argument

    places: list[tuple[Any, str, Any]] = [
        (reward.Scorer, "answer", failing(reward.Scorer.answer)),
        (environment, "react", failing(environment.react)),
        (Intake, "accept", failing(Intake.accept)),
        (stretto.kernel.step_meter, "CoreMeter", _NoMeter),
        (life, "View", _NoView),
        (context, "compose_mapping", compose_once),
        (reward, "compose_mapping", compose_once),
        (stretto.kernel.kernel, "apply", folds.apply),
        (JournalWriter, "hear", hear),
        (engine, "_TICK_S", 0.03),  # a finer tick only costs more callbacks
    ]
    return replaced(places)


@contextmanager
def _logged(report: Callable[..., None]) -> Generator[None]:
    def log(logger: object, name: str, event: Any) -> Any:
        who, text = event.pop("worker", "kernel"), event.pop("event")
        report(who, name, text, *(f"{key}={value}" for key, value in event.items()))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, log])
    try:
        yield
    finally:
        structlog.configure(**before)


class _NoView:
    def __init__(self, *args: object) -> None:
        del args

    async def run(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class _NoMeter:
    def read(self) -> CoreUse:
        return CoreUse(0.5, 0.5, 0.5, {})
