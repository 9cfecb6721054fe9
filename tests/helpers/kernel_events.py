"""Events of a kernel as tests need them: `from kernel_events import step_measured`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.bus.messages.events import (
    Account,
    Cause,
    EventBatch,
    GroupFigures,
    IssuedTicket,
    OutcomeRead,
    RetiredTicket,
    StepMeasured,
    TicketsIssued,
    TicketsRetired,
    WeightsServed,
)
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Member, Purpose, Ticket
from stretto.bus.payloads import encode
from stretto.kernel.schedule.commands import Command, Issue
from stretto.kernel.schedule.scheduler import Scheduler, Snapshot
from stretto.records.events.files import FOLDER, file_name, record_of
from stretto.records.events.reader import TimedEvent


def step_measured(
    version: int, began: float, tickets: tuple[int, ...], waits: tuple[tuple[Cause, float], ...] = ()
) -> StepMeasured:
    times = ("train_s", "generate_busy_s", "verify_busy_s", "cores_used", "cores_idle", "memory_used")
    empty = ("of_batch", "statistics", "of_engines", "ledger", "variants", "not_trained")
    figures: dict[str, Any] = dict.fromkeys(times, 0.0) | {name: {} for name in empty}
    figures |= {"tokens": 0, "engines": 0, "calls": (), "skipped": ()}
    return StepMeasured(version=version, repeated=False, began=began, tickets=tickets, waits=waits, **figures)


def done(
    ticket: int, attempt: int = 1, *, worker: str = "rollout-0", seconds: float = 1.0, score_s: float = 0.1
) -> OutcomeRead:
    """A group of 4 samples with 100 tokens."""
    group = GroupFigures(
        *("train", ticket, attempt, worker, seconds, seconds - score_s, score_s),
        samples=4,
        reward=0.5,
        tokens=100,
        oldest=0,
    )
    return OutcomeRead(sequence=1, group=group)


def finished(
    ticket: Ticket, rewards: Sequence[float] = (1.0,), *, oldest: int = 0, newest: int | None = None
) -> GroupDone:
    """The group of a ticket, with a sample for each reward."""
    newest = oldest if newest is None else newest
    members = tuple(
        Member(f"{ticket.name}/{index}", 1, index, 9, 5, oldest, newest, reward, {}, "stop")
        for index, reward in enumerate(rewards)
    )
    return GroupDone(ticket.purpose, ticket.id, ticket.attempt, "w", members, 0.1)


def report(scheduler: Scheduler, outcome: GroupDone | GroupFailed) -> None:
    if isinstance(outcome, GroupDone):
        scheduler.group_done(outcome)
    else:
        scheduler.group_failed(outcome)


def issued_by(commands: Iterable[Command]) -> list[Ticket]:
    return [command.ticket for command in commands if isinstance(command, Issue)]


def stored(scheduler: Scheduler) -> Snapshot:
    """A scheduler's state, as the next kernel reads it in a checkpoint."""
    return msgspec.json.decode(msgspec.json.encode(scheduler.snapshot()), type=Snapshot)


def issued(ticket: int, attempt: int = 1, purpose: Purpose = "train", version: int = 0) -> TicketsIssued:
    return TicketsIssued((IssuedTicket(purpose, ticket, attempt, row=ticket, min_version=version),))


def retired(ticket: int, account: Account, reason: str, purpose: Purpose = "train") -> TicketsRetired:
    return TicketsRetired((RetiredTicket(purpose, ticket, 1, account, reason),))


def served(began: float, worker: str, version: int, pause_s: float) -> WeightsServed:
    return WeightsServed(
        *(began, worker, version),
        exact=False,
        are_new=True,
        pause_s=pause_s,
        drift=None,
        engine_kl=None,
        unscored="",
    )


def write_events(folder: Path, events: Sequence[TimedEvent], *, epoch: int = 1, first: int = 2) -> None:
    """Write events into a file of the folder `events` of a run, as a kernel does, a few in a message."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    records: list[bytes] = []
    for number, start in enumerate(range(0, len(events), 7), start=first):
        times, some = zip(*events[start : start + 7], strict=True)
        raw = tuple(msgspec.Raw(encode(event)) for event in some)
        records.append(record_of(number, encode(EventBatch(epoch, start, raw, times))))
    (folder / FOLDER / file_name(epoch, first)).write_bytes(b"".join(records))
