"""The kernel owns a run on the bus. It carries out the scheduler's commands and never touches token data.

A `Kernel` lives as long as one open bus (see `stretto.kernel.life`). It admits the workers. In a resumed run
it then takes in the stored events. Afterwards it issues tickets, trains batches, announces weights and saves
checkpoints.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import anyio
import msgspec
import structlog
import yaml
from anyio.abc import TaskGroup

from stretto import tracing
from stretto.bus.client import Bus
from stretto.bus.joining import check_operator, own_version
from stretto.bus.lock import KernelLock
from stretto.bus.messages.events import (
    BatchesReleased,
    Input,
    OutcomeRead,
    RunClosing,
    RunOwned,
    ScheduleStarted,
    StepTrained,
    VersionPublished,
    WorkerGone,
)
from stretto.bus.messages.inference import SwapDone
from stretto.bus.messages.membership import (
    AskRanks,
    Beacon,
    Join,
    Leaving,
    Ranks,
    Welcome,
    WorkerProcess,
)
from stretto.bus.messages.operation import RunScaled, RunStopping, ScaleRun, StopRun
from stretto.bus.messages.tickets import GroupFailed, Progress, TicketStarted
from stretto.config import MetricsConfig
from stretto.errors import BusError, ConfigError, RunError, one_error
from stretto.kernel.bus_watch import watch_bus, watch_owner, watch_store
from stretto.kernel.calls.canary import EngineErrors
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import StepResult, Trainers
from stretto.kernel.durable.changes import differences, values_file
from stretto.kernel.durable.checkpoint import KernelState, checkpoint_name, checkpoints_in
from stretto.kernel.durable.checkpointer import Checkpointer
from stretto.kernel.durable.journal import JournalWriter, newest_epoch, own_journal
from stretto.kernel.durable.recovery import Recovered, Repetition, Stored, read_store
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.fleet import FleetMember, receive_heartbeats
from stretto.kernel.fleet.routes import RouteSender
from stretto.kernel.fleet.worker_scaling import WorkerScaler
from stretto.kernel.observe.record_server import RecordServer
from stretto.kernel.observe.sample_writer_supervisor import SampleWriterSupervisor
from stretto.kernel.observe.timeline import Timeline
from stretto.kernel.observe.traces import RunTraces, StepTrace
from stretto.kernel.schedule.commands import (
    Command,
    EvaluationDone,
    Fail,
    Finish,
    HeldBack,
    Issue,
    RecordDraws,
    Retire,
    StartBatch,
    Withdraw,
)
from stretto.kernel.schedule.fold import apply, decisions
from stretto.kernel.schedule.lending import Demand
from stretto.kernel.schedule.outcomes import Outcome, refs_of
from stretto.kernel.schedule.tickets import TicketQueue
from stretto.kernel.setup import RunSetup
from stretto.launcher import ROLES, ClusterLauncher, Role
from stretto.records.timeline import Cause
from stretto.weights import WeightsNote

log = structlog.get_logger()

_WAITING_LOG_S = 10.0
"""Log which workers are still missing after this many seconds without a change of the workers."""
_START_S = 900.0
"""Deadline for all workers to be ready, models loaded."""
_LEAVE_S = 8.0
"""At the end of the run, workers have this many seconds to leave before the kernel stops them."""
_REDELIVER_S = 20.0
"""A ticket of which no rollout worker has said anything for so long is delivered again: a connection may have
broken while it was on its way."""
_TURN_S = 30.0
"""Maximum length of an evaluation's first turn at a single engine, in seconds."""
_TURNS_PER_WORKFLOW = 10
"""The first turn takes at most `workflow.timeout_s` divided by this number."""
_LOOK_S = 5.0
"""Deadline for the look whether another kernel owns the run."""
_ATTEMPTS_PER_KERNEL = 1000
"""A resumed kernel numbers the attempts of its tickets from its lease epoch times this number."""


