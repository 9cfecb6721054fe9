"""Open tickets, their attempts and workers, and the order of their deadlines; no I/O. With n tickets, each
change or query takes O(log n) on average, because the scheduler makes several at every event."""

import heapq
from collections.abc import Iterable

import msgspec

from stretto.bus.messages.tickets import GroupDone, Purpose, Ticket, TicketStarted
from stretto.kernel.schedule.commands import Command, Issue, SchedulerSettings, Withdraw

_SPARE = 64
"""Number of invalid entries that a heap may always have: cleaning a small heap is not worth the time."""


class DeadlineQueue:
    """Tickets in the order of training: earliest deadline first, then by ticket number.

    When a ticket leaves or its deadline changes, its entry stays in the heap as an invalid entry. The queue
    removes an invalid entry at the top, and all of them when they are more than half of the heap.
    """

    def __init__(self) -> None:
        self._deadlines: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        """(deadline, ticket)."""
        self.due: dict[int, int] = {}
        """Deadline -> number of tickets, at least 1."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._deadlines

    def put(self, ticket: int, deadline: int) -> None:
        if self._deadlines.get(ticket) == deadline:
            return
        self.discard(ticket)
        self._deadlines[ticket] = deadline
        self.due[deadline] = self.due.get(deadline, 0) + 1
        heapq.heappush(self._heap, (deadline, ticket))

    def discard(self, ticket: int) -> None:
        deadline = self._deadlines.pop(ticket, None)
        if deadline is None:
            return
        if self.due[deadline] == 1:
            del self.due[deadline]
        else:
            self.due[deadline] -= 1
        if len(self._heap) > 2 * len(self._deadlines) + _SPARE:
            self._heap = self._sorted()  # a sorted list is a heap

    def first(self) -> int:
        while self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self, count: int) -> list[int]:
        """Remove the first `count` tickets and return them in order."""
        taken: list[int] = []
        for _ in range(count):
            taken.append(self.first())
            self.discard(taken[-1])
        return taken

    def in_order(self) -> list[int]:
        """Return all tickets in order. This takes O(n log n)."""
        return [ticket for _, ticket in self._sorted()]

    def _sorted(self) -> list[tuple[int, int]]:
        return sorted((deadline, ticket) for ticket, deadline in self._deadlines.items())


class Holders:
    """The worker of each unfinished ticket; `""` for tickets that no worker is known to have begun."""

    def __init__(self) -> None:
        self._worker: dict[int, str] = {}
        self._tickets: dict[str, set[int]] = {}

    def put(self, ticket: int, worker: str) -> None:
        """Record that a worker has the ticket now, and no other worker."""
        self.discard(ticket)
        self._worker[ticket] = worker
        self._tickets.setdefault(worker, set()).add(ticket)

    def discard(self, ticket: int) -> None:
        """Remove a ticket if it has an entry."""
        worker = self._worker.pop(ticket, None)
        if worker is None:
            return
        tickets = self._tickets[worker]
        tickets.discard(ticket)
        if not tickets:
            del self._tickets[worker]

    def of(self, *workers: str) -> list[int]:
        """Return the tickets of some workers, by number."""
        return sorted({ticket for worker in workers for ticket in self._tickets.get(worker, ())})


class OpenTicket(msgspec.Struct):
    """A ticket between issue and retirement."""

    id: int
    row: int
    since: int
    """Training version at its first issue."""
    deadline: int
    """Last training version at which the group may be trained, also if η changes at a resume."""
    drawn_at: int = 0
    drops: int = 0
    """Number of earlier tickets with the same prompt that expired because they were late."""
    attempt: int = 0
    """The current attempt; 0 before the first."""
    tries: int = 0
    """Number of attempts that a worker has begun."""
    worker: str = ""
    """The worker of the current attempt; empty until it is known."""
    bounds: dict[int, int] = {}
    """Attempt -> lower bound of the version of its oldest token, at first the version at its issue."""
    done: GroupDone | None = None

    @property
    def oldest(self) -> int:
        """Lower bound on the version of the group's oldest token, whichever attempt finishes first."""
        if self.done is not None:
            return versions_of(self.done)[0]
        return min(self.bounds.values(), default=self.since)


