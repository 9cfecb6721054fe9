"""The queues of open tickets: order of deadlines, bounded memory, and the last holder of a ticket."""

import random

import pytest

from stretto.kernel.schedule.open_tickets import DeadlineQueue, Holders


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
    assert queue.pop(50) == expected[:50]
    assert queue.in_order() == expected[50:]
    with pytest.raises(IndexError):
        queue.pop(len(queue) + 1)


def test_holders_know_who_has_a_ticket_last() -> None:
    holders = Holders()
    for ticket, worker in ((1, ""), (2, "a"), (1, "a"), (3, ""), (2, "b")):
        holders.put(ticket, worker)
    assert holders.of("a") == [1]
    assert holders.of("", "b", "") == [2, 3]
    holders.discard(3)
    holders.discard(3)
    assert holders.of("") == []
