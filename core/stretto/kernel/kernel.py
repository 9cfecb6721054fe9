"""The kernel: the process that owns a run. The I/O around the scheduler; it never touches token data.

It starts the bus and the workers, carries out the scheduler's commands, keeps journal and checkpoints,
and sees to it that nothing is left behind, however the run ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import structlog
import yaml
from anyio.abc import TaskGroup, TaskStatus

from stretto.algorithm import Algorithm
from stretto.assembly.compose import Composed, compose
from stretto.assembly.dataflow import Graph, graph_of
from stretto.assembly.logs import log_to
from stretto.assembly.placement import Placement
from stretto.assembly.plan import context_of, run_folder, workers
from stretto.bus import messages
from stretto.bus.client import Bus, connect
from stretto.bus.messages import (
    AbortTicket,
    Answers,
    Beacon,
    GroupDone,
    GroupFailed,
    Heartbeat,
    Join,
    JournalBatch,
    JournalChange,
    JournalEvaluation,
    JournalStep,
    KernelLease,
    Leaving,
    Progress,
    Purpose,
    RowRef,
    Subjects,
    SwapDone,
    Ticket,
    TicketStarted,
    Welcome,
)
from stretto.bus.server import Bootstrap, NatsServer, foreign_bootstrap, lock_run
from stretto.dataset import Dataset
from stretto.errors import BusError, ConfigError, Refused, RunError, leaves
from stretto.kernel.advice import Adviser
from stretto.kernel.canary import EngineErrors
from stretto.kernel.changes import differences, is_complete, newest_values, values_file, write_values
from stretto.kernel.checkpoint import KernelState, checkpoint_name, newest_intact, prune, writing
from stretto.kernel.engines import Engines
from stretto.kernel.fleet import Fleet, FleetMember
from stretto.kernel.lending import Wish
from stretto.kernel.recovery import read_journal, repeat_journal
from stretto.kernel.report import Report, Status
from stretto.kernel.scheduler import (
    Command,
    EvaluationDone,
    Fail,
    Finish,
    HeldBack,
    Issue,
    Scheduler,
    SchedulerSettings,
    StartBatch,
    Withdraw,
)
from stretto.kernel.trainers import Trainers
from stretto.kernel.view import View, final_lines, terminal
from stretto.launcher import ROLES, Role
from stretto.weights import WeightsNote, WeightsTransport

__all__ = ["exit_status", "resume_to_end", "run_through", "run_to_end"]

log = structlog.get_logger()

_SAY_S = 10.0
"""After so long without news while workers start, it is said who is waited for."""
_MOST_SKIPPED = 5
"""Steps in a row whose gradient may be not finite before the run stops."""
_START_S = 900.0
"""Deadline for all workers to be ready, models loaded."""
_LEAVE_S = 8.0
"""What workers get to leave by themselves at the end."""
_TURN_S = 30.0
"""The first turn of an evaluation at a single engine; less where workflows have less time."""
_TURNS_PER_WORKFLOW = 10
_ATTEMPTS_PER_KERNEL = 1000
"""Attempts of a resumed kernel's tickets begin at its lease_epoch times this."""


def run_to_end(composed: Composed) -> int:
    """Train a run that nothing stands against; returns the exit status."""
    return _told(*run_through(composed))


