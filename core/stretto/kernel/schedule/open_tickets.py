"""Open tickets in the order of their deadlines, and by the worker that works on them. Plain classes without
I/O.

The scheduler looks at these at every event. With n tickets, each operation that changes or asks for one
ticket takes O(log n) on average over many operations, however many tickets are open.
"""

from __future__ import annotations

import heapq

__all__ = ["DeadlineQueue", "Holders"]

_SPARE = 64
"""Invalid entries that a heap may always have; small heaps are not worth cleaning."""


class DeadlineQueue:
    """Tickets in the order of training: earliest deadline first, then by ticket number.

    A ticket whose deadline changes, or that leaves, stays behind in the heap as an invalid entry. Such
    entries go when they reach the top, or when they are more than half of the heap.
    """

    def __init__(self) -> None:
        self._deadlines: dict[int, int] = {}
        """Ticket -> its deadline."""
        self._heap: list[tuple[int, int]] = []
        """(deadline, ticket)."""
        self.due: dict[int, int] = {}
        """Number of tickets, by deadline. It has no deadline without a ticket."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._deadlines

    def put(self, ticket: int, deadline: int) -> None:
        """Add a ticket, or change its deadline."""
        if self._deadlines.get(ticket) == deadline:
            return
        self.discard(ticket)
        self._deadlines[ticket] = deadline
        self.due[deadline] = self.due.get(deadline, 0) + 1
        heapq.heappush(self._heap, (deadline, ticket))

    def discard(self, ticket: int) -> None:
        """Remove a ticket, if it is there."""
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
        """Return the first ticket.

        Raises:
            IndexError: if there is none.
        """
        while self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def take(self, count: int) -> list[int]:
        """Remove the first `count` tickets and return them in order.

        Raises:
            IndexError: if there are fewer.
        """
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
    """Which worker has each unfinished ticket. The worker `""` has the tickets that nobody has begun, as far
    as the scheduler knows."""

    def __init__(self) -> None:
        self._worker: dict[int, str] = {}
        self._tickets: dict[str, set[int]] = {}

    def put(self, ticket: int, worker: str) -> None:
        """Record that a worker has the ticket now, and no other worker."""
        self.discard(ticket)
        self._worker[ticket] = worker
        self._tickets.setdefault(worker, set()).add(ticket)

    def discard(self, ticket: int) -> None:
        """Remove a ticket, if it is there."""
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
