"""The scheduler against the one that scans all open tickets: the same commands, ledger and snapshots for
generated sequences of events.

The number of sequences of the slow test is `STRETTO_SCHEDULER_SEQUENCES`.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from reference_scheduler import ReferenceScheduler
from stretto.algorithm import Group
from stretto.bus.messages.journal import Evaluation
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Member, Ticket
from stretto.dataset import TicketEnd
from stretto.kernel.draws import RecordedDraw
from stretto.kernel.open_tickets import DeadlineQueue, Holders
from stretto.kernel.scheduler import (
    EvaluationDone,
    Fail,
    Finish,
    Issue,
    RecordDraws,
    Scheduler,
    SchedulerSettings,
    Snapshot,
    StartBatch,
)

SEQUENCES = int(os.environ.get("STRETTO_SCHEDULER_SEQUENCES", "1000"))
EVENTS = 60
"""Events of one sequence, at most."""


class Rotation:
    """A curriculum that depends on all that it hears, in the order in which it hears it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.heard: list[int] = []
        self.draws = 0

    def choose(self, ticket: int, version: int) -> int:
        return (sum(self.heard[-5:]) + self.draws + version) % self.rows

    def drawn(self, ticket: int, row: int, version: int) -> None:
        self.draws += 1

    def ended(self, end: TicketEnd) -> None:
        self.heard.append(end.ticket * 7 + end.row + len(end.rewards) + len(end.outcome))

    def refusal(self, row: int, rewards: Sequence[float]) -> str:
        return "even row" if row % 2 == 0 and rewards[0] == 0.5 else ""

    def figures(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"heard": list(self.heard), "draws": self.draws}

    def restore(self, state: dict[str, Any]) -> None:
        self.heard, self.draws = list(state["heard"]), state["draws"]


