"""The scheduler's promises, held against generated sequences of events, and its rules by example."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernel_events import finished, issued_by, report, stored
from stretto.algorithm import Group
from stretto.bus.messages.events import Cause, Evaluation, EvaluationEnded, RetiredTicket, RowsDrawn, RunEnded
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Purpose, Ticket, TicketStarted
from stretto.kernel.schedule.commands import (
    Command,
    Fail,
    Finish,
    HeldBack,
    Issue,
    SchedulerSettings,
    StartBatch,
    Withdraw,
)
from stretto.kernel.schedule.fold import apply
from stretto.kernel.schedule.gate import DivergenceGate
from stretto.kernel.schedule.members import MemberLedger
from stretto.kernel.schedule.scheduler import Scheduler


def done(ticket: Ticket, oldest: int = 0, newest: int | None = None, reward: float = 1.0) -> GroupDone:
    return finished(ticket, (reward,), oldest=oldest, newest=newest)


def failed(ticket: Ticket, reason: str = "raised", *, filtered: bool = False) -> GroupFailed:
    return GroupFailed(ticket.purpose, ticket.id, ticket.attempt, "w", reason, filtered)


def issued(scheduler: Scheduler) -> list[Ticket]:
    """Tickets given out by the commands so far; beside retirements, other commands must not be there."""
    commands = scheduler.commands()
    assert all(isinstance(command, Issue | RetiredTicket) for command in commands), commands
    return issued_by(commands)


def started(keep: Callable[[Group], bool] = lambda group: True, **settings: Any) -> Scheduler:
    settings = {"batch_size": 1, "max_staleness": 0, "rows": 100, **settings}
    scheduler = Scheduler(SchedulerSettings(**settings), keep)
    scheduler.start()
    return scheduler


def batches(scheduler: Scheduler) -> list[list[int]]:
    starts = [each for each in scheduler.commands() if isinstance(each, StartBatch)]
    return [[group.ticket for group in start.groups] for start in starts]


def continued(scheduler: Scheduler, **changes: Any) -> Scheduler:
    """A scheduler of the next kernel, with other settings."""
    other = Scheduler(replace(scheduler.settings, **changes), keep=lambda group: group.rewards[0] >= 0)
    other.restore(stored(scheduler))
    return other


def resumed(scheduler: Scheduler, **changes: Any) -> Scheduler:
    """The same, when its run goes on without workers of the former one."""
    other = continued(scheduler, **changes)
    other.owned(1000)
    other.start()
    return other


# ------------------------------------------------------------------------------- generated events


DIVERGENCES = st.sampled_from([None, 0.0, 0.004, 0.02, 5.0, math.inf, math.nan])
"""Of a batch, where the bound is 0.01."""


class SchedulerMachine(RuleBasedStateMachine):
    """A world around the scheduler: a work queue, workers that die, an engine that lags, a network that
    loses and doubles. The invariants are those of the module's docstring."""

    @initialize(
        settings=st.builds(
            SchedulerSettings,
            batch_size=st.integers(1, 4),
            max_staleness=st.integers(0, 3),
            steps=st.integers(1, 6),
            on_late=st.sampled_from(["wait", "drop"]),
            rows=st.integers(1, 9),
            max_attempts=st.just(1000),
            max_failures=st.just(1000),
            evaluation_rows=st.integers(0, 2),
            evaluation_every=st.integers(0, 2),
            evaluation_pace=st.sampled_from([0.0, 0.3, 2.0]),
            max_divergence=st.sampled_from([None, 0.01]),
            alternates=st.booleans(),
            variants=st.just({"a": 1.0, "b": 3.0}),
        )
    )
    def begin(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.scheduler = Scheduler(self.settings, keep=lambda group: group.rewards[0] >= 0)
        self.queue: list[Ticket] = []
        self.held: dict[str, list[tuple[Ticket, int | None]]] = {"a": [], "b": []}
        self.sent: list[GroupDone | GroupFailed] = []
        self.engine_version = 0
        self.training: StartBatch | None = None
        self.trained: Counter[int] = Counter()
        self.retired: set[int] = set()
        self.evaluated: list[int] = []
        self.due: list[int] = []
        self.lives = 1
        self.over = False
        self.groups_trained = 0
        self.unfit = self.given_up = 0
        self.variants: dict[int, str] = {}
        self.divergence: float | None = None
        self.attempts: dict[tuple[str, int], int] = {}
        """Attempt of each ticket that is not withdrawn, of this life."""
        self.told: dict[tuple[str, int, int], str] = {}
        """Worker that the scheduler knows of an attempt."""
        self.rows: dict[int, int] = {}
        self.deadlines: dict[int, int] = {}
        """Of the groups that were finished at the start of this life."""
        self.staleness: Counter[int] = Counter()
        self.held_back = 0
        self.holds = False
        self.scheduler.start()
        self.obey()

    def obey(self, commands: Sequence[Command] | None = None) -> None:
        """Carry out the scheduler's commands, or some of them, as the kernel would, and check each."""
        for command in self.scheduler.commands() if commands is None else commands:
            match command:
                case Issue(ticket):
                    assert ticket.min_version <= self.scheduler.version
                    assert ticket.exact_version not in self.evaluated
                    self.queue.append(ticket)
                    assert (ticket.purpose, ticket.id) not in self.attempts, "the former attempt goes on"
                    self.attempts[ticket.purpose, ticket.id] = ticket.attempt
                    if ticket.purpose == "train":
                        assert self.rows.setdefault(ticket.id, ticket.row) == ticket.row
                        variant = self.variants.setdefault(ticket.id, ticket.variant)
                        assert variant == ticket.variant, "an attempt has another variant"
                    assert (ticket.purpose == "eval") == (ticket.variant == "")
                    if ticket.purpose == "train" and ticket.attempt == 1:
                        admitted = (self.scheduler.staleness_limit + 1) * self.settings.batch_size
                        assert self.scheduler.ledger.in_flight <= admitted, "more than η_eff allows"
                case StartBatch(version, groups):
                    assert self.training is None, "two batches at once"
                    assert not self.holds
                    assert version == self.scheduler.version < self.settings.steps
                    assert len(groups) == self.settings.batch_size
                    assert [group.ticket for group in groups] == sorted(group.ticket for group in groups)
                    assert command.rows == tuple(self.rows[group.ticket] for group in groups)
                    later = self.scheduler.tickets.done_groups
                    urgency = [*sorted(map(self.urgency, groups)), *map(self.urgency, later)]
                    assert urgency == sorted(urgency), "a group with an earlier deadline was left"
                    assert len(later) == len(self.scheduler.tickets.finished)
                    assert all(map(self.scheduler.tickets.is_finished, later))
                    for group in groups:
                        oldest = min(member.oldest for member in group.members)
                        assert 0 <= version - oldest <= self.settings.max_staleness, "too stale"
                        assert group.members[0].reward >= 0, "a filtered group is trained"
                        self.staleness[version - oldest] += 1
                        self.trained[group.ticket] += 1
                        assert self.trained[group.ticket] == 1, "trained twice"
                        assert group.ticket not in self.retired, "a retired ticket is trained"
                    self.training = command
                case Finish():
                    assert not self.over
                    assert not self.holds
                    self.over = True
                case EvaluationEnded(evaluation):
                    self.evaluated.append(evaluation.version)
                case HeldBack(evaluating, waiting):
                    assert self.training is None
                    assert evaluating < waiting <= self.scheduler.version
                    self.held_back += 1
                case RetiredTicket("train", id):
                    assert id not in self.retired, "retired twice"
                    self.retired.add(id)
                case Withdraw(purpose, id, attempt):
                    assert self.attempts.pop((purpose, id)) == attempt
                case RetiredTicket():
                    pass
                case Fail():
                    raise AssertionError("failures were few")
                case RowsDrawn():
                    raise AssertionError("the run has no curriculum")

    def urgency(self, group: GroupDone) -> tuple[int, int]:
        """Deadline and number of a finished group: the order of training."""
        oldest = min(member.oldest for member in group.members)
        return self.deadlines.get(group.ticket, oldest + self.settings.max_staleness), group.ticket

    # ---- what the world may do, in any order

    @precondition(lambda self: self.queue)
    @rule(worker=st.sampled_from("ab"), pick=st.randoms(use_true_random=False), tell=st.booleans())
    def take(self, worker: str, pick: random.Random, tell: bool) -> None:
        """A worker takes a ticket; the news of it may be lost."""
        ticket = self.queue.pop(pick.randrange(len(self.queue)))
        self.held[worker].append((ticket, None))
        if tell:
            scheduler = self.scheduler
            tickets = scheduler.tickets if ticket.purpose == "train" else scheduler.evaluation.tickets
            found = tickets.find(ticket.id)
            is_wanted = found is not None and found.done is None and found.attempt == ticket.attempt
            scheduler.ticket_started(ticket.purpose, ticket.id, ticket.attempt, worker)
            if not is_wanted:
                assert scheduler.commands() == [Withdraw(ticket.purpose, ticket.id, ticket.attempt)]
            self.told[ticket.purpose, ticket.id, ticket.attempt] = worker
        self.obey()

    @precondition(lambda self: self.engine_version < self.scheduler.version)
    @rule()
    def swap(self) -> None:
        self.engine_version += 1

    @precondition(lambda self: any(self.held.values()))
    @rule(worker=st.sampled_from("ab"), pick=st.randoms(use_true_random=False), tell=st.booleans())
    def sample(self, worker: str, pick: random.Random, tell: bool) -> None:
        """The first token of a ticket, if the engine may give it."""
        waiting = [
            index
            for index, (ticket, oldest) in enumerate(self.held[worker])
            if oldest is None and (ticket.purpose == "eval" or ticket.min_version <= self.engine_version)
        ]
        if waiting:
            index = pick.choice(waiting)
            ticket, _ = self.held[worker][index]
            oldest = self.engine_version if ticket.purpose == "train" else ticket.min_version
            self.held[worker][index] = (ticket, oldest)
            if tell and ticket.purpose == "train":
                self.scheduler.first_token(ticket.id, ticket.attempt, self.engine_version)
                self.obey()

    @precondition(lambda self: any(self.held.values()))
    @rule(
        worker=st.sampled_from("ab"),
        pick=st.randoms(use_true_random=False),
        fate=st.sampled_from(["done", "done", "done", "done", "filtered", "failed", "unfit"]),
    )
    def finish(self, worker: str, pick: random.Random, fate: str) -> None:
        """A ticket comes to its end; its message is on the way."""
        ripe = [index for index, (_, oldest) in enumerate(self.held[worker]) if oldest is not None]
        if not ripe:
            return
        ticket, oldest = self.held[worker].pop(pick.choice(ripe))
        assert oldest is not None
        match fate:
            case "failed":
                self.sent.append(failed(ticket))
            case "unfit" if ticket.row % 2:  # a row is fit or not, whenever its turn comes; row 0 is
                self.sent.append(failed(ticket, "prompt too long", filtered=True))
            case _:
                reward = -1.0 if fate == "filtered" and ticket.purpose == "train" else 1.0
                self.sent.append(done(ticket, oldest, self.newest(ticket), reward))

    def newest(self, ticket: Ticket) -> int:
        """What samples the last token of a ticket that is finished now."""
        return self.engine_version if ticket.purpose == "train" else ticket.min_version

    @precondition(lambda self: self.sent)
    @rule(pick=st.randoms(use_true_random=False), again=st.booleans())
    def deliver(self, pick: random.Random, again: bool) -> None:
        """A message arrives, in any order, and perhaps once more later."""
        index = pick.randrange(len(self.sent))
        self.report(self.sent[index] if again else self.sent.pop(index))

    def report(self, message: GroupDone | GroupFailed) -> None:
        name = (message.purpose, message.ticket)
        if isinstance(message, GroupFailed) and self.attempts.get(name) == message.attempt:
            del self.attempts[name]  # nobody works on it any more
        report(self.scheduler, message)
        self.obey()

    @rule(worker=st.sampled_from("ab"), with_message=st.booleans(), unlucky=st.integers(0, 7))
    def die(self, worker: str, with_message: bool, unlucky: int) -> None:
        """A worker is killed; what it held is gone, and the kernel learns of it."""
        if unlucky:
            return
        lost, self.held[worker] = self.held[worker], []
        if with_message and lost and lost[0][1] is not None:
            self.sent.append(done(lost[0][0], lost[0][1], self.newest(lost[0][0])))
        self.scheduler.worker_gone(worker, drained=False)
        before = dict(self.attempts)
        self.obey()
        for (purpose, id), attempt in before.items():
            if self.told.get((purpose, id, attempt), worker) != worker:
                assert self.attempts[purpose, id] == attempt, "the attempt of another worker was withdrawn"

    @rule(slow=st.integers(2, 5), swapped=st.booleans(), divergence=DIVERGENCES)
    def hurry(self, slow: int, swapped: bool, divergence: float | None) -> None:
        """Everybody but the slow does all they can: finished young groups overtake unfinished old ones."""
        if self.training:
            self.step(divergence, hold=False)
        if swapped:
            self.engine_version = self.scheduler.version
        for ticket in [ticket for ticket in self.queue if ticket.min_version <= self.engine_version]:
            self.queue.remove(ticket)
            self.held["a"].append((ticket, self.newest(ticket)))
        quick = [held for held in self.held["a"] if held[0].id % slow and held[1] is not None]
        self.held["a"] = [held for held in self.held["a"] if held not in quick]
        for ticket, oldest in quick:
            assert oldest is not None
            self.report(done(ticket, oldest, self.newest(ticket)))

    @precondition(lambda self: self.training)
    @rule(divergence=DIVERGENCES, hold=st.booleans())
    def step(self, divergence: float | None, hold: bool) -> None:
        """The batch is trained. The kernel may write a checkpoint before the next one."""
        assert self.training is not None
        self.groups_trained += len(self.training.groups)
        self.training = None
        self.divergence, self.holds = divergence, hold
        before = self.scheduler.staleness_limit
        self.scheduler.step_finished(hold=hold, divergence=divergence)
        if self.settings.max_divergence is None or divergence is None:
            assert self.scheduler.staleness_limit == before
        if self.scheduler.evaluation.is_due(self.scheduler.version):
            self.due.append(self.scheduler.version)
        self.obey()

    @precondition(lambda self: self.training)
    @rule()
    def expire(self) -> None:
        """A user gives the batch up."""
        assert self.training is not None
        for group in self.training.groups:
            oldest = min(member.oldest for member in group.members)
            self.staleness[self.training.version - oldest] -= 1
            self.trained[group.ticket] -= 1
            self.given_up += 1
        self.training = None
        self.scheduler.expire_batch("deadly")
        self.obey()

    @precondition(lambda self: self.holds)
    @rule()
    def release(self) -> None:
        self.holds = False
        self.scheduler.release()
        self.obey()

    @precondition(lambda self: not self.training and not self.over)
    @rule(
        batch_size=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        more_steps=st.integers(0, 6),
        unlucky=st.integers(0, 3),
    )
    def resume_with_changes(self, batch_size: int, max_staleness: int, more_steps: int, unlucky: int) -> None:
        """The kernel is killed, and the run resumed with other settings: what has arrived is in the log, and
        workers of the previous kernel may still send theirs."""
        if unlucky:
            return
        steps = self.scheduler.version + more_steps
        self.settings = replace(
            self.settings, batch_size=batch_size, max_staleness=max_staleness, steps=steps
        )
        snapshot, before = stored(self.scheduler), self.scheduler.ledger
        deadlines = {ticket.id: ticket.deadline for ticket in snapshot.open if ticket.done}
        self.scheduler = continued(self.scheduler, **asdict(self.settings))
        assert self.scheduler.snapshot().open == snapshot.open
        self.scheduler.fit()
        self.scheduler.owned(1000 * self.lives)
        self.scheduler.start()
        after = self.scheduler.snapshot()
        for ticket in after.open:
            if ticket.done:
                assert ticket.deadline <= deadlines[ticket.id], "a finished group got more time"
                assert ticket.deadline >= self.scheduler.version, "a group is kept that nothing can train"
        expired = {reason: count for reason, count in after.reasons.items() if "does not fit" in reason}
        kept = {ticket.id for ticket in after.open} & {ticket.id for ticket in snapshot.open}
        assert before.in_flight - len(kept) == sum(expired.values()) - self.unfit
        self.unfit = sum(expired.values())
        self.deadlines = {ticket.id: ticket.deadline for ticket in after.open if ticket.done}
        self.lives += 1
        self.queue, self.attempts, self.holds = [], {}, False
        self.obey()

    @precondition(lambda self: not self.training and not self.over)
    @rule(alive=st.sets(st.sampled_from("ab")), unlucky=st.integers(0, 3))
    def be_replaced(self, alive: set[str], unlucky: int) -> None:
        """The kernel is killed, and another one takes over the workers that live, with what they hold."""
        if unlucky:
            return
        self.held |= {worker: [] for worker in {"a", "b"} - alive}
        before = self.scheduler.snapshot()
        current: set[tuple[Purpose, int, int]] = {
            *(("train", ticket.id, ticket.attempt) for ticket in before.open if ticket.done is None),
            *(("eval", ticket.id, ticket.attempt) for ticket in before.evaluation.open),
        }
        self.scheduler = continued(self.scheduler)
        self.scheduler.owned(1000 * self.lives)
        tickets = [(worker, ticket) for worker in sorted(alive) for ticket, _ in self.held[worker]]
        held = [TicketStarted(worker, each.purpose, each.id, each.attempt) for worker, each in tickets]
        self.scheduler.start(held)
        named: set[tuple[Purpose, int, int]] = {(each.purpose, each.ticket, each.attempt) for each in held}
        self.told |= {(each.purpose, each.ticket, each.attempt): each.worker for each in reversed(held)}
        self.attempts = {(purpose, id): attempt for purpose, id, attempt in named & current}
        stale = [Withdraw(purpose, id, attempt) for purpose, id, attempt in named - current]
        commands = self.scheduler.commands()
        assert all(each in commands for each in stale)
        self.deadlines = {each.id: each.deadline for each in self.scheduler.snapshot().open if each.done}
        self.lives += 1
        self.queue, self.holds = [], False
        self.obey([each for each in commands if each not in stale])

    @rule()
    def fold_from_a_snapshot(self) -> None:
        """A scheduler that is restored from a snapshot goes on in the place of the first one."""
        snapshot, self.scheduler = self.scheduler.snapshot(), continued(self.scheduler)
        assert self.scheduler.snapshot() == snapshot

    # ---- what must hold after each

    @invariant()
    def ledger_balances(self) -> None:
        ledger = self.scheduler.ledger
        parts = ledger.trained + ledger.filtered + ledger.expired + ledger.failed + ledger.in_flight
        assert ledger.issued == parts
        assert ledger.trained == self.groups_trained
        assert ledger.filtered + ledger.expired + ledger.failed == len(self.retired)

    @invariant()
    def variants_add_up(self) -> None:
        ledger, accounts = self.scheduler.ledger, self.scheduler.variants.accounts.values()
        for name in ("issued", "trained", "filtered", "expired", "failed"):
            assert sum(getattr(account, name) for account in accounts) == getattr(ledger, name)
        for account in accounts:
            finished = account.figures["reward"].count if account.figures else 0
            assert account.trained <= finished <= account.issued

    @invariant()
    def admission_is_bounded(self) -> None:
        bound = (self.settings.max_staleness + 1) * self.settings.batch_size
        assert self.scheduler.ledger.in_flight <= bound
        assert 0 <= self.scheduler.staleness_limit <= self.settings.max_staleness

    @invariant()
    def figures_are_complete(self) -> None:
        scheduler = self.scheduler
        assert scheduler.evaluation.held_back == self.held_back
        reasons = [count for reason, count in scheduler.reasons.items() if "not evaluated" not in reason]
        assert sum(reasons) == len(self.retired)
        if self.training is None:
            assert scheduler.staleness == self.staleness
        steps = 0 if self.settings.max_divergence is None else scheduler.version
        assert scheduler.limits.total() == steps

    @invariant()
    def a_batch_waits_only_for_a_reason(self) -> None:
        if self.training or self.over or self.holds:
            return
        scheduler, size, reason = self.scheduler, self.settings.batch_size, self.scheduler.waits_for
        assert reason is not None
        match reason.kind:
            case "groups" if self.settings.alternates:
                assert scheduler.tickets.unfinished
            case "groups":
                assert len(scheduler.tickets.finished) < size
            case "evaluation":
                ends = scheduler.version == self.settings.steps or self.settings.alternates
                needed = scheduler.evaluation.needed_versions
                assert needed if ends else len(needed) == 2
            case kind:
                assert kind == "late_ticket"
                assert self.settings.on_late == "wait"
                assert len(scheduler.tickets.finished) >= size
                self.assert_late_without(reason.number)

    def assert_late_without(self, awaited: int) -> None:
        """A batch of the groups finished now would make a later one late, though all tickets finished at once
        and in the order of their deadlines."""
        tickets = sorted(self.scheduler.snapshot().open, key=lambda ticket: (ticket.deadline, ticket.id))
        batch = [ticket for ticket in tickets if ticket.done][: self.settings.batch_size]
        left = [ticket for ticket in tickets if ticket not in batch]
        assert next(ticket.id for ticket in left if not ticket.done) == awaited
        assert any(
            ticket.deadline < self.scheduler.version + 1 + place // self.settings.batch_size
            for place, ticket in enumerate(left)
        )

    @invariant()
    def engines_sleep_only_while_nothing_needs_them(self) -> None:
        scheduler = self.scheduler
        assert scheduler.engines_sleep == (self.settings.alternates and bool(self.training or self.holds))
        if scheduler.engines_sleep:
            assert not scheduler.tickets.unfinished
            assert scheduler.evaluation.under_way is None

    @invariant()
    def at_most_one_evaluation_waits(self) -> None:
        assert len(self.scheduler.evaluation.needed_versions) <= 2

    def teardown(self) -> None:
        """From wherever it got to, a world that behaves brings the run to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if self.over:
                break
            self.engine_version = self.scheduler.version
            if self.training:
                self.step(self.divergence, hold=False)
                continue
            if self.holds:
                self.release()
            for message in self.sent:
                self.report(message)
            self.sent = []
            todo = [*((ticket, None) for ticket in self.queue), *self.held["a"], *self.held["b"]]
            self.queue, self.held = [], {"a": [], "b": []}
            for ticket, oldest in todo:
                version = self.newest(ticket) if oldest is None else oldest
                self.report(done(ticket, version))
        assert self.over, f"stuck, waiting for {self.scheduler.waits_for}"
        ledger = self.scheduler.ledger
        assert ledger.trained == self.groups_trained
        assert self.scheduler.version == self.settings.steps
        assert ledger.in_flight == 0
        if self.settings.on_late == "wait":
            assert ledger.expired == self.unfit + self.given_up
        if self.settings.evaluation_rows:
            assert self.evaluated == sorted(set(self.evaluated)), "twice, or out of order"
            assert {0, *self.due, self.settings.steps} <= set(self.evaluated)
            assert [each.version for each in self.scheduler.evaluation.results] == self.evaluated


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --------------------------------------------------------------------------------- rules by example


def test_admission_fills_the_queue_and_follows_retirement() -> None:
    scheduler = started(steps=10, batch_size=2, max_staleness=1)
    tickets = issued(scheduler)
    assert [ticket.id for ticket in tickets] == [0, 1, 2, 3]  # (η + 1) · B
    scheduler.group_done(done(tickets[0], 0))
    assert scheduler.commands() == []  # finished is not retired
    scheduler.group_failed(failed(tickets[1], filtered=True))
    assert [ticket.id for ticket in issued(scheduler)] == [4]  # what is left out gives its slot back


def test_a_batch_waits_for_the_earliest_deadline_when_others_would_miss_theirs() -> None:
    scheduler = started(steps=9, max_staleness=1)
    slow, quick = issued(scheduler)  # both due by version 1
    assert scheduler.waits_for == Cause("groups")
    scheduler.group_done(done(quick))
    assert batches(scheduler) == [[quick.id]]  # afterwards one group is due by version 1, which is in time
    scheduler.step_finished()
    [newer] = issued(scheduler)  # due by version 2
    scheduler.group_done(done(newer, 1))
    assert scheduler.commands() == []  # `slow` is due now: a batch of `newer` would make it late
    assert scheduler.waits_for == Cause("late_ticket", slow.id)
    other = continued(scheduler)
    scheduler.group_done(done(slow))
    assert batches(scheduler) == [[slow.id]]
    assert scheduler.waits_for is None
    other.first_token(slow.id, slow.attempt, 1)  # it has no token of version 0: there is time
    assert batches(other) == [[newer.id]]


def test_drop_expires_a_late_group_and_issues_its_prompt_again() -> None:
    scheduler = started(steps=9, max_staleness=1, on_late="drop", max_attempts=2)
    slow, quick = issued(scheduler)
    scheduler.group_done(done(quick, 0))
    scheduler.step_finished()
    newer = issued_by(scheduler.commands())[0]
    scheduler.group_done(done(newer, 1))
    commands = scheduler.commands()
    assert Withdraw("train", slow.id, slow.attempt) in commands
    assert any(isinstance(each, StartBatch) and each.groups[0].ticket == newer.id for each in commands)
    again = issued_by(commands)
    assert [ticket.row for ticket in again] == [slow.row]
    assert again[0].id != slow.id
    assert scheduler.ledger.expired == 1


def test_the_first_complete_attempt_wins_and_doubles_change_nothing() -> None:
    scheduler = started(steps=1)
    [first] = issued(scheduler)
    for _ in range(2):  # the message came twice
        scheduler.ticket_started("train", first.id, first.attempt, "w")
    assert scheduler.commands() == []
    scheduler.worker_gone("w", drained=False)
    withdraw, issue = scheduler.commands()
    assert withdraw == Withdraw("train", first.id, 1)
    assert isinstance(issue, Issue)
    assert issue.ticket.attempt == 2
    scheduler.group_done(done(first, 0))  # the first attempt had been finished after all
    commands = scheduler.commands()
    assert Withdraw("train", first.id, 2) in commands
    assert any(isinstance(each, StartBatch) and each.groups[0].attempt == 1 for each in commands)
    scheduler.group_done(done(issue.ticket, 0))
    scheduler.group_failed(failed(issue.ticket))
    scheduler.step_finished()
    scheduler.group_done(done(first, 0))
    assert scheduler.ledger.trained == scheduler.ledger.issued == 1


def test_what_nobody_has_begun_is_issued_again_when_a_worker_is_lost() -> None:
    scheduler = started(steps=1, batch_size=2, max_attempts=1)
    begun, waiting = issued(scheduler)
    scheduler.ticket_started("train", begun.id, begun.attempt, "alive")
    for _ in range(5):  # a ticket that was never begun does not use up its attempts
        scheduler.worker_gone("dead", drained=False)
    again = issued_by(scheduler.commands())
    assert {ticket.id for ticket in again} == {waiting.id}
    assert again[-1].attempt == 6
    assert scheduler.ledger.failed == 0


def test_a_worker_that_leaves_hands_back_only_what_it_has_not_finished() -> None:
    scheduler = started(steps=1, batch_size=3, max_attempts=1)
    finished, unfinished, waiting = issued(scheduler)
    for ticket in (finished, unfinished):
        scheduler.ticket_started("train", ticket.id, ticket.attempt, "w")
    scheduler.group_done(done(finished, 0))
    for attempt in (1, 2, 3):  # none of them uses up the single attempt
        scheduler.ticket_started("train", unfinished.id, attempt, "w")
        scheduler.worker_gone("w", drained=True)
    commands = scheduler.commands()
    again = issued_by(commands)
    assert [(ticket.id, ticket.attempt) for ticket in again] == [(unfinished.id, 2 + n) for n in range(3)]
    assert Withdraw("train", unfinished.id, 1) in commands
    assert scheduler.ledger.failed == 0
    scheduler.group_done(done(waiting, 0))
    scheduler.group_done(done(again[-1], 0))
    assert len(batches(scheduler)) == 1


def test_a_ticket_whose_workers_keep_dying_fails() -> None:
    scheduler = started(steps=1, max_attempts=2)
    [ticket] = issued(scheduler)
    for attempt in (1, 2):
        scheduler.ticket_started("train", ticket.id, attempt, "w")
        scheduler.worker_gone("w", drained=False)
    assert scheduler.ledger.failed == 1
    assert next(iter(scheduler.reasons)).startswith("failed: begun 2 times")


def test_a_group_that_fails_is_made_again_until_its_row_is_given_up() -> None:
    scheduler = started(steps=1, max_attempts=2, group_size=4)
    [first] = issued(scheduler)
    scheduler.group_failed(failed(first))  # its start was not heard
    [second] = issued(scheduler)
    assert (second.id, second.row, second.attempt) == (first.id, first.row, 2)
    scheduler.group_failed(failed(first))
    assert scheduler.commands() == [], "it has failed before"
    scheduler.group_failed(failed(second, "flaky"))
    assert [ticket.id for ticket in issued(scheduler)] == [1]
    assert scheduler.reasons == {"failed: begun 2 times; at last flaky": 1}
    assert scheduler.given_up == {first.row: 1}
    assert scheduler.members == MemberLedger(sampled=8, missing=8)


@pytest.mark.parametrize("ended", ["failed", "withdrawn"])
def test_an_attempt_that_has_ended_before_the_start_is_not_held(ended: str) -> None:
    """Its worker may have said that it holds the attempt before its failure was read, or before it heard that
    it has to stop."""
    scheduler = started(steps=1)
    [ticket] = issued(scheduler)
    scheduler.owned(attempts_from=100)
    if ended == "failed":
        scheduler.group_failed(failed(ticket))
    else:
        scheduler.ticket_started("train", ticket.id, ticket.attempt, "w")
        assert scheduler.commands() == [Withdraw("train", ticket.id, ticket.attempt)]
    scheduler.start([TicketStarted("w", "train", ticket.id, ticket.attempt)])
    again = issued_by(scheduler.commands())
    assert [(each.id, each.attempt) for each in again] == [(ticket.id, 101)]


@pytest.mark.parametrize(
    ("settings", "end", "reason"),
    [
        ({"max_failures": 3}, partial(failed, reason="1/0"), "3 groups failed one after the other; "),
        ({"max_filtered": 3}, done, "3 groups were filtered one after the other; the last: by the algorithm"),
        (
            {"rows": 5},
            partial(failed, reason="too long", filtered=True),
            "all 5 rows of the dataset were left out; the last: too long",
        ),
    ],
    ids=["failed", "filtered", "left out"],
)
def test_setbacks_one_after_the_other_end_the_run(
    settings: dict[str, Any], end: Callable[[Ticket], GroupDone | GroupFailed], reason: str
) -> None:
    scheduler = started(lambda group: False, **{"steps": 5, "batch_size": 2, **settings})
    fails: list[Fail] = []
    while not fails:
        commands = scheduler.commands()
        fails = [each for each in commands if isinstance(each, Fail)]
        for ticket in issued_by(commands):
            report(scheduler, end(ticket))
    assert fails[0].reason.startswith(reason)


def test_a_run_that_is_closed_starts_no_batch_and_issues_nothing() -> None:
    scheduler = started(steps=3, max_staleness=1)
    first, second = issued(scheduler)
    scheduler.group_done(done(first, 0))
    assert len(batches(scheduler)) == 1
    scheduler.close()
    scheduler.step_finished()
    scheduler.group_done(done(second, 0))
    assert scheduler.commands() == []
    assert scheduler.ledger.trained == 1


def test_rows_that_are_left_out_do_not_count_as_filtered_one_after_the_other() -> None:
    scheduler = started(steps=5, batch_size=2, rows=10, max_filtered=3, shuffle=False)
    for _ in range(30):  # rows 0 to 8 are too long: three epochs with nothing from row 9 yet
        for ticket in issued(scheduler):
            if ticket.row != 9:
                scheduler.group_failed(failed(ticket, "too long", filtered=True))
    assert scheduler.ledger.filtered == 18
    assert scheduler.reasons == {"filtered: too long": 18}
    assert scheduler.ledger.in_flight == 2  # row 9, twice


def test_what_failed_in_a_former_life_does_not_hold_up_the_next() -> None:
    scheduler = started(steps=5, batch_size=2, max_failures=2)
    scheduler.owned(1000)
    for id in (0, 1):
        scheduler.group_failed(GroupFailed("train", id, 1, "w", "broken then"))
    scheduler.commands()
    scheduler.worker_gone("rollout-0", drained=False)
    assert scheduler.commands() == []  # while the run starts, no ticket is issued
    scheduler.start()
    first, second = issued(scheduler)
    assert [(each.id, each.attempt) for each in (first, second)] == [(0, 1001), (1, 1001)]
    scheduler.group_done(done(msgspec.structs.replace(first, attempt=1), 0))  # a former worker's: void
    assert len(scheduler.tickets.finished) == 0


@pytest.mark.parametrize("oldest", [-1, 1])
def test_a_group_with_impossible_versions_fails(oldest: int) -> None:
    scheduler = started(steps=1, max_attempts=1)
    [ticket] = issued(scheduler)
    scheduler.group_done(done(ticket, oldest))
    assert scheduler.ledger.failed == 1
    assert "allowed 0 to 0" in next(iter(scheduler.reasons))


def evaluating(steps: int, every: int, max_staleness: int = 0) -> tuple[Scheduler, list[Command]]:
    """A scheduler of one group a batch and one row an evaluation, that of version 0 being over, and the
    commands so far."""
    scheduler = started(
        steps=steps, max_staleness=max_staleness, rows=9, evaluation_rows=1, evaluation_every=every
    )
    commands: list[Command] = scheduler.commands()
    first = evaluation_ticket(commands)
    assert first.exact_version == 0
    scheduler.group_done(done(first, 0, reward=0.25))
    return scheduler, [*commands, *scheduler.commands()]


def step(scheduler: Scheduler, commands: Sequence[Command]) -> list[Command]:
    """Finish the tickets of training among the commands, and the step; returns the commands that follow."""
    for command in commands:
        if isinstance(command, Issue) and command.ticket.purpose == "train":
            scheduler.group_done(done(command.ticket, command.ticket.min_version))
    assert len(batches(scheduler)) == 1
    scheduler.step_finished()
    return scheduler.commands()


def evaluation_ticket(commands: Sequence[Command]) -> Ticket:
    [ticket] = [ticket for ticket in issued_by(commands) if ticket.purpose == "eval"]
    return ticket


def test_the_last_evaluation_is_alone_and_others_run_beside_training() -> None:
    scheduler, commands = evaluating(steps=2, every=1)
    assert [each.ticket.purpose for each in commands if isinstance(each, Issue)] == ["train", "eval"]
    result = commands[-1]
    assert isinstance(result, EvaluationEnded)
    assert result.result.reward == 0.25
    middle = step(scheduler, commands)
    ticket = evaluation_ticket(middle)
    assert (ticket.exact_version, scheduler.evaluation.under_way) == (1, 1)
    assert step(scheduler, middle) == []  # training continued beside it; the last one waits for it
    scheduler.group_done(done(ticket, 1))
    result, last = scheduler.commands()
    assert isinstance(result, EvaluationEnded)
    assert result.result.version == 1
    assert isinstance(last, Issue)
    assert last.ticket.exact_version == 2
    scheduler.group_done(done(last.ticket, 2))
    assert isinstance(scheduler.commands()[-1], Finish)


@pytest.mark.parametrize(("oldest", "newest"), [(0, 1), (1, 2), (2, 2)])
def test_an_evaluation_of_other_versions_than_its_own_is_no_result(oldest: int, newest: int) -> None:
    scheduler, commands = evaluating(steps=3, every=1)
    commands = step(scheduler, commands)
    ticket = evaluation_ticket(commands)
    step(scheduler, commands)
    for attempt in range(1, scheduler.settings.max_attempts + 1):
        scheduler.group_done(done(msgspec.structs.replace(ticket, attempt=attempt), oldest, newest))
    evaluation = scheduler.evaluation.results[-1]
    assert (evaluation.version, evaluation.reward, evaluation.failed) == (1, None, 1)
    assert "allowed 1 to 1" in next(iter(scheduler.reasons))


def test_a_finished_row_of_an_evaluation_is_not_asked_for_again() -> None:
    scheduler = started(steps=2, rows=9, evaluation_rows=3)
    tickets = [ticket for ticket in issued(scheduler) if ticket.purpose == "eval"]
    scheduler.group_done(done(tickets[1], 0))
    again = continued(scheduler)
    again.owned(1000)
    again.group_done(done(tickets[2], 0))  # what the former kernel's worker had finished
    again.start()
    [left] = [ticket for ticket in issued(again) if ticket.purpose == "eval"]
    assert left.id == tickets[0].id
    again.group_done(done(left, 0))
    assert again.evaluation.results[-1].samples == 3


def test_the_rows_of_an_evaluation_beside_training_begin_as_groups_of_training_end() -> None:
    """128 together for every two groups here, and all that are left when training rests."""
    settings = SchedulerSettings(3, 2, 1, 9, evaluation_rows=500, evaluation_every=9, evaluation_pace=64.0)
    scheduler = Scheduler(settings)
    training: list[Ticket] = []

    def begun() -> list[int]:
        tickets = issued_by(scheduler.commands())
        training.extend(ticket for ticket in tickets if ticket.purpose == "train")
        return [ticket.row for ticket in tickets if ticket.purpose == "eval"]

    def finish_groups() -> list[int]:
        scheduler.group_done(done(training[-2], training[-2].min_version))
        assert begun() == []
        scheduler.group_done(done(training[-1], training[-1].min_version))
        return begun()

    scheduler.start()
    assert begun() == []
    assert finish_groups() == [*range(128)]
    again = resumed(scheduler)  # the rows that have begun begin again, and no other
    assert [ticket.row for ticket in issued(again) if ticket.purpose == "eval"] == [*range(128)]
    scheduler.worker_gone("a", drained=False)  # they may have been on their way to it
    assert begun() == [*range(128)]
    training[:] = training[:2]
    assert finish_groups() == [*range(128, 256)]
    scheduler.step_finished()
    begun()
    assert finish_groups() == [*range(256, 384)]
    scheduler.step_finished()
    assert begun() == []
    scheduler.step_finished()  # the last one: nothing is left to train
    assert begun() == [*range(384, 500)]


def test_a_run_that_evaluates_no_more_does_not_wait_for_the_evaluations_of_its_former_values() -> None:
    scheduler, commands = evaluating(steps=9, every=1)
    step(scheduler, commands)
    again = continued(scheduler, steps=1, evaluation_rows=0)
    again.fit()
    again.start()
    assert isinstance(again.commands()[-1], Finish)


def test_the_evaluation_of_the_untrained_model_outlives_a_kernel_without_a_checkpoint() -> None:
    again = continued(Scheduler(evaluating(steps=9, every=5)[0].settings))
    again.start()  # the events have the first batch
    ticket = next(ticket for ticket in issued(again) if ticket.purpose == "train")
    again.group_done(done(ticket, 0))
    assert again.evaluation.needed_versions == (0,)  # so the trainers keep its weights
    again.step_finished()
    again.commands()
    again.owned(1000)
    again.start()
    assert evaluation_ticket(again.commands()).exact_version == 0


def test_the_best_evaluation_is_the_first_of_the_highest_accuracy() -> None:
    scheduler, _ = evaluating(steps=9, every=1)
    assert scheduler.evaluation.best == Evaluation(0, None, 1, 0, reward=0.25)
    scheduler.evaluation.results[:] = [
        Evaluation(version, score, 1, 0) for version, score in enumerate((0.3, 0.7, None, 0.7))
    ]
    assert scheduler.evaluation.best == Evaluation(1, 0.7, 1, 0)
    scheduler.evaluation.results.append(Evaluation(4, None, 1, 0, reward=0.1))
    assert scheduler.evaluation.best == Evaluation(4, None, 1, 0, reward=0.1)  # the only reward


def test_rows_beyond_a_dataset_that_has_become_smaller_are_not_asked_for() -> None:
    scheduler = started(steps=4, batch_size=2, max_staleness=1, rows=50, shuffle=False)
    again = resumed(scheduler, rows=3)
    assert [ticket.row for ticket in issued(again)] == [0, 1, 2, 0]


def test_a_smaller_bound_expires_what_cannot_be_trained_in_time_and_issues_its_prompt_again() -> None:
    """At version 1: groups 1, 2 and 3 are finished on version 0, due by version 3, and 4 is unfinished."""
    before = started(steps=9, max_staleness=3)
    for ticket in issued(before):
        before.group_done(done(ticket, 0))
    assert len(batches(before)) == 1
    before.step_finished(hold=True)
    rows = {ticket.id: ticket.row for ticket in before.snapshot().open}
    scheduler = continued(before, max_staleness=1)
    scheduler.fit()
    scheduler.owned(1000)
    scheduler.start()
    # Of those due by version 1 one can be trained, and 4 a step later.
    *_, again, start = scheduler.commands()
    assert isinstance(again, Issue)
    assert again.ticket.id == 4
    assert isinstance(start, StartBatch)
    assert [group.ticket for group in start.groups] == [1]
    assert scheduler.ledger.expired == 2
    assert dict(scheduler.reasons) == {
        "expired: does not fit max_staleness=1, batch_size=1, steps=9 from version 1 on": 2
    }
    scheduler.step_finished()
    [issue] = scheduler.commands()
    assert isinstance(issue, Issue)
    assert issue.ticket.row == rows[2]


# -------------------------------------------------------------------------------- the divergence gate


def limits(
    kl_at_lag: Callable[[int], float], *, max_staleness: int, steps: int, noise: float = 0.0
) -> list[int]:
    """The limit after each step of a run whose divergence follows from how far ahead its batches were issued.

    The bound is 1. A batch is trained once all those before it in the queue are.
    """
    gate = DivergenceGate(max_staleness)
    queue = deque([max_staleness] * (max_staleness + 1))
    random_numbers = random.Random(1)
    found: list[int] = []
    for _ in range(steps):
        divergence = kl_at_lag(queue.popleft()) * max(0.0, 1 + noise * random_numbers.gauss(0, 1))
        gate.observe(divergence, bound=1.0, max_staleness=max_staleness)
        queue += [gate.limit] * (gate.limit + 1 - len(queue))
        found.append(gate.limit)
    return found


@pytest.mark.parametrize("max_staleness", [1, 2, 4, 8])
def test_the_gate_stays_open_below_the_bound_and_closes_if_any_staleness_is_above(max_staleness: int) -> None:
    calm = limits(lambda lag: 0.9 * lag / max_staleness, max_staleness=max_staleness, steps=300)
    assert calm == [max_staleness] * 300
    fierce = limits(lambda lag: 5.0 * lag, max_staleness=max_staleness, steps=300)
    assert 0 in fierce[: 4 * max_staleness + 8]
    assert sum(fierce[-200:]) < 0.2 * 200  # now and then it tries a wider limit again


def test_the_gate_settles_at_the_widest_limit_that_keeps_the_bound_and_seldom_tries_more() -> None:
    """KL grows as the square of the lag: 0.75 at 2, 1.7 at 3."""
    found = limits(lambda lag: 0.1875 * lag**2, max_staleness=8, steps=600, noise=0.2)
    assert 1.5 < sum(found[100:]) / 500 < 2.5
    assert sum(one != other for one, other in pairwise(found[100:])) < 30


def test_the_gate_waits_until_a_change_shows_before_it_judges_again() -> None:
    """KL is 1.2 at a lag of 8 and 0.9 at 6: one change is enough, though the backlog is above it."""
    found = limits(lambda lag: 0.15 * lag, max_staleness=8, steps=40)
    assert found == [8, *[6] * 39]


def test_one_outlier_never_narrows_and_two_in_a_row_do() -> None:
    gate = DivergenceGate(2)
    for divergence in (math.inf, 0.0, 0.0, math.nan, 0.0):
        gate.observe(divergence, bound=0.01, max_staleness=2)
    assert gate.limit == 2
    for divergence in (0.0, 0.0, 0.015, 0.015):
        gate.observe(divergence, bound=0.01, max_staleness=2)
    assert gate.limit == 1


def test_a_limit_whose_widening_must_be_undone_is_tried_ever_more_seldom() -> None:
    found = limits(lambda lag: 9.0 * lag, max_staleness=1, steps=400)
    tried = [step for step, (one, other) in enumerate(pairwise(found)) if other > one]
    pauses = [other - one for one, other in pairwise(tried)]
    assert len(pauses) >= 4
    assert pauses[:4] == sorted(pauses[:4])
    assert pauses[3] > 3 * pauses[0]


def trained(
    scheduler: Scheduler, waiting: deque[Ticket], divergence: float | None
) -> tuple[StartBatch, list[int]]:
    """One step in which tickets are sampled in their order by the weights of their issue; the batch, and the
    tickets that were issued since the step before."""
    new: list[int] = []
    while True:
        for command in scheduler.commands():
            if isinstance(command, Issue):
                waiting.append(command.ticket)
                new.append(command.ticket.id)
            else:
                assert isinstance(command, StartBatch)
                scheduler.step_finished(divergence=divergence)
                return command, new
        ticket = waiting.popleft()
        scheduler.group_done(done(ticket, ticket.min_version))


def test_narrowing_lets_the_backlog_drain_and_leaves_issued_tickets_their_deadlines() -> None:
    scheduler = started(steps=50, batch_size=2, max_staleness=2, max_divergence=0.01)
    waiting: deque[Ticket] = deque()
    steps = [trained(scheduler, waiting, 5.0) for _ in range(8)]
    staleness = [start.version - start.groups[0].members[0].oldest for start, _ in steps]
    assert [len(new) for _, new in steps[:7]] == [6, 2, 0, 0, 2, 2, 2]  # the second figure narrows to 0
    assert staleness[:7] == [0, 1, 2, 2, 0, 0, 0]  # what was issued before keeps its deadline
    assert scheduler.staleness_limit == 0
    assert scheduler.ledger.in_flight == 2  # (η_eff + 1) · B: synchronous
    assert scheduler.ledger.expired == 0


# --------------------------------------------------------------------------- steps that end the run

NOT_FINITE = "the gradients of 5 steps in a row were not finite"


def take_step(
    scheduler: Scheduler, tickets: deque[Ticket], reward: float, *, skipped: bool = False
) -> list[str]:
    """Train a batch of one group with this reward. The reasons to end the run."""
    scheduler.release()
    scheduler.group_done(done(tickets.popleft(), scheduler.version, reward=reward))
    scheduler.step_finished(skipped=skipped, hold=True)
    commands = scheduler.commands()
    tickets.extend(issued_by(commands))
    return [each.reason for each in commands if isinstance(each, Fail)]


def begun() -> tuple[Scheduler, deque[Ticket]]:
    scheduler = started(steps=90, rows=9, stops_on_collapse=True)
    return scheduler, deque(issued(scheduler))


def test_steps_that_change_nothing_end_the_run_also_when_kernels_change_in_between() -> None:
    scheduler, tickets = begun()
    for skipped in (True, True, False, True, True, True, True):
        assert take_step(scheduler, tickets, 0.0, skipped=skipped) == []
        scheduler = continued(scheduler)
    assert take_step(scheduler, tickets, 0.0, skipped=True) == [NOT_FINITE]
    scheduler.release()
    assert not scheduler.training
    assert continued(scheduler).failure == scheduler.failure == NOT_FINITE
    told = continued(scheduler)
    apply(told, RunEnded("interrupted", "a second Ctrl-C"))
    assert told.failure == scheduler.failure  # its user does not know
    apply(told, RunEnded("failed", scheduler.failure))
    assert told.failure == ""
    scheduler.owned(1000)
    scheduler.start()  # somebody has resumed the run
    assert scheduler.failure == ""


def test_what_ends_the_run_while_it_closes_is_kept_for_the_next_kernel() -> None:
    scheduler, tickets = begun()
    for _ in range(4):
        assert take_step(scheduler, tickets, 0.0, skipped=True) == []
    scheduler.release()
    scheduler.group_done(done(tickets.popleft(), scheduler.version))
    scheduler.close()  # for other numbers of trainers
    scheduler.step_finished(skipped=True)
    assert not any(isinstance(each, Fail) for each in scheduler.commands())
    assert continued(scheduler).failure == NOT_FINITE


def test_a_collapse_ends_the_run_at_the_same_step_also_when_kernels_change_in_between() -> None:
    rewards = [*(0.8 + 0.01 * (n % 3) for n in range(20)), *([0.1] * 20)]
    ends: list[tuple[int, list[str]]] = []
    for kernels_change in (False, True):
        scheduler, tickets = begun()
        for reward in rewards:
            reasons = take_step(scheduler, tickets, reward)
            if reasons:
                ends.append((scheduler.version, reasons))
                break
            scheduler = continued(scheduler) if kernels_change else scheduler
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert 22 < ends[0][0] < 32
    assert ends[0][1][0].startswith("reward collapse (on_collapse: stop): mean reward fell from 0.8")