async def own_run(setup: RunSetup, bus: Bus, ending: Ending) -> None:
    """Take the lease of a run and own the run until `ending.over` is set.

    Errors of the kernel's tasks come in an exception group.

    Raises:
        ConfigError: if the run cannot be resumed, because too much of its store is lost.
        RunError: if the workers are not ready in time, or the journal cannot be repeated.
        BusError: if the server cannot store what the run needs, or if a trainer refuses a request or does not
            answer it.
    """
    names = setup.names
    tickets = [names.ticket("train"), names.ticket("eval")]
    await bus.store.make_queue(names.tickets_stream, tickets, redeliver_s=_REDELIVER_S)
    former_tickets = await bus.store.end(names.tickets_stream)  # before the lease: a later owner's come later
    journal = await own_journal(bus, names, str(setup.folder))
    if setup.checkpoints != checkpoints_in(setup.folder):  # of another kernel, which owned the run until now
        log.warning("the run has a new checkpoint since this kernel chose one; it begins again")
        ending.next_values = setup.values
        ending.end("repeated", "")
        return
    await bus.store.make_log(names.log_stream, names.of_log)
    records = RecordServer(setup.folder)
    await records.serve(bus, names)
    try:
        async with anyio.create_task_group() as tasks:
            kernel = Kernel(setup, bus, journal, ending, tasks)
            await kernel.run(former_tickets.sequence)
            tasks.cancel_scope.cancel()
    finally:
        if ending.status in ("running", "failed") and bus.connected:  # another may have taken the workers
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LOOK_S), suppress(BusError):
                ending.replaced = await newest_epoch(bus, names) > journal.epoch
    if ending.status != "repeated" and records.copied_lately and not ending.replaced:
        setup.report.finish(ending.status, ending.reason)
        setup.status_writer.write_end()
        await records.hand_over(ending)


