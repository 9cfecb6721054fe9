"""Tickets on the bus: the work queue, the log of outcomes, and the part of the log that is still needed."""

from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from stretto.bus.client import Bus
from stretto.bus.messages import tickets as messages
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import AbortTicket, GroupDone, GroupFailed, Purpose, Ticket
from stretto.kernel.schedule.outcomes import Outcome, follow_outcomes, without_details
from stretto.kernel.schedule.scheduler import Snapshot

log = structlog.get_logger()


class TicketQueue:
    """Puts tickets on the bus and follows their outcomes. Without `samples`, trainers read the sequences from
    the dataset, and a training ticket is finished when it is issued."""

    def __init__(self, bus: Bus, names: Subjects, lease_epoch: int, *, samples: bool) -> None:
        self._bus = bus
        self._names = names
        self._lease_epoch = lease_epoch
        self._samples = samples
        self._queued: dict[tuple[Purpose, int, int], int] = {}
        """(purpose, ticket, attempt) -> sequence number in the work queue."""
        self._log_at_issue: dict[int, int] = {}
        """Training ticket -> `log_sequence` at its first issue. The ticket's data follows in the log."""
        self._log_at_evaluation: int | None = None
        """`log_sequence` at the first ticket of the evaluation under way; None if none is under way."""
        self._left_out = Counter[str]()
        self.log_sequence = 0
        """Sequence number of the last log message that the scheduler has taken in."""

    def continue_from(
        self, log_sequence: int, lowest_sequence: int, *, tickets: Iterable[int], evaluating: bool
    ) -> None:
        """Continue a former kernel's queue. Its workers may still work on `tickets`, which have no outcome
        yet, and may have stored data. The newest checkpoint needs the log from `lowest_sequence` on."""
        self.log_sequence = log_sequence
        self._log_at_issue = dict.fromkeys(tickets, lowest_sequence - 1)
        self._log_at_evaluation = lowest_sequence - 1 if evaluating else None

    async def issue(self, ticket: Ticket) -> None:
        """Put a ticket into the work queue, or, if trainers read the dataset, its outcome into the log."""
        if ticket.purpose == "train" and not self._samples:
            await self._bus.store.append(self._names.groups, dataset_group(ticket), id=f"{ticket.name}/end")
            return
        if ticket.purpose == "train":
            self._log_at_issue.setdefault(ticket.id, self.log_sequence)
        elif self._log_at_evaluation is None:
            self._log_at_evaluation = self.log_sequence
        sequence = await self._bus.store.append(self._names.ticket(ticket.purpose), ticket, id=ticket.name)
        self._queued[ticket.purpose, ticket.id, ticket.attempt] = sequence

    async def withdraw(self, purpose: Purpose, ticket: int, attempt: int) -> None:
        """Remove an attempt from the queue, and ask the worker that works on it to stop."""
        sequence = self._queued.pop((purpose, ticket, attempt), None)
        if sequence is not None:
            await self._bus.store.delete(self._names.tickets_stream, sequence)
        abort = AbortTicket(self._lease_epoch, purpose, ticket, attempt)
        await self._bus.publish(self._names.abort_ticket, abort)

    async def clear(self, last: int) -> None:
        """Remove the tickets of previous kernels, up to this sequence number: no engine is lent to their
        evaluation, so its tickets would never end. Tickets of a kernel that has replaced this one stay."""
        await self._bus.store.purge(self._names.tickets_stream, below=last + 1)

    async def follow(self, accept: Callable[[int, Outcome], None]) -> None:
        """Call `accept` with every later (sequence number, outcome) of the log, until cancelled."""
        start = self.log_sequence + 1
        outcomes = follow_outcomes(self._bus, self._names, start=start, samples=self._samples)
        async for sequence, outcome in outcomes:
            self._queued.pop((outcome.purpose, outcome.ticket, outcome.attempt), None)
            if isinstance(outcome, GroupFailed):
                self._log(outcome)
            self.take_in(sequence, outcome, accept)

    def _log(self, outcome: GroupFailed) -> None:
        """Log a failure. Of the rows left out for the same reason, log the 1st, 2nd, 4th, 8th and so on."""
        fields = {"ticket": outcome.ticket, "worker": outcome.worker, "reason": outcome.reason}
        if not outcome.filtered:
            log.warning("ticket failed", **fields)
            return
        kind = without_details(outcome.reason)
        self._left_out[kind] += 1
        if self._left_out[kind].bit_count() == 1:  # 1, 2, 4, 8 …
            log.info("row left out", **fields, rows=self._left_out[kind])

    def take_in(self, sequence: int, outcome: Outcome, accept: Callable[[int, Outcome], None]) -> None:
        """Take in an outcome. A checkpoint stores the ledger together with the outcome's sequence number."""
        accept(sequence, outcome)
        self.log_sequence = sequence

    def evaluation_ended(self) -> None:
        """Record that the evaluation under way needs no log message any more."""
        self._log_at_evaluation = None

    def lowest_sequence(self, snapshot: Snapshot) -> int:
        """Return the sequence number of the first log message that a run resumed from this snapshot needs."""
        open_tickets = {ticket.id for ticket in snapshot.open}
        self._log_at_issue = {
            ticket: sequence for ticket, sequence in self._log_at_issue.items() if ticket in open_tickets
        }
        bundles = [
            member.sequence
            for ticket in snapshot.open
            if ticket.done and self._samples
            for member in ticket.done.members
        ]
        outcomes = [sequence + 1 for sequence in self._log_at_issue.values()]
        evaluation = [] if self._log_at_evaluation is None else [self._log_at_evaluation + 1]
        return min([*bundles, *outcomes, *evaluation, self.log_sequence + 1])


def dataset_group(ticket: Ticket) -> GroupDone:
    """Return a finished group whose members name the row from which trainers make the sequences."""
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
