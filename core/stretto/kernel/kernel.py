"""The kernel: owns a run on the bus. It carries out the scheduler's commands and never touches token data.

A `Kernel` lives inside one open bus (see `stretto.kernel.life`): it lets workers in, has the journal repeated
where the run is resumed, and then issues tickets, trains batches, announces weights and saves checkpoints.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Literal

import anyio
import msgspec
import structlog
import yaml
from anyio.abc import TaskGroup

from stretto.bus.client import Bus
from stretto.bus.messages import (
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
    RowRef,
    SwapDone,
    TicketStarted,
    Welcome,
)
from stretto.errors import BusError, Refused, RunError
from stretto.kernel.canary import EngineErrors
from stretto.kernel.changes import differences, values_file
from stretto.kernel.checkpoint import KernelState, checkpoint_name
from stretto.kernel.checkpointer import Checkpointer
from stretto.kernel.ending import Ending
from stretto.kernel.engines import Engines
from stretto.kernel.fleet import FleetMember
from stretto.kernel.journal import JournalWriter
from stretto.kernel.lending import Wish
from stretto.kernel.recovery import read_journal, repeat_journal
from stretto.kernel.scheduler import (
    Command,
    EvaluationDone,
    Fail,
    Finish,
    HeldBack,
    Issue,
    StartBatch,
    Withdraw,
)
from stretto.kernel.setup import RunSetup
from stretto.kernel.tickets import TicketQueue
from stretto.kernel.trainers import StepResult, Trainers
from stretto.launcher import ROLES, Role
from stretto.weights import WeightsNote

__all__ = ["own_run"]

log = structlog.get_logger()

_WAITING_LOG_S = 10.0
"""Log which workers are still missing after this many seconds without a change."""
_MOST_SKIPPED = 5
"""Steps in a row whose gradient may be not finite before the run stops."""
_START_S = 900.0
"""Deadline for all workers to be ready, models loaded."""
_LEAVE_S = 8.0
"""Time that workers get to leave by themselves at the end."""
_TURN_S = 30.0
"""The first turn of an evaluation at a single engine; less where workflows have less time."""
_TURNS_PER_WORKFLOW = 10
_ATTEMPTS_PER_KERNEL = 1000
"""Attempts of a resumed kernel's tickets begin at its lease epoch times this."""


async def own_run(setup: RunSetup, bus: Bus, ending: Ending) -> None:
    """Take the lease of a run and own it until `ending` is over.

    Raises:
        RunError: if the workers are not ready in time, or the run cannot be repeated.
        BusError: if the server cannot store what the run depends on.
    """
    names = setup.names
    await bus.make_state(names.state_bucket)
    lease_epoch = await bus.put_state(names.state_bucket, "kernel", KernelLease(str(setup.folder)))
    tickets = [names.ticket("train"), names.ticket("eval")]
    await bus.make_queue(names.tickets_stream, tickets, redeliver_s=60)
    await bus.make_log(names.log_stream, [names.trajectories, names.groups, names.kept_answers])
    await bus.make_log(names.journal_stream, [names.journal])
    async with anyio.create_task_group() as tasks:
        await Kernel(setup, bus, lease_epoch, ending, tasks).run()
        tasks.cancel_scope.cancel()


