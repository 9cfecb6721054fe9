"""The scheduler's cost for each group, by the number of tickets under way.

    python benchmarks/scheduler.py

Each measurement is a run in steady state: workers take tickets, report their first tokens, and finish them
in random order. A batch trains while half a batch of groups finishes, so for half of the groups no batch
trains. The last line is one JSON object.
"""

from __future__ import annotations

import json
import random
import time

from stretto.bus.messages.tickets import GroupDone, Member, Ticket
from stretto.kernel.schedule.commands import Issue, SchedulerSettings, StartBatch
from stretto.kernel.schedule.scheduler import Scheduler

STALENESS = 4
UNDER_WAY = (96, 640, 10_240, 40_000)
BATCHES = 3.0
"""A measurement lasts for this many batches, but at least for `LEAST` groups and at most for `SECONDS`."""
LEAST = 2_000
SECONDS = 20.0
SAMPLES = 8


def group_of(ticket: Ticket, version: int) -> GroupDone:
    members = tuple(
        Member(f"{ticket.name}/{i}", i, i, 900, 700, ticket.min_version, version, float(i % 2), {}, "stop")
        for i in range(ticket.samples)
    )
    return GroupDone(ticket.purpose, ticket.id, ticket.attempt, "rollout-0", members, 1.0)


def microseconds_per_group(under_way: int) -> float:
    """Return the microseconds that one group costs the scheduler while this many tickets are under way."""
    batch = under_way // (STALENESS + 1)
    settings = SchedulerSettings(
        steps=10**9, batch_size=batch, max_staleness=STALENESS, rows=1000, group_size=SAMPLES
    )
    scheduler, rng = Scheduler(settings), random.Random(0)
    scheduler.start()
    held: list[Ticket] = []
    is_training, until_trained = False, 0

    def obey() -> None:
        nonlocal is_training, until_trained
        for command in scheduler.commands():
            if isinstance(command, Issue):
                held.append(command.ticket)
            elif isinstance(command, StartBatch):
                is_training, until_trained = True, batch // 2

    obey()
    spent, groups, wanted = 0.0, 0, max(LEAST, int(BATCHES * batch))
    warming = batch  # the first batches are made of young groups alone
    while groups < wanted and spent < SECONDS:
        place = rng.randrange(len(held))
        held[place], held[-1] = held[-1], held[place]
        ticket = held.pop()
        group = group_of(ticket, scheduler.version)
        worker = f"rollout-{ticket.id % 64}"
        until_trained -= 1
        began = time.process_time()
        scheduler.ticket_started("train", ticket.id, ticket.attempt, worker)
        scheduler.first_token(ticket.id, ticket.attempt, ticket.min_version)
        scheduler.group_done(group)
        obey()
        if is_training and (until_trained <= 0 or not held):
            is_training = False
            scheduler.step_finished()
            obey()
        spent += time.process_time() - began
        groups += 1
        if warming and (groups == warming or spent > SECONDS / 2):
            spent, groups, warming = 0.0, 0, 0
    return spent / groups * 1e6


def main() -> None:
    figures: dict[str, float] = {}
    print(f"{'under way':>10} {'us_per_group':>20}")
    for under_way in UNDER_WAY:
        figure = microseconds_per_group(under_way)
        print(f"{under_way:>10,} {figure:>20,.1f}", flush=True)
        figures[str(under_way)] = round(figure, 1)
    print(json.dumps({"us_per_group": figures}))


if __name__ == "__main__":
    main()
