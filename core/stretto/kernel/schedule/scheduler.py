"""The scheduler: the ledger, the staleness gate, batches, and evaluation. A plain class without I/O.

The kernel calls a method for each event, and `commands()` returns what the kernel has to do. The scheduler
keeps these promises for every order of events, also when messages are late, lost or doubled and when workers
die:

- Every issued training ticket is in exactly one of these accounts: trained, filtered, expired, failed, in
  flight. Every ticket ends once.
- At most (η + 1)·B tickets are in flight. A ticket's tokens are no older than the training version at its
  issue.
- With a bound on divergence, the scheduler issues a ticket only while fewer than (η_eff + 1)·B tickets are in
  flight, where 0 ≤ η_eff ≤ η. Nothing else depends on η_eff.
- No group is trained twice, or at a version after its deadline. The deadline is the version of the group's
  oldest token + η. Only `on_late: drop` lets the scheduler drop a group because it is late. A resumed run may
  have another η or B: groups then keep their deadlines or get earlier ones, and tickets that no longer fit
  expire (`start`).
- `restore` of a snapshot and the events that followed it give the same state and the same commands as before.
- Every due evaluation is done once, in the order of versions, on tokens of exactly its version. At most one
  evaluation waits for another: a step that would make one more evaluation due waits too.
- Where generation and training alternate, no ticket is unfinished while a batch is trained. Generation's turn
  ends when all tickets that may be in flight are finished and no evaluation is due, training's turn when no
  further batch can start.

With n open tickets, an event costs O(η + log n) on average, plus the commands that it leads to. Only what
happens once in a kernel's life or once a checkpoint looks at all of them: `restore`, `fit`, `start` and
`snapshot`.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from stretto.algorithm import Group
from stretto.bus.messages.events import Account, Cause, RetiredTicket, RowsDrawn
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Purpose, TicketStarted
from stretto.dataset import Curriculum
from stretto.kernel.schedule.commands import (
    Command,
    Fail,
    Finish,
    SchedulerSettings,
    StartBatch,
    Withdraw,
)
from stretto.kernel.schedule.draws import Draws, DrawState, RecordedDraw
from stretto.kernel.schedule.evaluation import EvaluationRounds, EvaluationState
from stretto.kernel.schedule.gate import DivergenceGate
from stretto.kernel.schedule.health import Health
from stretto.kernel.schedule.members import Failures, MemberLedger
from stretto.kernel.schedule.open_tickets import (
    OpenTicket,
    OpenTickets,
    TrainingTickets,
    rewards_of,
    versions_of,
)
from stretto.kernel.schedule.variants import VariantAccount, VariantAccounts


class Ledger(msgspec.Struct):
    """Accounts of the training tickets. `issued` is the sum of the other accounts."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0
    in_flight: int = 0


Phase = Literal["new", "waiting", "training", "ending", "over"]
"""`new`: nothing has happened yet. `waiting`: a kernel owns the run, but its workers are not ready; the
scheduler takes in outcomes, and begins nothing."""
Setback = Literal["failed", "filtered", "left out"]
"""Why a ticket has no group to train on. `left out`: the ticket's row is not fit to train on."""


class Setbacks(msgspec.Struct):
    """Numbers in a row of failed attempts, of filtered tickets, and of tickets that were left out."""

    failed: int = 0
    filtered: int = 0
    left_out: int = 0
    rows: set[int] = set()
    """Rows whose tickets were left out."""

    def add(self, setback: Setback, row: int, reason: str, settings: SchedulerSettings) -> Fail | None:
        """Count a ticket, or a failed attempt. Return a command to end the run if there are too many."""
        if setback == "failed":
            self.failed += 1
            if self.failed == settings.max_failures:
                return Fail(f"{self.failed} groups failed one after the other; the last: {reason}")
        elif setback == "filtered":
            self.filtered += 1
            if self.filtered == settings.max_filtered:
                return Fail(f"{self.filtered} groups were filtered one after the other; the last: {reason}")
        else:
            self.left_out += 1
            self.rows.add(row)
            if len(self.rows) == settings.rows:
                return Fail(f"all {settings.rows} rows of the dataset were left out; the last: {reason}")
            if self.left_out == 2 * settings.rows:  # a curriculum may avoid other rows
                return Fail(
                    f"the last {self.left_out} rows that were drawn were left out; the last: {reason}"
                )
        return None