class World:
    """Two schedulers that hear the same, and what surrounds a scheduler: a queue, workers, messages on their
    way, an engine that lags, a journal. Everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.settings = SchedulerSettings(
            steps=pick.randint(1, 8),
            batch_size=pick.choice((1, 1, 2, 3, 4, 7)),
            max_staleness=pick.randint(0, 4),
            rows=pick.randint(1, 9),
            max_divergence=pick.choice((None, 0.01)),
            group_size=pick.randint(1, 2),
            on_late=pick.choice(("wait", "drop", "drop")),
            max_attempts=pick.choice((2, 3, 1000)),
            max_failures=pick.choice((4, 1000)),
            max_filtered=pick.choice((6, 1000)),
            shuffle=pick.random() < 0.5,
            seed=seed,
            evaluation_rows=pick.choice((0, 0, 1, 3)),
            evaluation_every=pick.randint(0, 2),
            variants={"a": 1.0, "b": 3.0} if pick.random() < 0.5 else {},
        )
        self.has_curriculum = pick.random() < 0.4
        self.pair = self.make()
        self.queue: list[Ticket] = []
        self.known: list[Ticket] = []
        self.training: StartBatch | None = None
        self.holds = False
        self.over = False
        self.lives = 0
        self.impossible = False
        self.compared = 0
        self.saved: tuple[Snapshot, dict[int, RecordedDraw]] | None = None
        self.journal: list[StartBatch] = []
        """Batches since the saved snapshot."""
        self.draws: dict[int, RecordedDraw] = {}

    def make(self) -> tuple[Scheduler, ReferenceScheduler]:
        def keep(group: Group) -> bool:
            return group.rewards[0] >= 0

        first, second = (
            kind(
                self.settings,
                keep,
                curriculum=Rotation(self.settings.rows) if self.has_curriculum else None,
                evaluation_source=lambda row: f"source {row % 2}",
            )
            for kind in (Scheduler, ReferenceScheduler)
        )
        assert isinstance(first, Scheduler)
        assert isinstance(second, ReferenceScheduler)
        return first, second

    @property
    def version(self) -> int:
        return self.pair[1].version

    def tell(self, event: str, *arguments: Any, **keywords: Any) -> Any:
        """Give an event to both, and compare all that can be seen of them."""
        ours, theirs = (_outcome(each, event, *arguments, **keywords) for each in self.pair)
        assert ours == theirs
        if ours is Impossible:
            raise Impossible
        return ours

    def compare(self, *, all_of_it: bool = True) -> None:
        """Compare what can be seen of both."""
        self.compared += 1
        new, old = self.pair
        assert new.ledger == old.ledger
        assert new.finished == sum(ticket.done is not None for ticket in old._ready())  # pyright: ignore[reportPrivateUsage]
        assert new.waits_for == old.waits_for
        if not all_of_it:
            return
        for name in (
            *("version", "evaluating", "evaluated_rows", "needed_versions", "resting", "training"),
            *("staleness_limit", "room", "done_groups", "evaluations", "held_back", "best"),
            *("staleness", "reasons", "limits"),
        ):
            assert getattr(new, name) == getattr(old, name), name
        assert all(new.is_finished(group) for group in new.done_groups)
        if self.training is None:
            assert self.snapshot_of(new) == self.snapshot_of(old)

    @staticmethod
    def snapshot_of(scheduler: Scheduler | ReferenceScheduler) -> Snapshot:
        """A snapshot with the ends that a curriculum has not heard of in the order of their draws."""
        snapshot = scheduler.snapshot()
        if snapshot.draws is not None:
            snapshot.draws.pending.sort(key=lambda each: each[0])
        return snapshot

    def obey(self) -> None:
        commands, expected = (each.commands() for each in self.pair)
        assert commands == expected
        for command in commands:
            match command:
                case Issue(ticket):
                    self.queue.append(ticket)
                    self.known.append(ticket)
                case StartBatch():
                    self.training = command
                    self.journal.append(command)
                case RecordDraws(version, draws):
                    self.draws |= {ticket: RecordedDraw(version, row) for ticket, row in draws}
                case Finish() | Fail():
                    self.over = True
                case EvaluationDone() | _:
                    pass

    # ---- events

    def run(self) -> None:
        self.tell("start")
        self.obey()
        self.compare()
        events = (
            *[self.take] * 6,
            *[self.finish] * 10,
            *[self.step] * 4,
            *[self.first_token] * 3,
            *[self.old_message] * 2,
            *(self.lose_worker, self.release, self.save, self.resume, self.close),
        )
        for number in range(EVENTS):
            try:
                self.pick.choice(events)()
                self.obey()
                self.compare(all_of_it=number % 5 == 4)
            except Impossible:
                self.impossible = True
                return
            if self.over and self.pick.random() < 0.5:
                break

    def any_ticket(self) -> Ticket | None:
        """Mostly a ticket of late, sometimes one that was never issued."""
        if not self.known or self.pick.random() < 0.03:
            purpose = self.pick.choice(("train", "eval"))
            return Ticket(self.pick.randint(0, 60), self.pick.randint(1, 3), purpose, 0, self.version, 1)
        return self.pick.choice(self.known[-24:] if self.pick.random() < 0.8 else self.known)

    def take(self) -> None:
        if self.queue:
            ticket = self.queue.pop(self.pick.randrange(len(self.queue)))
            worker = self.pick.choice("abc")
            if self.pick.random() < 0.9:  # else the news is lost
                self.tell("ticket_started", ticket.purpose, ticket.id, ticket.attempt, worker)

    def first_token(self) -> None:
        if ticket := self.any_ticket():
            version = self.pick.randint(ticket.min_version, max(self.version, ticket.min_version) + 1)
            self.tell("first_token", ticket.id, ticket.attempt, version)

    def finish(self) -> None:
        """Some tickets end, the younger ones more often, so that finished groups overtake unfinished ones."""
        for _ in range(self.pick.choice((1, 1, 2, 5))):
            if ticket := self.any_ticket():
                self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        pick = self.pick
        if pick.random() < 0.1:
            fate = pick.choice(("raised", "too long"))
            self.tell(
                "group_failed",
                GroupFailed(ticket.purpose, ticket.id, ticket.attempt, "w", fate, fate == "too long"),
            )
            return
        newest = ticket.min_version if ticket.purpose == "eval" else max(ticket.min_version, self.version)
        oldest = pick.randint(ticket.min_version, newest)
        if pick.random() < 0.03:
            oldest, newest = oldest - 1, newest + pick.randint(0, 1)  # not what the ticket allows
        reward = pick.choice((1.0, 1.0, 0.5, 0.5, -1.0 if pick.random() < 0.3 else 0.0))
        members = tuple(
            Member(f"{ticket.name}/{i}", 1, i, 9, pick.choice((0, 5)), oldest, newest, reward, {}, "stop")
            for i in range(ticket.samples)
        )
        self.tell("group_done", GroupDone(ticket.purpose, ticket.id, ticket.attempt, "w", members, 0.1))

    def old_message(self) -> None:
        """A message comes twice, or long after its ticket has ended."""
        if self.known:
            self.end(self.pick.choice(self.known))

    def lose_worker(self) -> None:
        self.tell("worker_lost", self.pick.choice(("a", "b", "c", "")))

    def step(self) -> None:
        if self.training is not None:
            self.training = None
            self.holds = self.pick.random() < 0.2
            divergence = self.pick.choice((None, 0.0, 0.004, 0.02, 5.0, math.inf, math.nan))
            self.tell("step_finished", hold=self.holds, divergence=divergence)

    def release(self) -> None:
        if self.holds:
            self.holds = False
            self.tell("release")

    def save(self) -> None:
        """A checkpoint is written."""
        if self.training is None:
            self.saved = (_copy(self.pair[0].snapshot()), dict(self.draws))
            self.journal = []

    def close(self) -> None:
        if self.pick.random() < 0.05:
            self.tell("close")

    def resume(self) -> None:
        """The kernel is killed. Another one restores the checkpoint, takes in what is in the log, repeats the
        journal, and changes the settings perhaps."""
        if self.saved is None or self.pick.random() < 0.5:
            return
        snapshot, pick = self.saved[0], self.pick
        self.lives += 1
        batches = [batch for batch in self.journal if batch is not self.training]
        changes = not batches and pick.random() < 0.6
        if changes:
            self.settings = replace(
                self.settings,
                batch_size=pick.randint(1, 5),
                max_staleness=pick.randint(0, 4),
                rows=pick.randint(1, 9),
                steps=snapshot.version + pick.randint(0, 6),
            )
        self.pair = self.make()
        for scheduler in self.pair:
            scheduler.restore(_copy(snapshot), attempts_from=1000 * self.lives, recorded=dict(self.draws))
        self.training, self.queue, self.holds, self.over = None, [], False, False
        self.compare()
        if changes:
            self.take_in_log()
            self.tell("fit")
            self.save()  # a change of values writes a checkpoint
        if pick.random() < 0.2:
            self.tell("recall", [Evaluation(0, 0.5, 1, 0)])
        for batch in batches:
            tickets = [group.ticket for group in batch.groups]
            repeated = self.tell("replay", tickets, batch.groups)
            assert [group.ticket for group in repeated.groups] == sorted(tickets)
            self.tell("step_finished", divergence=pick.choice((None, 0.004, 0.02)))
            self.compare()
        if not batches and pick.random() < 0.2:
            self.tell("expire_finished", "another incarnation")
        else:
            self.take_in_log()
        self.compare()
        self.tell("start")

    def take_in_log(self) -> None:
        """Take in outcomes that the log holds, while the new kernel has not begun."""
        for _ in range(self.pick.randint(0, 6)):
            self.finish()
            self.compare()


class Impossible(Exception):
    """Both schedulers raised an error, because the messages of several kernels' lives contradict the journal:
    a ticket of a batch has ended, or more finished groups are due than a batch holds."""


def _outcome(scheduler: Scheduler | ReferenceScheduler, event: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return getattr(scheduler, event)(*arguments, **keywords)
    except (KeyError, ValueError, IndexError):
        return Impossible


def _copy(snapshot: Snapshot) -> Snapshot:
    return msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)


def compare_sequences(seeds: range) -> dict[str, int]:
    """Run the sequences, and count what happened in them."""
    kinds = ("events", "steps", "lives", "over", "expired", "held back", "impossible")
    counts: dict[str, int] = dict.fromkeys(kinds, 0)
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}, {world.settings}")
            raise
        counts["events"] += world.compared
        counts["steps"] += world.version
        counts["lives"] += world.lives
        counts["over"] += world.over
        counts["expired"] += world.pair[0].ledger.expired
        counts["held back"] += world.pair[0].held_back
        counts["impossible"] += world.impossible
    impossible = counts.pop("impossible")
    assert all(counts.values()), f"something never happened: {counts}"
    assert impossible < len(seeds) / 20
    return counts


def test_a_deadline_queue_keeps_order_and_a_bounded_heap() -> None:
    queue, deadlines, pick = DeadlineQueue(), dict[int, int](), random.Random(0)
    for _ in range(20_000):
        ticket = pick.randrange(200)
        if pick.random() < 0.3:
            queue.discard(ticket)
            deadlines.pop(ticket, None)
        else:
            deadlines[ticket] = pick.randrange(9)
            queue.put(ticket, deadlines[ticket])
        assert len(queue) == len(deadlines)
    expected = [ticket for _, ticket in sorted((deadline, ticket) for ticket, deadline in deadlines.items())]
    assert queue.in_order() == expected
    assert len(queue._heap) <= 2 * len(queue) + 65  # pyright: ignore[reportPrivateUsage]
    assert queue.first() == expected[0]
    assert queue.take(50) == expected[:50]
    assert queue.in_order() == expected[50:]
    with pytest.raises(IndexError):
        queue.take(len(queue) + 1)


def test_holders_know_who_has_a_ticket_last() -> None:
    holders = Holders()
    for ticket, worker in ((1, ""), (2, "a"), (1, "a"), (3, ""), (2, "b")):
        holders.put(ticket, worker)
    assert holders.of("a") == [1]
    assert holders.of("", "b", "") == [2, 3]
    holders.discard(3)
    holders.discard(3)
    assert holders.of("") == []


def test_the_scheduler_equals_the_one_that_scans() -> None:
    compare_sequences(range(300))


@pytest.mark.slow
def test_the_scheduler_equals_the_one_that_scans_on_many_sequences() -> None:
    counts = compare_sequences(range(1_000, 1_000 + SEQUENCES))
    print(SEQUENCES, counts)
