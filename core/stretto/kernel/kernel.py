"""The kernel owns a run on the bus. It passes events to the scheduler, writes them into the journal, carries
out the scheduler's commands, and never touches token data. It lives as long as its bus connection."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import anyio
import structlog
from anyio.abc import TaskGroup

from stretto.bus.client import Bus
from stretto.bus.messages import events
from stretto.bus.messages.membership import Beacon
from stretto.bus.messages.tickets import GroupFailed, Progress, TicketsStarted
from stretto.errors import BusError, RunError, StrettoError
from stretto.kernel.bus_watch import watch_bus, watch_owner, watch_store
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import Trainers
from stretto.kernel.durable.checkpointer import Checkpointer
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.durable.recovery import Living, Recovered
from stretto.kernel.durable.resumption import Resumption
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.admission import Admission
from stretto.kernel.fleet.routes import RouteSender
from stretto.kernel.fleet.sample_writer_supervisor import SampleWriterSupervisor
from stretto.kernel.fleet.worker_scaling import WorkerScaler
from stretto.kernel.operation import Operation
from stretto.kernel.replacement import TrainerReplacement
from stretto.kernel.schedule import commands
from stretto.kernel.schedule.fold import apply, decisions, outcome_read
from stretto.kernel.schedule.lending import Demand
from stretto.kernel.schedule.outcomes import Outcome, refs_of
from stretto.kernel.schedule.tickets import TicketQueue
from stretto.kernel.setup import RunSetup
from stretto.kernel.steps import Steps
from stretto.weights import WeightsNote

log = structlog.get_logger()

_LEAVE_S = 8.0
"""At the end of the run, workers have this many seconds to leave before the kernel stops them."""
_RECORD_S = 2.0
"""Seconds to store the last event, `RunEnded`. Without it, a resume ends the run for the same reason."""
_JOIN_AGAIN_S = 15.0
"""A former kernel's trainers have this many seconds to join again and to report their weights."""
_ATTEMPTS_PER_KERNEL = 1000
"""A resumed kernel numbers ticket attempts from its lease epoch times this number, above all former ones."""