class Snapshot(msgspec.Struct):
    """The state of a scheduler. Every checkpoint contains it."""

    version: int = 0
    phase: Phase = "new"
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    attempts_from: int = 0
    cursor: int = 0
    open: list[OpenTicket] = []
    batch: list[int] = []
    """Tickets of the batch that is being trained; empty between two steps."""
    again: list[tuple[int, int]] = []
    held: bool = False
    closing: bool = False
    generating: bool = True
    """Whether it is generation's turn; always, unless generation and training alternate."""
    waits_for: Cause | None = None
    setbacks: Setbacks = msgspec.field(default_factory=Setbacks)
    health: Health = msgspec.field(default_factory=Health)
    failure: str = ""
    staleness: dict[int, int] = {}
    reasons: dict[str, int] = {}
    gate: DivergenceGate | None = None
    """None if the run has no bound on divergence."""
    limits: dict[int, int] = {}
    evaluation: EvaluationState = msgspec.field(default_factory=EvaluationState)
    variants: dict[str, VariantAccount] = {}
    members: MemberLedger = msgspec.field(default_factory=MemberLedger)
    failures: Failures = msgspec.field(default_factory=Failures)
    given_up: dict[int, int] = {}
    draws: DrawState | None = None
    """None if the run has no curriculum."""


def _urgency(ticket: OpenTicket) -> tuple[int, bool, int]:
    """Return a sort key: by deadline, then finished tickets before unfinished ones, then by number."""
    return ticket.deadline, ticket.done is None, ticket.id