def versions_of(group: GroupDone) -> tuple[int, int]:
    """Return the versions of a group's oldest and newest token."""
    return min(member.oldest for member in group.members), max(member.newest for member in group.members)


def rewards_of(group: GroupDone) -> tuple[float, ...]:
    """Return the rewards of a group's samples; empty if no policy sampled them."""
    return tuple(member.reward for member in group.members if member.sampled and not member.part)


def samples_of(group: GroupDone) -> int:
    return sum(not member.part for member in group.members)


class OpenTickets:
    """The open tickets of one purpose."""

    def __init__(self, purpose: Purpose, samples: int, max_attempts: int, commands: list[Command]) -> None:
        self.open: dict[int, OpenTicket] = {}
        """In the order of their numbers."""
        self.attempts_from = 0
        """New attempts have higher numbers. Attempts up to this number belong to previous kernels."""
        self._purpose: Purpose = purpose
        self._samples = samples
        self._max_attempts = max_attempts
        self._commands = commands
        self._holders = Holders()

    def find(self, id: int) -> OpenTicket | None:
        """Return an open ticket; None if it is not open."""
        return self.open.get(id)

    def restore(self, tickets: Iterable[OpenTicket], attempts_from: int) -> None:
        """Replace the open tickets by these, which are in the order of their numbers."""
        self.attempts_from = attempts_from
        self.open = {ticket.id: ticket for ticket in tickets}
        self._holders = Holders()
        for ticket in self.open.values():
            if ticket.done is None and ticket.attempt:
                self._holders.put(ticket.id, ticket.worker)

    def take_over(self, held: Iterable[TicketStarted]) -> None:
        """Keep the attempts on which a former kernel's workers still work. The caller reissues the others."""
        for ticket in self.open.values():
            if ticket.done is None:
                ticket.worker, ticket.tries = "", 0
        for message in held:
            ticket = self.find(message.ticket) if message.purpose == self._purpose else None
            is_current = ticket is not None and ticket.attempt == message.attempt
            if ticket is not None and is_current and ticket.done is None and message.attempt in ticket.bounds:
                self.started(ticket, message.worker)
            elif message.purpose == self._purpose:
                self._commands.append(Withdraw(self._purpose, message.ticket, message.attempt))
        for ticket in self.open.values():
            if ticket.done is None and not ticket.worker:
                ticket.bounds = {}

    def held_by(self, *workers: str) -> list[OpenTicket]:
        """Return the unfinished tickets of some workers, by number; `""` is for tickets without a worker."""
        return [self.open[id] for id in self._holders.of(*workers)]

    def started(self, ticket: OpenTicket, worker: str) -> None:
        """Record that a worker has begun the current attempt of an unfinished ticket."""
        if not ticket.worker:
            ticket.worker = worker
            ticket.tries += 1
            self._holders.put(ticket.id, worker)

    def failed(self, ticket: OpenTicket, worker: str) -> None:
        """Record that the current attempt of an unfinished ticket has failed; its start may be unknown."""
        self.started(ticket, worker)
        ticket.worker = ""
        self._holders.put(ticket.id, "")
        self.stop(ticket)

    def stop(self, ticket: OpenTicket) -> None:
        """Accept no group of a ticket's current attempt any more."""
        ticket.bounds = {
            attempt: bound for attempt, bound in ticket.bounds.items() if attempt != ticket.attempt
        }

    def issue(self, ticket: OpenTicket, version: int, reason: str, variant: str = "") -> str:
        """Issue the next attempt, whose tokens are no older than `version`. `reason` is why the previous
        attempt ended. Return an empty text, or, after `max_attempts`, why the ticket is not issued."""
        if ticket.tries == self._max_attempts:
            return reason if ticket.tries == 1 else f"begun {ticket.tries} times; at last {reason}"
        if ticket.attempt in ticket.bounds:
            self._commands.append(Withdraw(self._purpose, ticket.id, ticket.attempt))
        ticket.attempt = max(ticket.attempt, self.attempts_from) + 1
        ticket.bounds = {**ticket.bounds, ticket.attempt: version}
        ticket.worker = ""
        self._holders.put(ticket.id, "")
        issued = Ticket(
            ticket.id, ticket.attempt, self._purpose, ticket.row, version, self._samples, variant=variant
        )
        self._commands.append(Issue(issued))
        return ""

    def remove(self, id: int) -> None:
        del self.open[id]
        self._holders.discard(id)