@dataclass(eq=False)
class Kernel:
    """One kernel of a run, from its first message to the end of its workers."""

    _setup: RunSetup
    _bus: Bus
    _journal: JournalWriter
    _ending: Ending
    _tasks: TaskGroup

    def __post_init__(self) -> None:
        setup, bus, journal, ending, tasks = self._setup, self._bus, self._journal, self._ending, self._tasks
        names, fleet, epoch = setup.names, setup.fleet, journal.epoch
        self._scheduler, self._facts, self._fleet, self._names = setup.scheduler, setup.facts, fleet, names
        self._facts.bus = bus
        journal.on_stored = setup.on_stored
        trainers = self._trainers = Trainers(bus, names, setup.placement, journal)
        engines = self._engines = Engines(setup, bus, journal)
        self._routes = RouteSender(bus, names, fleet, epoch, finish_s=setup.config.workflow.limit_s)
        tickets = self._tickets = TicketQueue(bus, names, epoch, samples=setup.graph.samples)
        samples = self._samples = SampleWriterSupervisor(setup, bus, epoch)
        checkpointer = Checkpointer(setup, bus, journal, tasks, trainers, engines, tickets, samples)
        self._checkpointer = checkpointer
        self._scaler = WorkerScaler(setup, bus, epoch, ending, tasks)
        self._admission = Admission(setup, bus, journal, ending, tasks, engines, self._routes, self._hear)
        self._operation = Operation(setup, bus, ending, self._scaler)
        self._steps = Steps(setup, journal, tasks, trainers, engines, checkpointer, self._hear)
        self._replacement = TrainerReplacement(
            setup, journal, ending, self._admission, trainers, engines, checkpointer, self._steps
        )
        self._resumption: Resumption | None = None
        if setup.resumed is not None:
            self._resumption = Resumption(
                setup, bus, journal, ending, trainers, engines, tickets, checkpointer, self._steps, self._do
            )
        self._commands: list[commands.Command] = []
        self._heard = anyio.Event()
        self._owned = False
        """Whether the scheduler takes in new events. Before that, its state may be a former kernel's."""

    async def run(self, former_tickets: int) -> None:
        """Own the run until it ends, then dismiss the workers, also after an error. `former_tickets` is the
        sequence number of the last ticket that former kernels put into the queue."""
        await self._tickets.clear(former_tickets)
        await self._serve()
        setup, fleet, is_replay = self._setup, self._fleet, self._setup.replays is not None
        if self._resumption is not None:
            await self._resumption.read()
        version = setup.resumed[1].version if setup.resumed else 0
        self._journal.hear(events.KernelBegan(self._journal.epoch, version, self._facts.wall_s))
        await self._journal.flush()  # observers may refuse the run's files
        self._facts.begun = True
        continues = self._resumption is not None and not is_replay
        if continues:
            await fleet.adopt(setup.workers, self._tasks)  # before workers hear of this kernel
            self._admission.on_trainer_lost = lambda worker, how: None  # new trainers replace them
        workers_live, trainers_live = bool(fleet.adoption.absent), fleet.adoption.has_trainers
        self._tasks.start_soon(self._beacons)
        self._tasks.start_soon(fleet.watch)
        self._tasks.start_soon(watch_bus, setup, self._bus, self._ending)
        self._tasks.start_soon(watch_store, setup, self._bus, self._ending)
        self._tasks.start_soon(self._journal.keep)
        self._tasks.start_soon(self._carry_out)
        self._tasks.start_soon(self._drain_when_asked)
        if not is_replay:
            self._tasks.start_soon(self._samples.run)
        try:
            if continues:
                await fleet.adoption.until_others_left(self._ending.over, fleet.reconnect_s)
            await fleet.launch(setup.workers, self._tasks)
            self._facts.note = ""
            self._tasks.start_soon(self._begin, workers_live, trainers_live)
            await self._ending.over.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._dismiss()
                await self._record_end()
            self._facts.refused = self._bus.refusals.count
            self._facts.journal = self._journal.head

    # ------------------------------------------------------------------------------------ beginning

    async def _serve(self) -> None:
        bus, names = self._bus, self._names
        await watch_owner(bus, names, self._journal.epoch, self._ending)
        await self._admission.serve()
        await self._operation.serve()
        await self._samples.serve()
        await bus.subscribe(names.tickets_started, TicketsStarted, self._take_starts)
        await bus.subscribe(names.progress, Progress, self._hear)

    async def _begin(self, workers_live: bool, trainers_live: bool) -> None:
        """Load or recover the weights, own the run, wait for the workers, and start to issue tickets.

        `workers_live`, `trainers_live`: whether processes of a former kernel go on in this one."""
        if self._resumption is None:
            recovered, notes = None, await self._load()
        else:
            recovered, notes = await self._recover(self._resumption, workers_live, trainers_live)
        if self._ending.over.is_set():
            return
        self._own(recovered, notes)
        self._facts.note = ""
        await self._admission.until_all_callable()
        await self._samples.until_followed()
        if not self._ending.over.is_set():
            await self._start_schedule(recovered)

    async def _load(self) -> tuple[WeightsNote, ...]:
        """Load the initial models. A trainer that is lost before this is done ends the run."""
        await self._meet_trainers()
        notes = await self._trainers.load(None, 0)
        self._enable_replacement()
        return notes

    async def _recover(
        self, resumption: Resumption, workers_live: bool, trainers_live: bool
    ) -> tuple[Recovered, tuple[WeightsNote, ...]]:
        """Bring trainers and scheduler to where the stored events end."""
        living = await self._living_trainers(resumption) if trainers_live else None
        self._enable_replacement()
        await self._meet_trainers()
        async with self._engines.making_room():
            recovered = await resumption.repeat(living)
        if workers_live:
            since, version = resumption.stored.journal.heard_at, self._scheduler.version
            self._journal.hear(events.Replaced(since, "kernel", "killed", version, recovered.repeated))
        return recovered, tuple(self._steps.current(note) for note in recovered.notes)

    async def _meet_trainers(self) -> None:
        """Wait until all trainers have joined: calls go to these, and engines fetch weights from the lead."""
        self._trainers.nonces = await self._admission.until_trainers_ready()
        self._engines.trainer = self._trainers.lead

    def _own(self, recovered: Recovered | None, notes: tuple[WeightsNote, ...]) -> None:
        """Announce the weights, and let the scheduler take in events from now on."""
        self._steps.begin(notes[-1])
        self._engines.remember(notes)
        self._engines.announce(notes[-1])
        self._owned = True
        attempts_from = self._journal.epoch * _ATTEMPTS_PER_KERNEL if recovered else 0
        self._hear(self._setup.ownership(self._journal.incarnation, attempts_from=attempts_from))
        for sequence, outcome in recovered.later if recovered else ():
            self._tickets.take_in(sequence, outcome, self._take_in)
        self._tasks.start_soon(self._engines.look_after_lending)

    async def _start_schedule(self, recovered: Recovered | None) -> None:
        """Send routes, follow the outcomes, and issue tickets, except those that workers hold already."""
        # Only now: workers of a former kernel would stop calling engines that do not serve this kernel yet.
        self._tasks.start_soon(self._routes.send_changes)
        self._tasks.start_soon(self._routes.refresh)
        self._facts.started = True
        self._tasks.start_soon(self._trainers.ahead.run)
        self._tasks.start_soon(self._tickets.follow, self._take_in)
        self._setup.waits.begin()
        held = self._admission.held()
        if recovered is not None and recovered.is_exact:
            self._hear(events.ScheduleStarted(held))
        else:  # the tokens of held tickets may come from weights that do not exist any more
            self._hear(events.ScheduleStarted())
            for held_ticket in held:
                await self._tickets.withdraw(held_ticket.purpose, held_ticket.ticket, held_ticket.attempt)

    async def _living_trainers(self, resumption: Resumption) -> Living | None:
        """Return the weights of former trainers. If these cannot continue, stop them and return None."""
        living: Living | None = None
        with anyio.move_on_after(_JOIN_AGAIN_S) as waiting, suppress(BusError):
            self._admission.on_trainer_lost = lambda worker, how: waiting.cancel()
            self._trainers.nonces = await self._admission.until_trainers_ready()
            living = await resumption.living()
        if living is not None and not waiting.cancel_called:
            return living
        log.info("the trainers start again: they cannot go on")
        self._fleet.lose_all("trainer", "it cannot go on")
        await self._fleet.end_all("trainer")
        return None

    def _enable_replacement(self) -> None:
        """From now on, replace lost trainers instead of ending the run."""
        self._admission.on_trainer_lost = self._replacement.lost
        self._tasks.start_soon(self._replacement.run)

    # -------------------------------------------------------------------------------------- the end

    async def _drain_when_asked(self) -> None:
        """When asked, finish the step, write a checkpoint and end; a run without tickets ends at once."""
        ending = self._ending
        await ending.drain_requested.wait()
        if self._facts.started:
            self._hear(events.RunClosing())
            self._engines.close()
            self._fleet.needs = lambda role: role == "trainer"  # the signal may have reached all processes
            self._facts.note = f"finishing the step under way, then a checkpoint ({ending.drain_reason})"
            await self._steps.until_over()
            try:
                await self._checkpointer.save_last()
            except RunError as error:
                if ending.drain_status == "repeated":  # the next kernel would resume an older one
                    raise
                self._facts.problems.append(str(error))
            self._scaler.write_groups()
        ending.end(ending.drain_status, ending.drain_reason)

    async def _dismiss(self) -> None:
        self._engines.close()
        self._facts.loss, self._facts.note = "", "stopping the workers"
        for _ in range(2):
            with anyio.move_on_after(1):
                await self._bus.publish(self._names.beacon, Beacon(self._journal.epoch, "over"))
        at_once = self._ending.forced or not self._bus.connected
        await self._fleet.stop(0 if at_once else _LEAVE_S)
        await self._samples.stop(at_once=at_once)

    async def _record_end(self) -> None:
        if (self._owned or self._scheduler.failure) and self._ending.over.is_set():
            self._journal.hear(events.RunEnded(self._ending.status, self._ending.reason))
        if self._bus.connected:
            with anyio.move_on_after(_RECORD_S), suppress(StrettoError):
                await self._journal.flush()

    async def _beacons(self) -> None:
        while True:
            await self._bus.publish(self._names.beacon, Beacon(self._journal.epoch, "running"))
            await anyio.sleep(1)

    # ---------------------------------------------------------------------------- events of tickets

    def _take_starts(self, message: TicketsStarted) -> None:
        for started in message.started:
            self._hear(started)

    def _take_in(self, sequence: int, outcome: Outcome) -> None:
        self._hear(outcome_read(sequence, outcome), outcome=outcome)
        if isinstance(outcome, GroupFailed):
            return
        if self._setup.graph.samples and self._scheduler.tickets.is_finished(outcome):
            self._trainers.ahead.add(refs_of((outcome,)))

    def _hear(
        self,
        event: events.Input,
        measure: Callable[[], events.StepMeasured] | None = None,
        *,
        outcome: Outcome | None = None,
    ) -> None:
        """Pass an event to the scheduler; journal the event, its step's figures and the decisions."""
        if not self._owned:
            return
        apply(self._scheduler, event, outcome)
        new_commands = self._scheduler.commands()
        self._journal.hear(event)
        for consequence in (*([measure()] if measure else []), *decisions(new_commands)):
            self._journal.hear(consequence)
        self._commands += new_commands
        self._setup.waits.lacks(self._scheduler.waits_for)
        self._heard.set()

    # ---------------------------------------------------------------------- the scheduler's commands

    async def _carry_out(self) -> None:
        """Carry out commands in order, tickets concurrently, after the server has stored their events."""
        former_demand = None
        while True:
            await self._heard.wait()
            self._heard = anyio.Event()
            demand, all_commands, self._commands = self._demand(), self._commands, []
            if all_commands or demand != former_demand:
                await self._journal.flush()
            former_demand = demand
            self._engines.lend(demand)  # before commands that may wait: a step removes unneeded versions
            for are_issues, group in groupby(all_commands, lambda each: isinstance(each, commands.Issue)):
                if are_issues:  # an evaluation issues thousands of tickets at once
                    async with anyio.create_task_group() as issues:
                        for command in group:
                            issues.start_soon(self._do, command)
                else:
                    for command in group:
                        await self._do(command)

    def _demand(self) -> Demand:
        scheduler, rounds = self._scheduler, self._scheduler.evaluation
        resting = scheduler.tickets.resting or not self._setup.graph.samples
        return Demand(
            *(rounds.under_way, rounds.needed_versions, resting),
            untrained=scheduler.version == 0,
            asleep=scheduler.engines_sleep,
        )

    async def _do(self, command: commands.Command) -> None:
        match command:
            case events.RowsDrawn():
                pass  # the journal has them already, as it has all decisions
            case commands.Issue(ticket):
                await self._tickets.issue(ticket)
            case commands.Withdraw(purpose, ticket, attempt):
                await self._tickets.withdraw(purpose, ticket, attempt)
            case commands.StartBatch():
                self._tasks.start_soon(self._steps.train, command)
            case events.RetiredTicket(purpose, ticket, _, account, reason):
                if purpose == "train":
                    self._samples.retire(ticket, account, reason)
            case events.EvaluationEnded():
                self._tickets.evaluation_ended()
                if self._setup.config.checkpoint.keep_best:
                    await self._checkpointer.prune()
            case commands.HeldBack(evaluating, waiting):
                log.warning("evaluations hold training back", evaluating=evaluating, waiting=waiting)
            case commands.Finish():
                self._engines.close()
                await self._steps.until_over()
                await self._engines.busy_s()  # updates the engines' figures for the summary
                await self._checkpointer.save_last()
                self._ending.end("completed", "")
            case commands.Fail(reason):
                log.error("the run cannot go on", reason=reason)
                self._ending.drain("failed", reason)