class Scheduler:
    """One kernel's scheduler. `keep` is the algorithm's filter. Without `curriculum`, rows come in epochs."""

    def __init__(
        self,
        settings: SchedulerSettings,
        keep: Callable[[Group], bool] = lambda group: True,
        *,
        curriculum: Curriculum | None = None,
        evaluation_source: Callable[[int], str] = lambda row: "",
    ) -> None:
        self.settings = settings
        self.version = 0
        self.staleness: Counter[int] = Counter()
        """Number of trained trajectories, by staleness."""
        self.reasons: Counter[str] = Counter()
        """Number of tickets that were filtered, expired, failed or not evaluated, by reason."""
        self.limits: Counter[int] = Counter()
        """Number of steps, by η_eff at the end of the step. Empty without a bound on divergence."""
        self.variants = VariantAccounts(settings.seed, settings.variants)
        self.members, self.failures = MemberLedger(), Failures()
        self.given_up: Counter[int] = Counter()
        """Row -> number of its tickets that failed after `max_attempts`."""
        self._keep = keep
        self.draws = Draws(settings.rows, shuffle=settings.shuffle, seed=settings.seed, curriculum=curriculum)
        self._ledger = Ledger()
        self._commands: list[Command] = []
        self.tickets = TrainingTickets(settings, self._commands)
        self.evaluation = EvaluationRounds(settings, evaluation_source, self.reasons, self._commands)
        self._tickets_of: dict[Purpose, OpenTickets] = {
            "train": self.tickets,
            "eval": self.evaluation.tickets,
        }
        self.waits_for: Cause | None = None
        """What the next step, or the end of the run, waits for; None while a batch is trained."""
        self._setbacks = Setbacks()
        self._health = Health()
        self.failure = ""
        """Why the run has to end; empty if it continues, or if a former kernel has reported the reason."""
        self._phase: Phase = "new"
        self._closing = False
        self._held = False
        self._generating = True
        self._gate = DivergenceGate(settings.max_staleness)

    # ------------------------------------------------------------------------------------- views

    @property
    def ledger(self) -> Ledger:
        return msgspec.structs.replace(self._ledger, in_flight=len(self.tickets.open))

    @property
    def training(self) -> bool:
        return bool(self.tickets.batch)

    @property
    def engines_sleep(self) -> bool:
        """Whether it is training's turn on the device that it shares with the engines."""
        return not self._generating and self._phase == "training"

    @property
    def staleness_limit(self) -> int:
        """η_eff: number of train steps that generation may run ahead now. η without a bound on divergence."""
        return self._gate.limit

    @property
    def room(self) -> int:
        """Maximum number of training tickets in flight: (η_eff + 1)·B, or fewer before the last steps."""
        wanted = (self.settings.steps - self.version) * self.settings.batch_size
        return min((self.staleness_limit + 1) * self.settings.batch_size, wanted)

    def commands(self) -> list[Command]:
        """Return the commands that the kernel has to carry out, in order. Each command is returned once."""
        commands = self._commands[:]
        self._commands.clear()  # not a new list: tickets and evaluation append to this one
        return commands

    def snapshot(self) -> Snapshot:
        """Return the state, for `restore`."""
        gate = None if self.settings.max_divergence is None else msgspec.structs.replace(self._gate)
        return Snapshot(
            version=self.version,
            phase=self._phase,
            ledger=self.ledger,
            attempts_from=self.tickets.attempts_from,
            cursor=self.draws.cursor,
            open=[msgspec.structs.replace(ticket) for ticket in self.tickets.open.values()],
            batch=sorted(self.tickets.batch),
            again=list(self.draws.repeats),
            held=self._held,
            closing=self._closing,
            generating=self._generating,
            waits_for=self.waits_for,
            setbacks=copy.deepcopy(self._setbacks),
            health=copy.deepcopy(self._health),
            failure=self.failure,
            staleness=dict(self.staleness),
            reasons=dict(self.reasons),
            limits=dict(self.limits),
            gate=gate,
            evaluation=self.evaluation.snapshot(),
            variants=self.variants.snapshot(),
            members=msgspec.structs.replace(self.members),
            failures=copy.deepcopy(self.failures),
            given_up=dict(self.given_up),
            draws=self.draws.snapshot(),
        )

    # ------------------------------------------------------------------------------------ events

    def owned(self, attempts_from: int) -> None:
        """Another kernel owns the run. Until `start`, take in outcomes of former workers, and begin nothing.
        After `start`, attempts count from `attempts_from` + 1, and groups of former attempts are ignored."""
        self._phase = "waiting"
        self.tickets.attempts_from = self.evaluation.tickets.attempts_from = attempts_from

    def start(self, held: Iterable[TicketStarted] = ()) -> None:
        """Start the run, or continue the run after `owned`: issue the unfinished tickets again, except the
        tickets `held` by workers of the former kernel. Earlier failures no longer count.

        With a new η, B or number of steps, finished groups get no later deadline than η allows. The scheduler
        then keeps the open tickets that can be trained in time, earliest deadline first. The other tickets
        expire, and their prompts are issued again in new ones. Afterwards, for every j in 0..η, at most
        (j + 1)·B tickets have a deadline of version + j or earlier. Admission preserves this condition.
        """
        self._closing = self._held = False
        self._setbacks, self._health.skipped, self.failure = Setbacks(), 0, ""
        self._phase = "training"
        self.tickets.take_over(held)
        self.evaluation.tickets.take_over(held)
        self._generating |= bool(self.tickets.unfinished)  # groups may be lost in a damaged log
        self._expire_unfit()
        self._issue([each for each in self.tickets.open.values() if each.done is None and not each.worker])
        self.evaluation.issue_again()
        self._proceed()

    def restore(self, snapshot: Snapshot, recorded: Mapping[int, RecordedDraw] | None = None) -> None:
        """Replace the state by a snapshot's. `recorded` are the draws of later tickets in the journal."""
        self.version = snapshot.version
        self._phase = snapshot.phase
        self._held, self._closing = snapshot.held, snapshot.closing
        self._generating = snapshot.generating or not self.settings.alternates
        self.waits_for = snapshot.waits_for
        self._setbacks = copy.deepcopy(snapshot.setbacks)
        self._health, self.failure = copy.deepcopy(snapshot.health), snapshot.failure
        self._ledger = msgspec.structs.replace(snapshot.ledger, in_flight=0)
        self._commands.clear()
        rows = self.settings.rows  # the dataset may have fewer rows now
        tickets = (
            msgspec.structs.replace(stored, row=stored.row % rows, bounds=dict(stored.bounds))
            for stored in snapshot.open
        )
        self.tickets.restore(tickets, snapshot.attempts_from, batch=snapshot.batch)
        self.draws.restore(
            snapshot.draws, cursor=snapshot.cursor, again=snapshot.again, recorded=recorded or {}
        )
        self.staleness = Counter(snapshot.staleness)
        self.reasons.clear()  # not a new counter: the evaluation counts in this one
        self.reasons.update(snapshot.reasons)
        self.limits = Counter(snapshot.limits)
        self.members = msgspec.structs.replace(snapshot.members)
        self.failures = copy.deepcopy(snapshot.failures)
        self.given_up = Counter(snapshot.given_up)
        if snapshot.gate is not None and self.settings.max_divergence is not None:
            limit = min(snapshot.gate.limit, self.settings.max_staleness)
            self._gate = msgspec.structs.replace(snapshot.gate, limit=limit)
        else:
            self._gate = DivergenceGate(self.settings.max_staleness)
        self.evaluation.restore(snapshot.evaluation, snapshot.attempts_from)
        self.variants.restore(snapshot.variants)

    def fit(self, expire: str = "") -> None:
        """Prepare to continue with other values, or after a loss of data: an evaluation under way will begin
        again. Nothing begins before `start`. With a reason in `expire`, all finished groups expire."""
        assert not self.training
        self._phase = "waiting"
        finished = [ticket for ticket in self.tickets.open.values() if ticket.done is not None]
        for ticket in finished if expire else ():
            self._retire(ticket, "expired", expire)
        self.evaluation.fit()

    def close(self) -> None:
        """Issue no further ticket and start no further batch, because the run is ending early."""
        self._closing = True

    def ticket_started(self, purpose: Purpose, ticket: int, attempt: int, worker: str) -> None:
        """A rollout worker has begun an attempt. Withdraw an attempt that is not needed: the server delivers
        an ended ticket again if the acknowledgement was lost, a former kernel may issue a late ticket, and
        the engines of an evaluation that is over do not return."""
        tickets = self._tickets_of[purpose]
        open_ticket = tickets.find(ticket)
        is_current = open_ticket is not None and open_ticket.attempt == attempt and open_ticket.done is None
        if open_ticket is not None and is_current and self._phase != "waiting":
            tickets.started(open_ticket, worker)
            return
        self._commands.append(Withdraw(purpose, ticket, attempt))
        if open_ticket is not None and is_current:
            tickets.stop(open_ticket)  # the worker may have joined with this attempt in `held`

    def first_token(self, ticket: int, attempt: int, version: int) -> None:
        """The version of an attempt's oldest token is known before the attempt's group is finished."""
        open_ticket = self.tickets.find(ticket)
        if open_ticket is not None and open_ticket.bounds.get(attempt, version) < version <= self.version:
            open_ticket.bounds = {**open_ticket.bounds, attempt: version}
            self.tickets.date(open_ticket)
            self._proceed()

    def group_done(self, group: GroupDone) -> None:
        """All trajectories of a group are in the log. The first complete attempt of a ticket counts."""
        ticket = self._tickets_of[group.purpose].find(group.ticket)
        if ticket is None or ticket.done is not None or group.attempt not in ticket.bounds:
            return  # the ticket needs no group any more, or this attempt has failed
        is_former = group.attempt <= self.tickets.attempts_from and group.attempt != ticket.attempt
        if is_former and self._phase != "waiting":
            return
        oldest, newest = versions_of(group)
        allowed = ticket.bounds[group.attempt]
        most = self.version if group.purpose == "train" else ticket.since
        if not allowed <= oldest <= newest <= most:
            # Either the worker reports false versions, or an engine served a version that is not allowed.
            reason = f"tokens of versions {oldest} to {newest}; allowed {allowed} to {most}"
            self.group_failed(GroupFailed(group.purpose, ticket.id, group.attempt, group.worker, reason))
            return
        if group.attempt != ticket.attempt and self._phase != "waiting":
            self._commands.append(Withdraw(group.purpose, ticket.id, ticket.attempt))
        if group.purpose == "eval":
            self.evaluation.finish(ticket, group)
            self._proceed()
            return
        self._setbacks.failed = self._setbacks.left_out = 0
        self.evaluation.grant()
        self.variants.observe(group)
        ticket.done = group
        self.failures.finish(group, self.members, self.reasons)
        self.tickets.date(ticket)
        lengths = tuple(member.sampled for member in group.members)
        is_kept = self._keep(Group(tuple(member.reward for member in group.members), lengths))
        refusal = self.draws.refusal(ticket.row, rewards_of(group)) if is_kept else "by the algorithm"
        if refusal:
            self._retire(ticket, "filtered", refusal)
            self._count("filtered", ticket.row, refusal)
        else:
            self._setbacks.filtered = 0
        self._proceed()

    def group_failed(self, failure: GroupFailed) -> None:
        """The current attempt of a ticket has failed or was left out. Previous attempts do not count."""
        ticket = self._tickets_of[failure.purpose].find(failure.ticket)
        if ticket is None or ticket.done is not None or failure.attempt != ticket.attempt:
            return
        self._tickets_of[failure.purpose].failed(ticket, failure.worker)
        if failure.purpose == "eval":
            if failure.filtered:
                self.evaluation.finish(ticket, None, failure.reason)
            elif self._phase != "waiting":  # `start` issues all tickets without a worker
                self.evaluation.reissue(ticket, failure.reason)
        elif failure.filtered:
            self._retire(ticket, "filtered", failure.reason)
            self._count("left out", ticket.row, failure.reason)
        else:
            self.members.count_missing(self.settings.group_size)
            if self._phase != "waiting":
                self._count("failed", ticket.row, failure.reason)
                if not self._closing and not self._reissue(ticket, failure.reason):
                    self.failures.give_up(failure.prompt, self.settings.group_size)
        self._proceed()

    def worker_gone(self, worker: str, *, drained: bool) -> None:
        """Issue the tickets of a gone worker again. A lost worker may also have received tickets whose start
        it did not report, so issue all of these again. Drained attempts do not count to `max_attempts`."""
        if self._phase == "waiting":
            return  # `start` issues all tickets without a worker
        workers = (worker,) if drained else ("", worker)
        reason = f"its worker {worker} {'left' if drained else 'was lost'}"
        for ticket in self.tickets.held_by(*workers):
            ticket.tries -= drained
            self._reissue(ticket, reason)
        for ticket in self.evaluation.tickets.held_by(*workers):
            ticket.tries -= drained
            self.evaluation.reissue(ticket, reason)
        self._proceed()

    def step_finished(
        self, *, hold: bool = False, divergence: float | None = None, skipped: bool = False
    ) -> None:
        """The batch is trained. With `hold`, no batch starts before `release`. `divergence` is in nats per
        token, None if not measured. `skipped`: the step left at least one model unchanged."""
        self._held = hold
        self.waits_for = Cause("checkpoint") if hold else None
        assert self.training, "no batch was started"
        rewards: list[float] = []
        for id in sorted(self.tickets.batch):
            ticket = self.tickets.open.pop(id)
            assert ticket.done is not None
            self._ledger.trained += 1
            self.members.count("trained", ticket.done)
            self.variants.count(id, "trained")
            self.draws.ended(ticket, "trained")
            self.staleness.update(self.version - member.oldest for member in ticket.done.members)
            rewards += rewards_of(ticket.done)
        self.tickets.batch = frozenset()
        self.version += 1
        bound, most = self.settings.max_divergence, self.settings.max_staleness
        if bound is not None:
            if divergence is not None:
                self._gate.observe(divergence, bound=bound, max_staleness=most)
            self.limits[self._gate.limit] += 1
        self.evaluation.reached(self.version)
        stops, results = self.settings.stops_on_collapse, self.evaluation.results
        fail = self._health.observe(self.version, rewards, results, skipped=skipped, stops_on_collapse=stops)
        if fail and self.version < self.settings.steps:
            self._stop(fail)
        self._proceed()

    def expire_batch(self, reason: str) -> None:
        """Let the tickets of the batch that was started expire."""
        assert self.training, "no batch was started"
        ids, self.tickets.batch = sorted(self.tickets.batch), frozenset[int]()
        for id in ids:
            self._retire(self.tickets.open[id], "expired", reason)
        self._proceed()

    def release(self) -> None:
        """Allow batches to start again, after `step_finished(hold=True)`."""
        self._held = False
        self._proceed()

    def replay(self, tickets: Iterable[int], groups: Iterable[GroupDone]) -> StartBatch:
        """Start a recorded batch in a replay. `groups` are the groups that were trained in it."""
        assert not self.training
        ids, finished = sorted(tickets), {group.ticket: group for group in groups}
        for id in ids:
            while self._ledger.issued <= id:
                self._open_next()
            self.variants.observe(finished[id])
            self.tickets.open[id].done = finished[id]
        return self._train(ids)

    def _proceed(self) -> None:
        evaluation = self.evaluation
        if self._phase == "training":
            self._start_batch()
            self._admit()
            if self._generating and not self._closing:  # last, as its many tickets would delay the batch
                evaluation.begin_next()
            if self.version == self.settings.steps and not evaluation.needed_versions and not self._held:
                self._phase = "ending"
                is_missing = self.settings.evaluation_rows and not evaluation.is_complete(self.version)
                if is_missing and not self._closing:
                    self.waits_for = Cause("evaluation", self.version)
                    evaluation.begin(self.version)
        if self._phase in ("training", "ending") and not self._closing:
            evaluation.begin_rows(everything=self.tickets.resting)
        if self._phase == "ending" and evaluation.under_way is None:
            self._phase = "over"
            self._commands.append(Finish())

    # ------------------------------------------------------------------------- tickets and ledger

    def _admit(self) -> None:
        room, admitted = self.room, list[OpenTicket]()
        while len(self.tickets.open) < room and self._generating and not self._closing:
            admitted.append(self._open_next())
        self._issue(admitted)

    def _issue(self, tickets: Iterable[OpenTicket]) -> None:
        """Issue tickets, after recording their draws and draws whose records a damaged store has lost."""
        if draws := self.draws.take_unrecorded():
            self._commands.append(RowsDrawn(self.version, draws))
        for ticket in tickets:
            self._reissue(ticket, "")

    def _open_next(self) -> OpenTicket:
        draw = self.draws.next(self._ledger.issued, self.version)
        deadline = self.version + self.settings.max_staleness
        ticket = OpenTicket(self._ledger.issued, draw.row, self.version, deadline, draw.version, draw.drops)
        self._ledger.issued += 1
        self.variants.count(ticket.id, "issued")
        self.tickets.open[ticket.id] = ticket
        self.tickets.place(ticket)
        return ticket

    def _expire_unfit(self) -> None:
        """Expire the open tickets that cannot be trained in time; see `start`."""
        settings, kept_count = self.settings, 0
        for ticket in self.tickets.open.values():
            if ticket.done is not None or ticket.worker:
                ticket.deadline = min(ticket.deadline, ticket.oldest + settings.max_staleness)
            else:  # the ticket is issued again at this version
                ticket.deadline = self.version + settings.max_staleness
            self.tickets.place(ticket)
        for ticket in sorted(self.tickets.open.values(), key=_urgency):
            batches = min(ticket.deadline + 1, settings.steps) - self.version
            if kept_count < batches * settings.batch_size:
                kept_count += 1
            else:
                terms = f"max_staleness={settings.max_staleness}, batch_size={settings.batch_size}"
                reason = f"does not fit {terms}, steps={settings.steps} from version {self.version} on"
                if ticket.done is None and ticket.worker:
                    self._commands.append(Withdraw("train", ticket.id, ticket.attempt))
                self._retire(ticket, "expired", reason)
                self.draws.repeats.append((ticket.row, ticket.drops))

    def _reissue(self, ticket: OpenTicket, reason: str) -> bool:
        """Issue the next attempt of a ticket, or retire the ticket. Return whether it was issued."""
        if refusal := self.tickets.issue(ticket, self.version, reason, self.variants.of(ticket.id)):
            self._retire(ticket, "failed", refusal)
            self.given_up[ticket.row] += 1
        return not refusal

    def _retire(self, ticket: OpenTicket, account: Account, reason: str) -> None:
        self.tickets.remove(ticket.id)
        setattr(self._ledger, account, getattr(self._ledger, account) + 1)
        self.variants.count(ticket.id, account)
        self.draws.ended(ticket, account)
        self.reasons[f"{account}: {reason}"] += 1
        self._commands.append(RetiredTicket("train", ticket.id, ticket.attempt, account, reason))
        if ticket.done is not None:
            self.members.count(account, ticket.done)

    def _count(self, setback: Setback, row: int, reason: str) -> None:
        """Count a setback, and end the run if there were too many in a row."""
        if self._phase != "waiting":  # `start` sets the counts to 0
            too_many = self._setbacks.add(setback, row, reason, self.settings)
            if too_many and not (self._closing and setback == "left out"):
                self._stop(too_many)

    def _stop(self, fail: Fail) -> None:
        self._commands += [] if self._closing else [fail]
        self._closing, self.failure = True, fail.reason

    # -------------------------------------------------------------------------------- the batches

    def _start_batch(self) -> None:
        """Start a batch if one can start; without one, it is generation's turn."""
        if self.training or self._held:
            return
        can_start = self._can_start()
        if self.settings.alternates and not self._closing:
            self._generating = not can_start
        if can_start:
            self._commands.append(self._train(self.tickets.finished.pop(self.settings.batch_size)))

    def _can_start(self) -> bool:
        """Return whether enough groups are finished, and every deadline can still be met after a batch."""
        needed = self.evaluation.needed_versions
        is_last = self.version == self.settings.steps
        self.waits_for = Cause("evaluation", needed[0]) if is_last and needed else None
        if self._closing or is_last:
            return False
        if len(self.tickets.finished) < self.settings.batch_size:
            self.waits_for = Cause("groups")
            return False
        if self._generating and self.settings.alternates:
            if self.tickets.unfinished or len(self.tickets.open) < self.room:
                self.waits_for = Cause("groups")
                return False
            if needed:
                self.waits_for = Cause("evaluation", needed[0])
                return False
        while (late := self.tickets.blocking(self.version)) is not None:
            if self.settings.on_late == "wait":
                self.waits_for = Cause("late_ticket", late.id)
                return False
            if late.attempt:
                self._commands.append(Withdraw("train", late.id, late.attempt))
            self._retire(late, "expired", f"due at version {self.version} and unfinished")
            if late.drops + 1 < self.settings.max_attempts:
                self.draws.repeats.append((late.row, late.drops + 1))  # for a new ticket with this row
        if self.evaluation.must_hold_back(self.version + 1):
            self.waits_for = Cause("evaluation", needed[0])
            return False
        return True

    def _train(self, ids: Iterable[int]) -> StartBatch:
        tickets = self.tickets.train(ids)
        groups = tuple(ticket.done for ticket in tickets if ticket.done is not None)
        return StartBatch(self.version, groups, tuple(ticket.row for ticket in tickets))