def run_through(composed: Composed) -> tuple[dict[str, Any], Path]:
    """The same, and nothing is printed; returns its summary and its folder."""
    folder = run_folder(composed.config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_values(folder, composed)
    except OSError as error:
        raise ConfigError(f"{composed.place('out')}: cannot write there: {error}", path="out") from error
    return _live(Kernel(composed, folder, resumed=None)), folder


def resume_to_end(folder: Path) -> int:
    """Go on with a run from its newest intact checkpoint and its journal; returns the exit status.

    Where the checkpoint is of former values, a kernel of theirs first repeats what the journal has of them.

    Raises:
        ConfigError: if the folder holds no run, or none that can go on.
    """
    folder = folder.absolute()
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds no run: it has no config.yaml")
    composed = compose(folder / "config.yaml")
    if is_complete(folder, composed.config.steps):
        raise ConfigError(
            f"the run in {folder} is complete: there is nothing to go on with; `stretto resume {folder} "
            "steps=…` gives it more steps"
        )
    newest, found = newest_values(folder), _newest_checkpoint(folder)
    number = min(found[1].values, newest)
    while number < newest:
        former = compose(values_file(folder, number))
        kernel = Kernel(former, folder, resumed=found, values=number, goes_on=False)
        summary = _live(kernel)
        if summary["status"] != "repeated":
            return _told(summary, folder)
        number, found = kernel.next_values or newest, _newest_checkpoint(folder)
    return _told(_live(Kernel(composed, folder, resumed=found, values=newest)), folder)


def _newest_checkpoint(folder: Path) -> tuple[Path | None, KernelState]:
    return newest_intact(folder / "checkpoints") or (None, KernelState.initial())


def exit_status(summary: Mapping[str, Any]) -> int:
    """That of the command whose run ended so."""
    return {"completed": 0, "interrupted": 130}.get(summary["status"], 1)


def _live(kernel: Kernel) -> dict[str, Any]:
    log_to(kernel.folder / "logs" / "kernel.jsonl", console=not terminal(), run=kernel.run, role="kernel")
    return anyio.run(kernel.live)


def _told(summary: Mapping[str, Any], folder: Path) -> int:
    lines = final_lines(summary, folder)
    if summary["status"] == "interrupted":
        lines += f"\ngo on with it: stretto resume {shlex.quote(str(folder))}"
    try:
        print(lines, flush=True)
    except OSError:  # whoever read the output is gone; the run is not worse for it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_status(summary)


class Kernel:
    """One life of a run's owner: from the start of its processes to the last one's end."""

    def __init__(
        self,
        composed: Composed,
        folder: Path,
        resumed: tuple[Path | None, KernelState] | None,
        *,
        values: int = 1,
        goes_on: bool = True,
    ) -> None:
        """One that lives next.

        Args:
            values: number of the run's values that `composed` has.
            goes_on: train on when the journal is repeated. Else write a checkpoint and end, since other
                values come next; `next_values` is then their number, if the journal knows it.
        """
        config = composed.config
        self.next_values: int | None = None
        self._values = values
        self._goes_on = goes_on
        self.folder = folder
        self.run = _run_id(folder)
        self._composed = composed
        self._config = config
        self._resumed = resumed
        self._names = Subjects(self.run)
        self._context = context_of(config, run=self.run, folder=str(folder))
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._datasets: dict[str, Dataset] = {
            path: composed.make(path, self._context)
            for path in ("dataset", "evaluation.dataset")
            if path in composed.components
        }
        algorithm: Algorithm = composed.make("algorithm", self._context)
        self._graph = graph_of(algorithm.calls(), algorithm.models)
        self._placement = Placement(config, self._graph)
        started = workers(config, self._placement)
        self._workers = started if goes_on else [each for each in started if each.role == "trainer"]
        self._transport: WeightsTransport = composed.make("weights", self._context)
        self._scheduler = Scheduler(_settings(composed, self._datasets, self._graph), algorithm.keep)
        self._fleet = Fleet(
            composed.make("launcher", self._context),
            folder / "bus",
            self._logs,
            max_restarts=config.launcher.max_restarts,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
        )
        trackers = [composed.make(path, self._context) for path in composed.components if "trackers." in path]
        self._report = Report(
            folder,
            self.run,
            self._scheduler,
            self._fleet,
            trackers,
            resumed[1] if resumed else None,
            sampled=self._graph.samples,
            canary=config.inference.canary,
            adviser=Adviser(composed.document),
        )
        self._view = View(config.name, config.steps, self._report, self._scheduler, self._fleet)
        self._engine_errors = EngineErrors()
        self._lease_epoch = 0
        self._incarnation = resumed[1].incarnation if resumed else 0
        self._log_sequence = 0
        """Last message of the log that the scheduler has taken in."""
        self._checkpointed = resumed[1].version if resumed else -1
        self._newest_checkpoint = resumed[0].name if resumed and resumed[0] else ""
        if config.steps == 0:
            self._checkpointed = 0  # nothing will have been trained: there is nothing to save
        self._checkpointing = anyio.Lock()
        self._queued: dict[tuple[Purpose, int, int], int] = {}
        """(purpose, ticket, attempt) -> sequence number in the work queue."""
        self._log_at_issue: dict[int, int] = {}
        """Training ticket -> last message of the log known when it was issued: its data lies beyond."""
        self._log_at_evaluation: int | None = None
        """The same of the evaluation under way."""
        self._todo = anyio.Event()
        self._changed = anyio.Event()
        self._over = anyio.Event()
        self._started = False
        self._interrupted = False
        self._hurried = False
        self._status: Status = "running"
        self._reason = ""

    # ------------------------------------------------------------------------------------- life

    async def live(self) -> dict[str, Any]:
        """The whole run; returns its summary. Whatever happens, no process is left behind."""
        error: BaseException | None = None
        (self.folder / "summary.json").unlink(missing_ok=True)  # a former life's
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks: TaskGroup = tasks
                await tasks.start(self._obey_signals)  # before there is anything to be left behind
                tasks.start_soon(self._view.run)
                try:
                    await self._live()
                finally:
                    self._view.stop()
                tasks.cancel_scope.cancel()
        except Exception as raised:
            error = leaves(raised)[0]
            self._end("failed", self._composed.explain(error, self._logs / "kernel.jsonl"))
            log.error("run failed", exc_info=error)
        summary = self._report.finish(self._status, self._reason)
        if self._status == "failed":
            self._tell_plugins("stretto_run_failed", summary=summary, error=error or RunError(self._reason))
        elif self._status != "repeated":
            self._tell_plugins("stretto_run_finished", summary=summary)
        return summary

    async def _live(self) -> None:
        async with self._server():
            bootstrap = Bootstrap.read(self.folder / "bus" / "kernel.json")
            async with connect(bootstrap, self._names.inbox("kernel"), name="kernel") as bus:
                await self._open_bus(bus)
                if not self._goes_on and await self._is_repeated():
                    self._end("repeated", "")
                    return
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._beacons)
                    tasks.start_soon(self._fleet.watch)
                    tasks.start_soon(self._carry_out, tasks)
                    try:
                        await self._fleet.launch(self._workers, tasks)
                        tasks.start_soon(self._begin, tasks)
                        await self._over.wait()
                    finally:
                        with anyio.CancelScope(shield=True):
                            await self._dismiss()
                        self._report.refused = bus.refused
                    tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def _server(self) -> AsyncGenerator[None]:
        """The run's lock, the bundled server unless there is another, and nothing left of its weights."""
        folder = self.folder / "bus"
        lock = lock_run(folder)
        server = None
        try:
            self._transport.clean()
            if self._config.bus.url is None:
                server = await NatsServer.start(folder, self.run, self._config.bus, self._logs)
            else:
                foreign_bootstrap(folder, self.run, self._config.bus, self._logs)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                if server is not None:
                    await server.stop()
            self._transport.clean()
            lock.close()

    async def _open_bus(self, bus: Bus) -> None:
        """Streams, state, the lease, and what workers may ask."""
        self._bus, names = bus, self._names
        await bus.make_state(names.state_bucket)
        self._lease_epoch = await bus.put_state(names.state_bucket, "kernel", KernelLease(str(self.folder)))
        tickets = [names.ticket("train"), names.ticket("eval")]
        await bus.make_queue(names.tickets_stream, tickets, redeliver_s=60)
        await bus.make_log(names.log_stream, [names.trajectories, names.groups, names.kept_answers])
        await bus.make_log(names.journal_stream, [names.journal])
        self._trainers = Trainers(bus, names, self._placement, self._lease_epoch)
        self._engines = Engines(
            bus,
            names,
            self._fleet,
            self._lease_epoch,
            on_swapped=self._swapped,
            on_callable=self._touch,
            turn_s=min(_TURN_S, self._config.workflow.timeout_s / _TURNS_PER_WORKFLOW),
        )
        for role in ROLES:
            await bus.serve(names.kernel(role, "join"), Join, partial(self._welcome, role))
            await bus.subscribe(names.kernel(role, "heartbeat"), Heartbeat, self._fleet.beat)
            await bus.subscribe(names.kernel(role, "leaving"), Leaving, self._fleet.leaving)
        await bus.subscribe(names.ticket_started, TicketStarted, self._ticket_started)
        await bus.subscribe(names.progress, Progress, self._progress)

    async def _begin(self, tasks: TaskGroup) -> None:
        """From processes that start to the first ticket."""
        with anyio.move_on_after(_START_S) as starting:
            await self._until_trainers_ready()
        if starting.cancelled_caught:
            raise RunError(f"not ready after {_START_S:.0f} s: {self._fleet.starting}")
        if self._resumed is None:
            notes = await self._trainers.load(None, 0)
        else:
            self._view.note = "repeating the journal"
            recovered = await repeat_journal(
                self._bus,
                self._names,
                self._scheduler,
                self._trainers,
                self._resumed,
                values=self._values,
                attempts_from=self._lease_epoch * _ATTEMPTS_PER_KERNEL,
                on_change=self._change_values,
                on_repeated=lambda start, result, divergence: self._report.step(
                    start, result, generate_busy_s=0.0, divergence=divergence
                ),
            )
            await self._bus.purge(self._names.tickets_stream)
            notes, self._incarnation = recovered.notes, recovered.incarnation
            self._log_sequence = recovered.log_sequence
            self._engines.remember(notes)
            if not self._goes_on:
                if recovered.repeated:
                    await self._need_checkpoint(notes[-1])
                self.next_values = recovered.next_values
                self._end("repeated", "")
                return
            log.info("resumed", version=notes[-1].version, repeated=recovered.repeated)
            self._report.recall()
        self._engines.remember(notes)
        self._engines.announce(notes[-1])
        tasks.start_soon(self._engines.look_after_lending)
        if self._resumed is not None and self._incarnation != self._resumed[1].incarnation:
            await self._checkpoint()  # without it another crash would begin this incarnation a second time
        self._view.note = "waiting for all workers"
        with anyio.move_on_after(_START_S) as starting:
            await self._until_all_callable()
        if starting.cancelled_caught:
            raise RunError(f"not ready after {_START_S:.0f} s: {self._fleet.starting}")
        self._view.note = ""
        self._started = True
        self._tell_plugins("stretto_run_started", config=self._config)
        tasks.start_soon(self._follow_log)
        self._report.first_ticket()
        self._scheduler.start()
        self._obey()

    async def _is_repeated(self) -> bool:
        """Whether the journal has nothing to repeat with these values; then no worker need be started."""
        assert self._resumed is not None
        state = self._resumed[1]
        journal = await read_journal(self._bus, self._names, state, self._values)
        self.next_values = journal.next.values if journal.next else None
        return self._values == state.values and not journal.batches

    async def _change_values(
        self, notes: tuple[WeightsNote, ...], taken: int, recorded: JournalChange | None
    ) -> None:
        """Go over to these values: the journal says so, and a checkpoint is what they begin with.

        Args:
            notes: of older versions that evaluations need, and of the weights, which come last.
            taken: last message of the log that the ledger has taken in.
            recorded: what the journal has of it already, if a kernel was here before.
        """
        note = notes[-1]
        if note.version > self._config.steps:
            raise RunError(
                f"steps is {self._config.steps}, and the run has come to {note.version}: resume it with more"
            )
        if recorded is None:
            former = yaml.safe_load(values_file(self.folder, self._values - 1).read_text())
            changed = differences(former, self._composed.document)
            entry = JournalChange(self._incarnation, note.version, self._values, taken, changed)
            await self._journal(entry, "change", note.version)
            log.info(
                "values changed", version=note.version, **{key: new for key, (_, new) in changed.items()}
            )
        self._log_sequence = taken
        self._engines.remember(notes)
        await self._need_checkpoint(note, checkpoint_name(note.version, self._values))

    async def _until_trainers_ready(self) -> None:
        wanted = {worker.id for worker in self._workers if worker.role == "trainer"}
        while wanted - {member.worker for member in self._fleet.of("trainer")}:
            await self._changed.wait()

    async def _until_all_callable(self) -> None:
        wanted = {worker.id for worker in self._workers}
        while missing := wanted - {each.worker for each in self._fleet.members.values() if each.callable}:
            with anyio.move_on_after(_SAY_S) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                log.info("waiting", workers=", ".join(sorted(missing)))

    # -------------------------------------------------------------------------------------- the end

    def _end(self, status: Status, reason: str) -> None:
        """End the run. The first word counts."""
        if self._status == "running":
            self._status, self._reason = status, reason
        self._over.set()

    async def _drain(self, status: Status, reason: str) -> None:
        """Issue nothing more, let the step under way come to its end, save, and end."""
        if self._started:
            self._scheduler.close()
            self._view.note = f"finishing the step under way, then a checkpoint ({reason})"
            while self._scheduler.training:
                await self._changed.wait()
            await self._checkpoint()
        self._end(status, reason)

    async def _dismiss(self) -> None:
        """Every worker leaves: asked first, and then not."""
        self._view.note = "stopping the workers"
        for _ in range(2):
            with anyio.move_on_after(1):
                await self._beacon("over")
        await self._fleet.stop(0 if self._hurried else _LEAVE_S)

    async def _obey_signals(self, *, task_status: TaskStatus[None]) -> None:
        """The first signal drains and saves; the second ends at once."""
        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            heard.append(signal.SIGHUP)
        with anyio.open_signal_receiver(*heard) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self._interrupted:
                    log.warning("interrupted again: ending at once", signal=name)
                    self._hurried = True
                    self._end("interrupted", f"{name}, twice")
                else:
                    log.warning("interrupted: the step under way, a checkpoint, then the end", signal=name)
                    self._interrupted = True
                    self._tasks.start_soon(self._drain, "interrupted", name)

    # --------------------------------------------------------------------------------- membership

    async def _welcome(self, role: Role, message: Join) -> Welcome:
        """Let a worker in, under the role whose credentials it has."""
        if message.role != role or not message.worker.startswith(f"{role}-"):
            raise Refused(
                "kernel", f"{message.worker!r} came as {role}; ids of that role begin with '{role}-'"
            )
        self._fleet.join(message)
        log.info("worker joined", worker=message.worker, place=message.place)
        return Welcome(
            config=msgspec.msgpack.encode(msgspec.to_builtins(self._config)),
            run=self.run,
            folder=str(self.folder),
            lease_epoch=self._lease_epoch,
            grace_s=self._config.bus.grace_s,
            fingerprints={path: dataset.fingerprint for path, dataset in self._datasets.items()},
        )

    def _on_ready(self, member: FleetMember) -> None:
        log.info("worker ready", worker=member.worker)
        if member.role == "inference":
            self._tasks.start_soon(self._engines.keep_current, member)
        else:
            member.callable = True
        self._touch()

    def _on_lost(self, member: FleetMember, how: str, final: bool) -> None:
        self._touch()
        self._engines.look_again()
        if final:
            self._end("failed", f"{member.worker}: {how}")
        elif member.role == "trainer" and not self._started:
            self._end("failed", f"{member.worker} was lost while the run was starting ({how})")
        elif member.role == "trainer":
            self._end(
                "failed",
                f"{member.worker} was lost at version {self._scheduler.version} ({how}); "
                f"`stretto resume {self.folder}` goes on where it was",
            )
        elif member.role == "rollout":
            self._scheduler.worker_lost(member.worker)
            self._obey()

    def _touch(self) -> None:
        """Something has changed that others wait for, or that beacons tell."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _beacons(self) -> None:
        while True:
            changed = self._changed
            await self._beacon("running")
            with anyio.move_on_after(1):
                await changed.wait()

    async def _beacon(self, state: Literal["running", "over"]) -> None:
        beacon = Beacon(self._lease_epoch, self._scheduler.version, state, self._fleet.peers())
        await self._bus.publish(self._names.beacon, beacon)

    def _swapped(self, worker: str, done: SwapDone) -> None:
        self._engine_errors.add(worker, done)
        self._report.swapped(worker, done)

    # ---------------------------------------------------------------------- the scheduler's commands

    def _obey(self) -> None:
        """The scheduler may want something done."""
        self._todo.set()

    async def _carry_out(self, tasks: TaskGroup) -> None:
        """Carry out commands, one after the other, in the order they were given."""
        while True:
            await self._todo.wait()
            self._todo = anyio.Event()
            for issuing, commands in groupby(
                self._scheduler.commands(), lambda each: isinstance(each, Issue)
            ):
                if issuing:  # an evaluation issues thousands at once: they need not wait for each other
                    async with anyio.create_task_group() as together:
                        for command in commands:
                            together.start_soon(self._do, command, tasks)
                else:
                    for command in commands:
                        await self._do(command, tasks)
            scheduler = self._scheduler
            resting = scheduler.resting or not self._graph.samples
            self._engines.lend(Wish(scheduler.evaluating, scheduler.needed_versions, resting))

    async def _do(self, command: Command, tasks: TaskGroup) -> None:
        match command:
            case Issue(ticket):
                await self._issue(ticket)
            case Withdraw(purpose, ticket, attempt):
                await self._withdraw(purpose, ticket, attempt)
            case StartBatch():
                tasks.start_soon(self._step, command)
            case EvaluationDone(evaluation, groups):
                await self._write_answers(evaluation.version, groups)
                entry = JournalEvaluation(self._incarnation, evaluation)
                await self._journal(entry, "evaluation", evaluation.version)
                self._report.evaluation(evaluation)
                if self._config.checkpoint.keep_best:
                    await self._prune()
            case HeldBack(evaluating, waiting):
                log.warning("evaluations hold training back", evaluating=evaluating, waiting=waiting)
            case Finish():
                await self._engines.busy_s()  # the summary tells their last figures
                await self._checkpoint()
                self._end("completed", "")
            case Fail(reason):
                tasks.start_soon(self._drain, "failed", reason)

    async def _issue(self, ticket: Ticket) -> None:
        if ticket.purpose == "train" and not self._graph.samples:
            await self._bus.append(self._names.groups, _read_group(ticket), id=f"{ticket.name}/end")
            return
        if ticket.purpose == "train":
            self._log_at_issue.setdefault(ticket.id, self._log_sequence)
        elif self._log_at_evaluation is None:
            self._log_at_evaluation = self._log_sequence
        sequence = await self._bus.append(self._names.ticket(ticket.purpose), ticket, id=ticket.name)
        self._queued[ticket.purpose, ticket.id, ticket.attempt] = sequence

    async def _write_answers(self, version: int, groups: tuple[GroupDone, ...]) -> None:
        """Copy an evaluation's answers from the log to a file, by row. A failure is told; the run goes on."""
        self._log_at_evaluation = None
        evaluation = self._config.evaluation
        if evaluation is None or not evaluation.keep_answers:
            return
        final = self.folder / "answers" / f"step-{version:06d}.jsonl"
        aside = final.with_name(f".{final.name}")
        try:
            final.parent.mkdir(exist_ok=True)
            with aside.open("wb") as file:
                for group in groups:
                    sequence = group.members[0].sequence
                    file.write((await self._bus.read(self._names.log_stream, sequence, Answers)).lines)
            aside.rename(final)
        except (OSError, BusError) as error:
            log.error("answers not written", version=version, error=str(error))
            self._report.problems.append(f"answers of version {version} not written: {error}")

    async def _withdraw(self, purpose: Purpose, ticket: int, attempt: int) -> None:
        """Take an attempt out of the queue, and out of the hands of whoever works on it."""
        sequence = self._queued.pop((purpose, ticket, attempt), None)
        if sequence is not None:
            await self._bus.delete(self._names.tickets_stream, sequence)
        await self._bus.publish(self._names.abort_ticket, AbortTicket(purpose, ticket, attempt))

    # ---------------------------------------------------------------------------- news of tickets

    def _ticket_started(self, message: TicketStarted) -> None:
        self._scheduler.ticket_started(message.purpose, message.ticket, message.attempt, message.worker)

    def _progress(self, message: Progress) -> None:
        for ticket, attempt, version in message.oldest:
            self._scheduler.first_token(ticket, attempt, version)
        self._obey()

    async def _follow_log(self) -> None:
        """Every outcome of a ticket, in the order of the log."""
        kinds = GroupDone | GroupFailed
        stream, start = self._names.log_stream, self._log_sequence + 1
        async for sequence, outcome in self._bus.follow(stream, self._names.groups, kinds, start=start):
            self._queued.pop((outcome.purpose, outcome.ticket, outcome.attempt), None)
            if isinstance(outcome, GroupDone):
                self._scheduler.group_done(outcome)
            else:
                tell, event = (
                    (log.info, "row left out") if outcome.filtered else (log.warning, "ticket failed")
                )
                tell(event, ticket=outcome.ticket, worker=outcome.worker, reason=outcome.reason)
                self._scheduler.group_failed(outcome)
            self._log_sequence = sequence
            self._obey()

    # --------------------------------------------------------------------------- step and checkpoint

    async def _step(self, start: StartBatch) -> None:
        """Journal, calls, new weights; then whatever the scheduler wants next."""
        config = self._config
        rows = _rows(start.groups)
        tickets = tuple(group.ticket for group in start.groups)
        batch = JournalBatch(self._incarnation, start.version, rows, tickets, self._layout, config.seed)
        await self._journal(batch, "batch", start.version)
        ahead = _rows(tuple(self._scheduler.done_groups))
        needed = self._scheduler.needed_versions
        result = await self._trainers.step(self._incarnation, start.version, rows, ahead, needed)
        version = result.note.version
        divergence = self._engine_errors.divergence(result.divergence)
        finished = JournalStep(self._incarnation, version, result.note.digest, divergence)
        await self._journal(finished, "step", version)
        due = bool(config.checkpoint.every) and version % config.checkpoint.every == 0
        due |= config.checkpoint.keep_best and self._scheduler.is_due(version)
        busy_s = await self._engines.busy_s()
        # Nobody may see the ledger without the figures, or weights of a version that is not there yet.
        self._scheduler.step_finished(hold=due, divergence=divergence)
        metrics = self._report.step(start, result, generate_busy_s=busy_s, divergence=divergence)
        self._engines.announce(result.note)
        self._obey()
        self._touch()
        self._tell_plugins("stretto_step_finished", metrics=metrics)
        if self._report.skipped_in_a_row == _MOST_SKIPPED:
            reason = f"the gradients of {_MOST_SKIPPED} steps in a row were not finite"
            self._tasks.start_soon(self._drain, "failed", reason)
        if config.on_collapse == "stop" and (
            collapse := self._report.adviser.said("reward_collapse", version)
        ):
            self._tasks.start_soon(self._drain, "failed", f"reward collapse (on_collapse: stop): {collapse}")
        if due:
            await self._checkpoint()
            self._scheduler.release()
            self._obey()

    async def _journal(
        self, entry: JournalBatch | JournalStep | JournalEvaluation | JournalChange, what: str, version: int
    ) -> None:
        name = f"{self._incarnation}/{version}/{what}/{self._lease_epoch}"
        await self._bus.append(self._names.journal, entry, id=name)

    async def _checkpoint(self) -> None:
        """Write one of the present version, unless there is one. A failure is told; the run goes on."""
        async with self._checkpointing:
            version, note = self._scheduler.version, self._engines.note
            if self._checkpointed == version:
                return
            assert note is not None
            try:
                await self._write_checkpoint(checkpoint_name(version), self._state(note))
            except (OSError, BusError) as error:
                log.error("checkpoint failed", version=version, error=str(error))
                self._report.problems.append(f"checkpoint of version {version} not written: {error}")

    async def _need_checkpoint(self, note: WeightsNote, name: str | None = None) -> None:
        """Write one that the run cannot go on without: other values come after it."""
        try:
            await self._write_checkpoint(name or checkpoint_name(note.version), self._state(note))
        except (OSError, BusError) as error:
            raise RunError(f"the checkpoint before changed values was not written: {error}") from error

    async def _write_checkpoint(self, name: str, state: KernelState) -> None:
        root = self.folder / "checkpoints"
        async with writing(root, name, state) as folder:
            await self._trainers.save(folder, state.version, tuple(each.version for each in state.needed))
        self._checkpointed, self._newest_checkpoint = state.version, name
        self._report.checkpoints.append(name)
        log.info("checkpoint", folder=name)
        self._tell_plugins("stretto_checkpoint_saved", folder=root / name)
        await self._prune()

    async def _prune(self) -> None:
        """Remove the checkpoints that are not kept, and what the log has for them alone. `keep_best` spares
        those of the best version and of versions that may yet be the best."""
        kept, root = self._config.checkpoint, self.folder / "checkpoints"
        if not self._newest_checkpoint:
            return
        spared: set[int] = set()
        if kept.keep_best:
            best = self._scheduler.best
            spared = {*self._scheduler.needed_versions, *([best.version] if best else [])}
        below = await anyio.to_thread.run_sync(prune, root, kept.keep, self._newest_checkpoint, spared)
        await self._bus.purge(self._names.log_stream, below=below)

    def _state(self, note: WeightsNote) -> KernelState:
        """The kernel's part of a checkpoint of these weights."""
        snapshot = self._scheduler.snapshot()
        open_tickets = {ticket.id for ticket in snapshot.open}
        self._log_at_issue = {
            ticket: sequence for ticket, sequence in self._log_at_issue.items() if ticket in open_tickets
        }
        finished = [
            member.sequence
            for ticket in snapshot.open
            if ticket.done and self._graph.samples
            for member in ticket.done.members
        ]
        return KernelState(
            version=snapshot.version,
            incarnation=self._incarnation,
            digest=note.digest,
            snapshot=snapshot,
            log_sequence=self._log_sequence,
            lowest_sequence=min(
                [
                    *finished,
                    *(sequence + 1 for sequence in self._log_at_issue.values()),
                    *([] if self._log_at_evaluation is None else [self._log_at_evaluation + 1]),
                    self._log_sequence + 1,
                ]
            ),
            layout=self._layout,
            seed=self._config.seed,
            trained_tokens=self._report.trained_tokens,
            generated_tokens=self._report.generated_tokens,
            wall_s=self._report.wall_s,
            values=self._values,
            needed=tuple(
                self._engines.notes[version] for version in snapshot.evaluating if version != snapshot.version
            ),
        )

    @property
    def _layout(self) -> str:
        return "; ".join(
            f"{group.path}: {group.section.use} x {group.section.processes}, {group.section.threads} threads"
            for group in self._placement.groups.values()
        )

    # ------------------------------------------------------------------------------------ plugins

    def _tell_plugins(self, hook: str, **facts: Any) -> None:
        for plugin, error in self._composed.plugins.life(hook, context=self._context, **facts):
            log.error("plugin failed", plugin=plugin, hook=hook, exc_info=error)
            self._report.problems.append(f"{plugin}: {hook}: {type(error).__name__}: {error}")