class Kernel:
    """One kernel of a run, from its first message to the end of its workers."""

    def __init__(
        self, setup: RunSetup, bus: Bus, journal: JournalWriter, ending: Ending, tasks: TaskGroup
    ) -> None:
        self._setup = setup
        self._config = setup.config
        self._scheduler = setup.scheduler
        self._report = setup.report
        self._status = setup.status_writer
        self._fleet = setup.fleet
        self._names = setup.names
        self._bus = bus
        self._journal = journal
        if setup.resumed:
            journal.incarnation = setup.resumed[1].incarnation
        self._lease_epoch = lease_epoch = journal.epoch
        self._lock = KernelLock.of(setup.folder / "bus")
        self._ending = ending
        self._tasks = tasks
        self._timeline = Timeline(setup.folder)
        self._traces = RunTraces(setup.run, lease_epoch)
        self._trainers = Trainers(bus, setup.names, setup.placement, lease_epoch, self._timeline)
        self._engines = Engines(
            bus,
            setup.names,
            setup.fleet,
            lease_epoch,
            self._timeline,
            self._traces,
            on_swapped=self._take_in_swap,
            on_callable=self._on_callable,
            waits=setup.report.waits,
            turn_s=min(_TURN_S, self._config.workflow.timeout_s / _TURNS_PER_WORKFLOW),
        )
        self._routes = RouteSender(
            bus, setup.names, setup.fleet, lease_epoch, finish_s=self._config.workflow.timeout_s
        )
        self._tickets = TicketQueue(bus, setup.names, lease_epoch, samples=setup.graph.samples)
        self._samples = SampleWriterSupervisor(setup, bus, lease_epoch)
        self._checkpointer = Checkpointer(
            setup, bus, self._trainers, self._engines, self._tickets, self._journal, self._samples
        )
        self._scaler = WorkerScaler(setup, bus, lease_epoch, ending, tasks)
        self._engine_errors = EngineErrors()
        self._commands: list[Command] = []
        """Commands of the scheduler that are to be carried out."""
        self._heard = anyio.Event()
        """Set by each event."""
        self._changed = anyio.Event()
        self._published = anyio.Event()
        """The newest version is published, in the journal, and announced."""
        self._published.set()
        self._owned = False
        """Whether the scheduler hears events. Before, it may be in the state of a former kernel."""
        self._started = False
        self._fleet.on_ready = self._on_ready
        self._fleet.on_lost = self._on_lost
        self._fleet.on_left = self._on_left
        self._fleet.on_change = self._on_change
        self._fleet.hears = lambda: bus.connected
        self._fleet.reconnect_s = bus.reconnect_s

    async def run(self, former_tickets: int) -> None:
        """Own the run until it ends, then dismiss the workers. An error also dismisses them. Tickets in the
        queue up to the number `former_tickets` are those of former kernels."""
        await self._tickets.clear(former_tickets)
        await self._serve()
        resumed = self._setup.resumed
        stored = None if resumed is None else await self._recover(resumed)
        if stored is not None and self._hand_over(stored):
            return
        if self._config.metrics is not None:
            self._status.metrics_url = await self._serve_metrics(self._config.metrics)
        self._report.begin()
        self._timeline.begin(self._lease_epoch, resumed[1].version if resumed else 0)
        self._tasks.start_soon(self._timeline.keep)
        if self._setup.continues:
            self._setup.trackers.start()
        self._tasks.start_soon(self._beacons)
        self._tasks.start_soon(self._routes.send_changes)
        self._tasks.start_soon(self._routes.refresh)
        self._tasks.start_soon(self._fleet.watch)
        self._tasks.start_soon(watch_bus, self._setup, self._bus, self._ending)
        self._tasks.start_soon(watch_store, self._setup, self._bus, self._ending)
        self._tasks.start_soon(self._status.publish, self._bus, self._names)
        self._tasks.start_soon(self._journal.keep)
        self._tasks.start_soon(self._carry_out)
        self._tasks.start_soon(self._drain_when_asked)
        if self._setup.continues:
            self._tasks.start_soon(self._samples.run)
        try:
            await self._fleet.launch(self._setup.workers, self._tasks)
            self._tasks.start_soon(self._begin, stored)
            await self._ending.over.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._dismiss()
            self._timeline.end(self._ending.status)
            self._report.refused = self._bus.refusals.count
            self._report.journal = self._journal.head

    # ------------------------------------------------------------------------------------ beginning

    async def _serve(self) -> None:
        """Subscribe to the workers' messages and requests."""
        bus, names = self._bus, self._names
        await watch_owner(bus, names, self._lease_epoch, self._ending)
        for role in ROLES:
            await bus.serve(names.kernel(role, "join"), Join, partial(self._welcome, role))
            await receive_heartbeats(role, self._fleet, bus, names, self._lease_epoch)
            await bus.subscribe(names.kernel(role, "leaving"), Leaving, self._fleet.leaving)
        await bus.serve(names.kernel("trainer", "ranks"), AskRanks, self._send_ranks)
        await bus.serve(names.kernel("operator", "scale"), ScaleRun, self._scale)
        await bus.serve(names.kernel("operator", "stop"), StopRun, self._stop)
        await self._samples.serve()
        await bus.subscribe(names.ticket_started, TicketStarted, self._ticket_started)
        await bus.subscribe(names.progress, Progress, self._hear)

    async def _serve_metrics(self, config: MetricsConfig) -> str:
        """Start to serve the figures to Prometheus, and return their URL.

        Raises:
            RunError: if the address cannot be used.
        """
        from stretto.kernel.observe.prometheus import serve_metrics  # only here: it needs an extra

        return await self._tasks.start(serve_metrics, config, self._setup, self._bus)

    async def _recover(self, resumed: tuple[Path | None, KernelState]) -> Stored:
        """Find out what the store still holds. Report what is lost.

        Raises:
            ConfigError: if nothing is left to continue from. No file has changed.
        """
        state, setup = resumed[1], self._setup
        if setup.replays is not None:
            return Stored.of_replay(state, setup.replays)
        stored = await read_store(
            self._bus,
            self._names,
            resumed,
            setup.new_scheduler(),
            values=setup.values,
            samples=setup.graph.samples,
            reached=self._report.reached,
            epoch=self._lease_epoch,
        )
        if stored.lost:
            self._report.add_loss(stored.lost, stored.lost_from)
        if stored.log_is_short:
            # The checkpoint names messages by number: new ones must not get the numbers of lost ones.
            await self._bus.store.purge(self._names.log_stream, below=state.log_sequence + 1)
        self._journal.incarnation = stored.incarnation_at(state.version, state.incarnation)
        return stored

    async def _begin(self, stored: Stored | None) -> None:
        """Wait for the workers, load the weights or repeat the journal, and issue the first tickets."""
        await self._in_time(self._until_trainers_ready)
        recovered = None if stored is None else await self._repeat(stored)
        notes = recovered.notes if recovered else await self._trainers.load(None, 0)
        if self._ending.over.is_set():
            return
        self._engines.remember(notes)
        self._engines.announce(notes[-1])
        self._owned = True
        self._hear(self._ownership(self._lease_epoch * _ATTEMPTS_PER_KERNEL if recovered else 0))
        for sequence, outcome in recovered.later if recovered else ():
            self._tickets.take_in(sequence, outcome, self._take_in)
        self._tasks.start_soon(self._engines.look_after_lending)
        self._status.note = "waiting for all workers"
        await self._in_time(self._until_all_callable)
        await self._samples.until_followed()
        self._status.note = ""
        self._started = self._status.started = True
        self._tasks.start_soon(self._tickets.follow, self._take_in)
        self._report.first_ticket()
        self._hear(ScheduleStarted())
        if self._config.elastic.ranges():
            self._tasks.start_soon(self._scaler.follow)

    def _ownership(self, attempts_from: int) -> RunOwned:
        setup, version = self._setup, self._scheduler.version
        return RunOwned(self._journal.incarnation, version, setup.values, setup.layout, attempts_from)

    async def _repeat(self, stored: Stored) -> Recovered:
        """Load the checkpoint and train the batches again that the later events start. Where the events that
        follow cannot continue the stored ones, write a checkpoint. If other values come next, end the run."""
        setup = self._setup
        assert setup.resumed is not None
        self._status.note = "repeating the journal" if setup.replays is None else "replaying the batches"
        parts = self._journal, self._scheduler, self._trainers
        repetition = Repetition(*parts, setup.resumed, stored, on_repeated=self._report_step)
        notes = await repetition.load()
        if not stored.fits:
            await self._change_values(notes)
        if setup.replays is None:
            recovered = await repetition.fold()
        else:
            self._journal.hear(self._ownership(0))
            recovered = await repetition.replay(setup.replays)
        for command in recovered.retired:
            await self._do(command)
        self._journal.incarnation = recovered.incarnation
        self._tickets.log_sequence = recovered.log_sequence
        self._engines.remember(recovered.notes)
        if not recovered.is_exact or (recovered.repeated and not setup.continues):
            await self._checkpointer.save_required(recovered.notes[-1])
        if setup.continues:
            log.info("resumed", version=recovered.notes[-1].version, repeated=recovered.repeated)
            self._report.recall()
        else:
            self._ending.next_values = recovered.next_values
            self._ending.end("repeated" if setup.replays is None else "completed", "")
        return recovered

    def _report_step(self, start: StartBatch, result: StepResult, divergence: float | None) -> None:
        self._report.step(start, result, (), generate_busy_s=0.0, divergence=divergence)
        self._record_step(start, result, ())

    def _record_step(
        self, start: StartBatch, result: StepResult, waits: tuple[tuple[Cause, float], ...]
    ) -> None:
        tickets = tuple(group.ticket for group in start.groups)
        self._timeline.step(result.began, result.version, waits, tickets)

    def _hand_over(self, stored: Stored) -> bool:
        """Return whether this kernel has nothing to do, so that it needs no worker, because other values come
        next. The next kernel then gets the state after the events."""
        setup = self._setup
        if setup.continues or setup.replays is not None or not stored.is_only_read:
            return False
        assert setup.resumed is not None
        self._ending.next_values = stored.fold.next_values
        self._ending.state = stored.fold.applied_to(setup.resumed[1])
        self._ending.end("repeated", "")
        return True

    async def _change_values(self, notes: tuple[WeightsNote, ...]) -> None:
        """Change to this kernel's values: write a checkpoint with them.

        Args:
            notes: notes of older versions that evaluations need, and last the note of the current weights.

        Raises:
            RunError: if the run is beyond the new steps, or if the checkpoint cannot be written.
        """
        assert self._setup.resumed is not None
        note, values, log_sequence = notes[-1], self._setup.values, self._setup.resumed[1].log_sequence
        if note.version > self._config.steps:
            raise RunError(
                f"steps is {self._config.steps}, but the run is already at version {note.version}: resume it "
                "with more steps"
            )
        former = yaml.safe_load(values_file(self._setup.folder, values - 1).read_text())
        changes = differences(former, self._setup.composed.document)
        log.info("values changed", version=note.version, **{key: new for key, (_, new) in changes.items()})
        self._tickets.log_sequence = log_sequence
        self._engines.remember(notes)
        await self._checkpointer.save_required(note, checkpoint_name(note.version, values))

    async def _until_trainers_ready(self) -> None:
        nonces = await self._nonces_of_trainers()
        while nonces.keys() - {member.worker for member in self._fleet.of("trainer")}:
            await self._changed.wait()
        self._trainers.nonces = nonces
        first = self._trainers.placement.lead.workers[0]
        self._engines.trainer = WorkerProcess(first, nonces[first])

    async def _nonces_of_trainers(self) -> dict[str, str]:
        """Wait until all trainers have joined, and return the nonces of their processes. If one of them is
        lost, the run ends, so they stay the same."""
        trainers = [worker.id for worker in self._setup.workers if worker.role == "trainer"]
        while not all(worker in self._fleet.members for worker in trainers):
            await self._changed.wait()
        return {worker: self._fleet.members[worker].nonce for worker in trainers}

    async def _send_ranks(self, message: AskRanks) -> Ranks:
        del message
        return Ranks(await self._nonces_of_trainers())

    async def _until_all_callable(self) -> None:
        while missing := self._missing():
            # Wait for one after the other: to look at all of them at every change would take long.
            while not self._is_callable(missing[0]):
                with anyio.move_on_after(_WAITING_LOG_S) as waiting:
                    await self._changed.wait()
                if waiting.cancelled_caught:
                    log.info("waiting", workers=", ".join(self._missing()))

    def _missing(self) -> list[str]:
        """Return the workers that cannot be called yet."""
        return sorted(worker.id for worker in self._setup.workers if not self._is_callable(worker.id))

    def _is_callable(self, worker: str) -> bool:
        member = self._fleet.members.get(worker)
        return member is not None and member.callable

    async def _in_time(self, until_ready: Callable[[], Awaitable[None]]) -> None:
        """Wait for workers, at most for `_START_S`."""
        with anyio.move_on_after(_START_S):
            return await until_ready()
        raise RunError(f"workers not ready after {_START_S:.0f} s: {self._fleet.starting}")

    # -------------------------------------------------------------------------------------- the end

    async def _drain_when_asked(self) -> None:
        """Wait for a request to drain. Then issue no ticket and start no batch any more, finish the step
        under way, write a checkpoint, and end the run.

        A run that has not issued a ticket yet ends at once.
        """
        ending = self._ending
        await ending.drain_requested.wait()
        if self._started:
            self._hear(RunClosing())
            self._status.note = f"finishing the step under way, then a checkpoint ({ending.drain_reason})"
            while self._scheduler.training:
                await self._changed.wait()
            await self._published.wait()
            try:
                await self._checkpointer.save_last()
            except RunError as error:
                if ending.drain_status == "repeated":  # the next kernel would continue from an older one
                    raise
                self._report.problems.append(str(error))
            self._scaler.write_groups()
        ending.end(ending.drain_status, ending.drain_reason)

    async def _dismiss(self) -> None:
        """Ask the workers to leave, and stop those that do not leave in time."""
        self._status.note = "stopping the workers"
        for _ in range(2):
            with anyio.move_on_after(1):
                await self._bus.publish(self._names.beacon, Beacon(self._lease_epoch, "over"))
        at_once = self._ending.forced or not self._bus.connected
        await self._fleet.stop(0 if at_once else _LEAVE_S)
        await self._samples.stop(at_once=at_once)

    # ----------------------------------------------------------------------------------- operation

    async def _scale(self, message: ScaleRun) -> RunScaled:
        self._check_operator(message.token)
        if not self._started:
            raise ConfigError("the run has not started to train yet; repeat the command when it has")
        return RunScaled(await self._scaler.scale(message.numbers))

    async def _stop(self, message: StopRun) -> RunStopping:
        self._check_operator(message.token)
        log.warning("asked to stop", now=message.now)
        if message.now:
            self._ending.forced = True
            self._ending.end("interrupted", "stretto stop --now")
            return RunStopping("the run ends at once, without a checkpoint")
        self._ending.drain("interrupted", "stretto stop")
        return RunStopping("the run finishes the step under way, writes a checkpoint, and ends")

    def _check_operator(self, token: str) -> None:
        """Accept a command only from the run's user.

        Raises:
            ConfigError: if the command comes from somebody else, or if the run ends.
        """
        check_operator(self._setup.folder / "bus", token)
        if self._ending.over.is_set():
            raise ConfigError(f"the run is over ({self._ending.status})")

    # --------------------------------------------------------------------------------- membership

    async def _welcome(self, role: Role, message: Join) -> Welcome:
        """Admit a worker that joined on the subject of `role`."""
        if self._ending.over.is_set():
            await anyio.sleep_forever()  # it may be a worker of the kernel that owns the run now
        if message.stretto != own_version():
            raise ConfigError(
                f"{message.worker} has stretto {message.stretto or 'of an older version'}, and the run has "
                f"{own_version()}: install stretto {own_version()} where the worker starts"
            )
        self._fleet.join(role, message)
        self._notify()
        self._timeline.worker(message.worker, "joined")
        log.info("worker joined", worker=message.worker, place=message.place)
        return Welcome(
            config=msgspec.msgpack.encode(msgspec.to_builtins(self._config)),
            run=self._setup.run,
            folder=str(self._setup.folder),
            lease_epoch=self._lease_epoch,
            grace_s=self._config.bus.grace_s,
            fingerprints={path: dataset.fingerprint for path, dataset in self._setup.datasets.items()},
            outage_s=self._config.bus.outage_s,
            lock=self._lock,
            many_machines=isinstance(self._setup.launcher, ClusterLauncher),
        )

    def _on_left(self, member: FleetMember, why: str) -> None:
        self._timeline.worker(member.worker, "left", why)
        self._on_change(member)
        if member.role == "rollout":
            self._hear(WorkerGone(member.worker, drained=True))

    def _on_change(self, member: FleetMember) -> None:
        """A worker is lost, has left, or begins to drain."""
        self._on_callable(member)
        self._engines.changed(member)

    def _on_ready(self, member: FleetMember) -> None:
        log.info("worker ready", worker=member.worker)
        self._timeline.worker(member.worker, "ready")
        if member.role == "inference":
            self._tasks.start_soon(self._engines.keep_current, member)
        else:
            member.callable = True
            self._on_callable(member)

    def _on_callable(self, member: FleetMember) -> None:
        self._routes.look(member)
        self._notify()

    def _on_lost(self, member: FleetMember, how: str, final: bool) -> None:
        self._timeline.worker(member.worker, "lost", how)
        self._on_change(member)
        if final:
            self._ending.end("failed", f"{member.worker}: {how}")
        elif member.role == "trainer" and not self._started:
            self._ending.end("failed", f"{member.worker} was lost while the run was starting ({how})")
        elif member.role == "trainer":
            self._ending.end(
                "failed",
                f"{member.worker} was lost at version {self._scheduler.version} ({how}); "
                f"`stretto resume {self._setup.folder}` continues the run",
            )
        elif member.role == "rollout":
            self._hear(WorkerGone(member.worker, drained=False))

    def _notify(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _beacons(self) -> None:
        while True:
            await self._bus.publish(self._names.beacon, Beacon(self._lease_epoch, "running"))
            await anyio.sleep(1)

    def _take_in_swap(self, worker: str, done: SwapDone) -> None:
        self._engine_errors.add(worker, done)
        self._report.swapped(worker, done)

    # ---------------------------------------------------------------------------- events of tickets

    def _ticket_started(self, message: TicketStarted) -> None:
        self._timeline.taken(message)
        self._hear(message)

    def _take_in(self, sequence: int, outcome: Outcome) -> None:
        self._hear(OutcomeRead(sequence), outcome)
        if isinstance(outcome, GroupFailed):
            return
        self._timeline.done(outcome)
        if outcome.purpose == "eval":
            self._traces.evaluated(outcome)
        else:
            self._scaler.groups += 1
        if self._setup.graph.samples and self._scheduler.is_finished(outcome):
            self._tasks.start_soon(partial(self._trainers.prefetch, refs_of((outcome,)), complete=False))

    def _hear(self, event: Input, outcome: Outcome | None = None) -> None:
        """Let the scheduler take in an event, and queue it for the journal with what is decided."""
        if not self._owned:
            return
        apply(self._scheduler, event, outcome)
        commands = self._scheduler.commands()
        for each in (event, *decisions(commands)):
            self._journal.hear(each)
        self._commands += commands
        self._report.waits.lacks(self._scheduler.waits_for)
        self._heard.set()

    # ---------------------------------------------------------------------- the scheduler's commands

    async def _carry_out(self) -> None:
        """Carry out the scheduler's commands in order, until cancelled. Tickets are issued concurrently.

        Nothing that follows from an event leaves the kernel before the server has stored the event.
        """
        known = None
        while True:
            await self._heard.wait()
            self._heard = anyio.Event()
            demand, all_commands, self._commands = self._demand(), self._commands, []
            if all_commands or demand != known:
                await self._journal.flush()
            known = demand
            # Before the commands, which may wait for the store: a step removes versions that are not needed.
            self._engines.lend(demand)
            for are_issues, commands in groupby(all_commands, lambda each: isinstance(each, Issue)):
                if are_issues:  # an evaluation issues thousands of tickets at once
                    async with anyio.create_task_group() as issues:
                        for command in commands:
                            issues.start_soon(self._do, command)
                else:
                    for command in commands:
                        await self._do(command)

    def _demand(self) -> Demand:
        """Return what evaluations need from the engines now."""
        scheduler, rounds = self._scheduler, self._scheduler.evaluation
        resting = scheduler.tickets.resting or not self._setup.graph.samples
        return Demand(rounds.under_way, rounds.needed_versions, resting, scheduler.version == 0)

    async def _do(self, command: Command) -> None:
        match command:
            case RecordDraws():
                pass  # they are in the journal, as all decisions are
            case Issue(ticket):
                self._timeline.issued(ticket)
                await self._tickets.issue(self._traces.issued(ticket))
            case Withdraw(purpose, ticket, attempt):
                await self._tickets.withdraw(purpose, ticket, attempt)
            case StartBatch():
                self._tasks.start_soon(self._step, command)
            case Retire(purpose, ticket, attempt, account, reason):
                if purpose == "train":
                    self._samples.retire(ticket, account, reason)
                self._timeline.retired(purpose, ticket, attempt, account, reason)
                self._traces.retired(command)
            case EvaluationDone():
                await self._end_evaluation(command)
            case HeldBack(evaluating, waiting):
                log.warning("evaluations hold training back", evaluating=evaluating, waiting=waiting)
            case Finish():
                await self._published.wait()
                await self._engines.busy_s()  # updates the engines' figures for the summary
                await self._checkpointer.save_last()
                self._ending.end("completed", "")
            case Fail(reason):
                self._ending.drain("failed", reason)

    async def _step(self, start: StartBatch) -> None:
        """Train a batch, announce the new weights, and write a checkpoint if one is due.

        The weights are published beside the next step, unless a checkpoint is due or nothing may run ahead.
        """
        waits = self._report.waits.take()
        trace = self._traces.step(start)
        with tracing.within(trace.span):
            result, busy_s = await self._train(start, trace)
        version, config = result.version, self._config
        divergence = self._engine_errors.divergence(result.divergence)
        due = bool(config.checkpoint.every) and version % config.checkpoint.every == 0
        due |= config.checkpoint.keep_best and self._scheduler.evaluation.is_due(version)
        beside = self._scheduler.settings.max_staleness > 0 and not due
        note = None if beside else await self._publish(version)
        # No await up to `announce`: no task may see the new ledger without the step's figures.
        self._hear(StepTrained(version, due, divergence, bool(result.skipped)))
        self._report.step(start, result, waits, generate_busy_s=busy_s, divergence=divergence)
        self._record_step(start, result, waits)
        self._traces.trained(trace, result.began)
        if note is None:
            self._published = anyio.Event()
            self._tasks.start_soon(self._publish_beside, version, self._published)
        else:
            self._engines.announce(note)
        self._notify()
        if due:
            await self._checkpointer.save()
            self._hear(BatchesReleased())

    async def _train(self, start: StartBatch, trace: StepTrace) -> tuple[StepResult, float]:
        """Run the calls of a batch's step, and end the step, but not before the version of the previous one
        is announced.

        Returns:
            The step's result, and the engines' mean seconds of work so far.
        """
        rows, ahead = refs_of(start.groups), refs_of(self._scheduler.done_groups)
        needed = self._scheduler.evaluation.needed_versions
        figures: list[float] = []

        async def ask_engines() -> None:
            with tracing.span("engine figures"):
                figures.append(await self._engines.busy_s())

        result = await self._trainers.step(self._journal.incarnation, start.version, rows, ahead, trace)
        await self._published.wait()
        with one_error():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask_engines)
                await self._trainers.end(start.version, needed, trace)
        return result, figures[0]

    async def _publish(self, version: int) -> WeightsNote:
        """Wait until a version is published, and write its digest to the journal."""
        note = await self._trainers.published(version)
        self._journal.hear(VersionPublished(version, note.digest))
        await self._journal.flush()
        return note

    async def _publish_beside(self, version: int, published: anyio.Event) -> None:
        self._engines.announce(await self._publish(version))
        published.set()

    async def _end_evaluation(self, done: EvaluationDone) -> None:
        """Report a complete evaluation."""
        self._tickets.evaluation_ended()
        self._report.evaluation(done.evaluation)
        self._timeline.evaluation(done.evaluation)
        self._traces.evaluation_ended(done.evaluation)
        if self._config.checkpoint.keep_best:
            await self._checkpointer.prune()