class TrainingTickets(OpenTickets):
    """The open training tickets. Each is unfinished, finished, or in the batch that is being trained."""

    def __init__(self, settings: SchedulerSettings, commands: list[Command]) -> None:
        super().__init__("train", settings.group_size, settings.max_attempts, commands)
        self._settings = settings
        self.unfinished = DeadlineQueue()
        self.finished = DeadlineQueue()
        """The tickets whose groups wait for training."""
        self.batch: frozenset[int] = frozenset()
        """The tickets of the batch that is being trained. They are in no queue."""

    @property
    def resting(self) -> bool:
        """Whether training neither computes nor waits for a group, so that it needs no engine."""
        return not self.batch and not self.unfinished

    @property
    def done_groups(self) -> list[GroupDone]:
        """Finished groups that wait for training, in the order of training. This takes O(n log n)."""
        ordered = (self.open[id].done for id in self.finished.in_order())
        return [group for group in ordered if group is not None]

    def is_finished(self, group: GroupDone) -> bool:
        """Return whether this group is finished and waits for training."""
        return group.ticket in self.finished and self.open[group.ticket].done is group

    def restore(self, tickets: Iterable[OpenTicket], attempts_from: int, batch: Iterable[int] = ()) -> None:
        """Replace the open tickets by these, among them the `batch` that is being trained."""
        super().restore(tickets, attempts_from)
        self.unfinished, self.finished = DeadlineQueue(), DeadlineQueue()
        for ticket in self.open.values():
            self.place(ticket)
        self.batch = frozenset()
        self.train(batch)

    def find(self, id: int) -> OpenTicket | None:
        """Return an open ticket that is not in the batch."""
        return None if id in self.batch else super().find(id)

    def place(self, ticket: OpenTicket) -> None:
        """Put a ticket into its queue. Called after every change of its deadline or its group."""
        if ticket.done is None:
            self.unfinished.put(ticket.id, ticket.deadline)
        else:
            self.unfinished.discard(ticket.id)
            self.finished.put(ticket.id, ticket.deadline)
            self._holders.discard(ticket.id)

    def date(self, ticket: OpenTicket) -> None:
        """Set the deadline that follows from a ticket's oldest token."""
        ticket.deadline = ticket.oldest + self._settings.max_staleness
        self.place(ticket)

    def issue(self, ticket: OpenTicket, version: int, reason: str, variant: str = "") -> str:
        """Issue the next attempt of a ticket. See `OpenTickets.issue`."""
        refusal = super().issue(ticket, version, reason, variant)
        if not refusal:
            self.date(ticket)
        return refusal

    def remove(self, id: int) -> None:
        """Remove a ticket, which is not in the batch."""
        del self.open[id]
        self._leave_queue(id)

    def _leave_queue(self, id: int) -> None:
        self.unfinished.discard(id)
        self.finished.discard(id)
        self._holders.discard(id)

    def train(self, ids: Iterable[int]) -> list[OpenTicket]:
        """Move tickets to the batch, and return them in the order of their numbers."""
        self.batch = frozenset(ids)
        for id in self.batch:
            self._leave_queue(id)
        return [self.open[id] for id in sorted(self.batch)]

    def blocking(self, version: int) -> OpenTicket | None:
        """Return the unfinished ticket for which the next batch has to wait; None if the batch is admissible.

        The batch takes the first B finished groups. It is admissible at version v if, after it, for every j
        in -1..η at most (j + 1)·B of the remaining tickets have a deadline of v + 1 + j or earlier. Then
        every later batch can be made in time. For j = -1, no remaining ticket is due at v.
        """
        bound, size = self._settings.max_staleness, self._settings.batch_size
        due_after, places = dict(self.unfinished.due), size
        for deadline, count in sorted(self.finished.due.items()):
            taken = min(count, places)
            places -= taken
            due_after[deadline] = due_after.get(deadline, 0) + count - taken
        due_so_far = 0
        for j in range(-1, bound + 1):
            due_so_far += due_after.get(version + 1 + j, 0)
            if due_so_far > (j + 1) * size:
                # The tickets above the bound are unfinished: the batch has finished ones with such deadlines.
                return self.open[self.unfinished.first()]
        return None