class Kernel:
    """The owner of a run, from its first message to the dismissal of its workers."""

    def __init__(self, setup: RunSetup, bus: Bus, lease_epoch: int, ending: Ending, tasks: TaskGroup) -> None:
        self._setup = setup
        self._config = setup.config
        self._scheduler = setup.scheduler
        self._report = setup.report
        self._view = setup.view
        self._fleet = setup.fleet
        self._names = setup.names
        self._bus = bus
        self._lease_epoch = lease_epoch
        self._ending = ending
        self._tasks = tasks
        self._trainers = Trainers(bus, setup.names, setup.placement, lease_epoch)
        self._engines = Engines(
            bus,
            setup.names,
            setup.fleet,
            lease_epoch,
            on_swapped=self._swapped,
            on_callable=self._notify,
            turn_s=min(_TURN_S, self._config.workflow.timeout_s / _TURNS_PER_WORKFLOW),
        )
        incarnation = setup.resumed[1].incarnation if setup.resumed else 0
        self._journal = JournalWriter(bus, setup.names, lease_epoch, incarnation)
        self._tickets = TicketQueue(bus, setup.names, samples=setup.graph.samples)
        self._checkpointer = Checkpointer(
            setup, bus, self._trainers, self._engines, self._tickets, self._journal
        )
        self._engine_errors = EngineErrors()
        self._commands_wait = anyio.Event()
        self._changed = anyio.Event()
        self._started = False
        self._fleet.on_ready = self._on_ready
        self._fleet.on_lost = self._on_lost

    async def run(self) -> None:
        """Own the run until it is over. The workers are dismissed, however it ends."""
        await self._serve()
        if not self._setup.goes_on and await self._is_repeated():
            self._ending.end("repeated", "")
            return
        self._tasks.start_soon(self._beacons)
        self._tasks.start_soon(self._fleet.watch)
        self._tasks.start_soon(self._carry_out)
        self._tasks.start_soon(self._drain_when_asked)
        try:
            await self._fleet.launch(self._setup.workers, self._tasks)
            self._tasks.start_soon(self._begin)
            await self._ending.over.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._dismiss()
            self._report.refused = self._bus.refused

    # ------------------------------------------------------------------------------------ beginning

    async def _serve(self) -> None:
        """Answer workers, and listen to them."""
        bus, names = self._bus, self._names
        for role in ROLES:
            await bus.serve(names.kernel(role, "join"), Join, partial(self._welcome, role))
            await bus.subscribe(names.kernel(role, "heartbeat"), Heartbeat, self._fleet.beat)
            await bus.subscribe(names.kernel(role, "leaving"), Leaving, self._fleet.leaving)
        await bus.subscribe(names.ticket_started, TicketStarted, self._ticket_started)
        await bus.subscribe(names.progress, Progress, self._progress)

    async def _begin(self) -> None:
        """Lead the run from processes that start to the first ticket."""
        with anyio.move_on_after(_START_S) as starting:
            await self._until_trainers_ready()
        if starting.cancelled_caught:
            raise self._not_ready()
        resumed = self._setup.resumed
        notes = await (self._trainers.load(None, 0) if resumed is None else self._repeat(resumed[1]))
        if self._ending.over.is_set():
            return
        self._engines.remember(notes)
        self._engines.announce(notes[-1])
        self._tasks.start_soon(self._engines.look_after_lending)
        if resumed is not None and self._journal.incarnation != resumed[1].incarnation:
            # Without it another crash would begin this incarnation a second time.
            await self._checkpointer.save()
        self._view.note = "waiting for all workers"
        with anyio.move_on_after(_START_S) as starting:
            await self._until_all_callable()
        if starting.cancelled_caught:
            raise self._not_ready()
        self._view.note = ""
        self._started = True
        self._setup.notify_plugins("stretto_run_started", config=self._config)
        self._tasks.start_soon(self._tickets.follow, self._take_in)
        self._report.first_ticket()
        self._scheduler.start()
        self._command()

    async def _repeat(self, state: KernelState) -> tuple[WeightsNote, ...]:
        """Train again what the journal has beyond a checkpoint.

        Returns:
            The weights of versions that evaluations need, and the newest, which come last.
        """
        assert self._setup.resumed is not None
        self._view.note = "repeating the journal"
        recovered = await repeat_journal(
            self._bus,
            self._names,
            self._scheduler,
            self._trainers,
            self._setup.resumed,
            values=self._setup.values,
            attempts_from=self._lease_epoch * _ATTEMPTS_PER_KERNEL,
            on_change=self._change_values,
            on_repeated=self._report_repeated,
        )
        await self._tickets.clear()
        self._journal.incarnation = recovered.incarnation
        self._tickets.log_sequence = recovered.log_sequence
        self._engines.remember(recovered.notes)
        if self._setup.goes_on:
            log.info("resumed", version=recovered.notes[-1].version, repeated=recovered.repeated)
            self._report.recall()
            return recovered.notes
        if recovered.repeated:
            await self._checkpointer.save_required(recovered.notes[-1])
        self._ending.next_values = recovered.next_values
        self._ending.end("repeated", "")
        return recovered.notes

    def _report_repeated(self, start: StartBatch, result: StepResult, divergence: float | None) -> None:
        self._report.step(start, result, generate_busy_s=0.0, divergence=divergence)

    async def _is_repeated(self) -> bool:
        """Whether the journal has nothing to repeat with these values; then no worker need be started."""
        assert self._setup.resumed is not None
        state, values = self._setup.resumed[1], self._setup.values
        journal = await read_journal(self._bus, self._names, state, values)
        self._ending.next_values = journal.next.values if journal.next else None
        return values == state.values and not journal.batches

    async def _change_values(
        self, notes: tuple[WeightsNote, ...], taken: int, recorded: JournalChange | None
    ) -> None:
        """Go over to this kernel's values: record the change in the journal and write a checkpoint.

        Args:
            notes: of older versions that evaluations need, and of the weights, which come last.
            taken: last message of the log that the ledger has taken in.
            recorded: the journal's entry of this change, if a former kernel wrote it.
        """
        note, values = notes[-1], self._setup.values
        if note.version > self._config.steps:
            raise RunError(
                f"steps is {self._config.steps}, and the run has come to {note.version}: resume it with more"
            )
        if recorded is None:
            former = yaml.safe_load(values_file(self._setup.folder, values - 1).read_text())
            changed = differences(former, self._setup.composed.document)
            entry = JournalChange(self._journal.incarnation, note.version, values, taken, changed)
            await self._journal.append(entry, "change", note.version)
            log.info(
                "values changed", version=note.version, **{key: new for key, (_, new) in changed.items()}
            )
        self._tickets.log_sequence = taken
        self._engines.remember(notes)
        await self._checkpointer.save_required(note, checkpoint_name(note.version, values))

    async def _until_trainers_ready(self) -> None:
        trainers = {worker.id for worker in self._setup.workers if worker.role == "trainer"}
        while trainers - {member.worker for member in self._fleet.of("trainer")}:
            await self._changed.wait()

    async def _until_all_callable(self) -> None:
        workers = {worker.id for worker in self._setup.workers}
        while missing := workers - {each.worker for each in self._fleet.members.values() if each.callable}:
            with anyio.move_on_after(_WAITING_LOG_S) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                log.info("waiting", workers=", ".join(sorted(missing)))

    def _not_ready(self) -> RunError:
        return RunError(f"not ready after {_START_S:.0f} s: {self._fleet.starting}")

    # -------------------------------------------------------------------------------------- the end

    async def _drain_when_asked(self) -> None:
        """Once a drain is asked for: issue nothing more, finish the step under way, save, and end."""
        ending = self._ending
        await ending.drain_requested.wait()
        if self._started:
            self._scheduler.close()
            self._view.note = f"finishing the step under way, then a checkpoint ({ending.drain_reason})"
            while self._scheduler.training:
                await self._changed.wait()
            await self._checkpointer.save()
        ending.end(ending.drain_status, ending.drain_reason)

    async def _dismiss(self) -> None:
        """Ask the workers to leave, and stop those that do not."""
        self._view.note = "stopping the workers"
        for _ in range(2):
            with anyio.move_on_after(1):
                await self._beacon("over")
        await self._fleet.stop(0 if self._ending.hurried else _LEAVE_S)

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
            run=self._setup.run,
            folder=str(self._setup.folder),
            lease_epoch=self._lease_epoch,
            grace_s=self._config.bus.grace_s,
            fingerprints={path: dataset.fingerprint for path, dataset in self._setup.datasets.items()},
        )

    def _on_ready(self, member: FleetMember) -> None:
        log.info("worker ready", worker=member.worker)
        if member.role == "inference":
            self._tasks.start_soon(self._engines.keep_current, member)
        else:
            member.callable = True
        self._notify()

    def _on_lost(self, member: FleetMember, how: str, final: bool) -> None:
        self._notify()
        self._engines.look_again()
        if final:
            self._ending.end("failed", f"{member.worker}: {how}")
        elif member.role == "trainer" and not self._started:
            self._ending.end("failed", f"{member.worker} was lost while the run was starting ({how})")
        elif member.role == "trainer":
            self._ending.end(
                "failed",
                f"{member.worker} was lost at version {self._scheduler.version} ({how}); "
                f"`stretto resume {self._setup.folder}` goes on where it was",
            )
        elif member.role == "rollout":
            self._scheduler.worker_lost(member.worker)
            self._command()

    def _notify(self) -> None:
        """Wake those who wait for a change, and send a beacon."""
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

    # ---------------------------------------------------------------------------- events of tickets

    def _ticket_started(self, message: TicketStarted) -> None:
        self._scheduler.ticket_started(message.purpose, message.ticket, message.attempt, message.worker)

    def _progress(self, message: Progress) -> None:
        for ticket, attempt, version in message.oldest:
            self._scheduler.first_token(ticket, attempt, version)
        self._command()

    def _take_in(self, outcome: GroupDone | GroupFailed) -> None:
        if isinstance(outcome, GroupDone):
            self._scheduler.group_done(outcome)
        else:
            self._scheduler.group_failed(outcome)
        self._command()

    # ---------------------------------------------------------------------- the scheduler's commands

    def _command(self) -> None:
        """Wake the task that carries out the scheduler's commands: there may be some."""
        self._commands_wait.set()

    async def _carry_out(self) -> None:
        """Carry out commands, one after the other, in the order they were given."""
        while True:
            await self._commands_wait.wait()
            self._commands_wait = anyio.Event()
            for issuing, commands in groupby(
                self._scheduler.commands(), lambda each: isinstance(each, Issue)
            ):
                if issuing:  # an evaluation issues thousands at once: they need not wait for each other
                    async with anyio.create_task_group() as together:
                        for command in commands:
                            together.start_soon(self._do, command)
                else:
                    for command in commands:
                        await self._do(command)
            scheduler = self._scheduler
            resting = scheduler.resting or not self._setup.graph.samples
            self._engines.lend(Wish(scheduler.evaluating, scheduler.needed_versions, resting))

    async def _do(self, command: Command) -> None:
        match command:
            case Issue(ticket):
                await self._tickets.issue(ticket)
            case Withdraw(purpose, ticket, attempt):
                await self._tickets.withdraw(purpose, ticket, attempt)
            case StartBatch():
                self._tasks.start_soon(self._step, command)
            case EvaluationDone():
                await self._end_evaluation(command)
            case HeldBack(evaluating, waiting):
                log.warning("evaluations hold training back", evaluating=evaluating, waiting=waiting)
            case Finish():
                await self._engines.busy_s()  # the summary has their last figures
                await self._checkpointer.save()
                self._ending.end("completed", "")
            case Fail(reason):
                self._ending.drain("failed", reason)

    async def _step(self, start: StartBatch) -> None:
        """Train a batch: journal, calls, new weights; then let the scheduler go on."""
        result, divergence = await self._train(start)
        version, config = result.note.version, self._config
        due = bool(config.checkpoint.every) and version % config.checkpoint.every == 0
        due |= config.checkpoint.keep_best and self._scheduler.is_due(version)
        busy_s = await self._engines.busy_s()
        # Nobody may see the ledger without the figures, or weights of a version that is not there yet.
        self._scheduler.step_finished(hold=due, divergence=divergence)
        metrics = self._report.step(start, result, generate_busy_s=busy_s, divergence=divergence)
        self._engines.announce(result.note)
        self._command()
        self._notify()
        self._setup.notify_plugins("stretto_step_finished", metrics=metrics)
        self._stop_where_it_fails(version)
        if due:
            await self._checkpointer.save()
            self._scheduler.release()
            self._command()

    async def _train(self, start: StartBatch) -> tuple[StepResult, float | None]:
        """The calls of a step between its two journal entries; their result, and the batch's divergence."""
        rows = _rows(start.groups)
        tickets = tuple(group.ticket for group in start.groups)
        incarnation = self._journal.incarnation
        batch = JournalBatch(incarnation, start.version, rows, tickets, self._setup.layout, self._config.seed)
        await self._journal.append(batch, "batch", start.version)
        ahead = _rows(tuple(self._scheduler.done_groups))
        needed = self._scheduler.needed_versions
        result = await self._trainers.step(incarnation, start.version, rows, ahead, needed)
        version = result.note.version
        divergence = self._engine_errors.divergence(result.divergence)
        finished = JournalStep(incarnation, version, result.note.digest, divergence)
        await self._journal.append(finished, "step", version)
        return result, divergence

    def _stop_where_it_fails(self, version: int) -> None:
        """Drain the run where its gradients are not finite, or its reward has collapsed."""
        if self._report.skipped_in_a_row == _MOST_SKIPPED:
            reason = f"the gradients of {_MOST_SKIPPED} steps in a row were not finite"
            self._ending.drain("failed", reason)
        if self._config.on_collapse == "stop" and (
            collapse := self._report.adviser.said("reward_collapse", version)
        ):
            self._ending.drain("failed", f"reward collapse (on_collapse: stop): {collapse}")

    async def _end_evaluation(self, done: EvaluationDone) -> None:
        self._tickets.evaluation_ended()
        version = done.evaluation.version
        if self._config.evaluation is not None and self._config.evaluation.keep_answers:
            await self._write_answers(version, done.groups)
        entry = JournalEvaluation(self._journal.incarnation, done.evaluation)
        await self._journal.append(entry, "evaluation", version)
        self._report.evaluation(done.evaluation)
        if self._config.checkpoint.keep_best:
            await self._checkpointer.prune()

    async def _write_answers(self, version: int, groups: tuple[GroupDone, ...]) -> None:
        """Copy an evaluation's answers from the log to a file, by row. A failure is reported; the run goes
        on."""
        final = self._setup.folder / "answers" / f"step-{version:06d}.jsonl"
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


def _rows(groups: tuple[GroupDone, ...]) -> tuple[RowRef, ...]:
    return tuple(
        RowRef(member.id, member.sequence, member.index, group.ticket, member.length)
        for group in groups
        for member in group.members
    )