def _settings(composed: Composed, datasets: dict[str, Dataset], graph: Graph) -> SchedulerSettings:
    config = composed.config
    queue, evaluation = config.queue, config.evaluation
    rows = len(datasets["evaluation.dataset"]) if evaluation else 0
    return SchedulerSettings(
        steps=config.steps,
        batch_size=queue.batch_size,
        max_staleness=queue.max_staleness if graph.samples else 0,  # rows have no version to be older than
        max_divergence=queue.max_divergence,
        rows=len(datasets["dataset"]),
        group_size=graph.source.samples,
        on_late=queue.on_late,
        max_attempts=queue.max_attempts,
        max_failures=queue.max_failures or 2 * queue.batch_size,
        max_filtered=queue.max_filtered or 16 * queue.batch_size,
        shuffle=config.dataset.shuffle,
        seed=config.seed,
        evaluation_rows=min(rows, evaluation.rows or rows) if evaluation else 0,
        evaluation_every=evaluation.every if evaluation else 0,
        evaluation_samples=evaluation.samples if evaluation else 1,
    )


def _rows(groups: tuple[GroupDone, ...]) -> tuple[RowRef, ...]:
    return tuple(
        RowRef(member.id, member.sequence, member.index, group.ticket, member.length)
        for group in groups
        for member in group.members
    )


def _read_group(ticket: Ticket) -> GroupDone:
    """What a ticket comes to where sequences are read: the row itself, which trainers make them of."""
    members = tuple(
        messages.Member(
            id=f"{ticket.name}/{index}",
            sequence=ticket.row,
            index=index,
            length=0,
            sampled=0,
            oldest=ticket.min_version,
            newest=ticket.min_version,
            reward=0.0,
            metrics={},
            finish="stop",
        )
        for index in range(ticket.samples)
    )
    return GroupDone(ticket.purpose, ticket.id, ticket.attempt, "dataset", members, 0.0)


def _run_id(folder: Path) -> str:
    """Unique on a bus that several runs share, and the same when the run is resumed."""
    bootstrap = folder / "bus" / "kernel.json"
    if bootstrap.exists():
        return Bootstrap.read(bootstrap).run
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', folder.name)}-{secrets.token_hex(3)}"
