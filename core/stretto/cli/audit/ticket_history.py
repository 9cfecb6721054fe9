"""`stretto audit RUN --ticket N`: what happened to one ticket, from journal, log and kept samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec

from stretto.bus.messages.events import BatchStarted
from stretto.bus.messages.tickets import GroupDone, GroupFailed, RetiredTickets
from stretto.cli.audit.audit_records import events_in, journal_messages
from stretto.cli.audit.audit_store import StoredRun, open_store
from stretto.errors import ConfigError, printable
from stretto.records.kept.samples import SampleStore
from stretto.run_folder import RunFolder


class TicketHistory(msgspec.Struct, kw_only=True):
    """What is known of one ticket."""

    ticket: int
    events: list[str]
    """What happened to it, in order."""
    violations: list[str]
    """What the records say differently; empty if they agree."""


def ticket_history(folder: Path, ticket: int) -> TicketHistory:
    """Collect what journal, log and samples say of a training ticket of a run that has ended."""
    return anyio.run(_history_of, RunFolder(folder).folder, ticket)


async def _history_of(folder: Path, ticket: int) -> TicketHistory:
    facts = _Facts(SampleStore(folder), ticket)
    async with open_store(folder) as store:
        await facts.read_log(store)
        await facts.read_journal(folder, store)
    events = [*facts.attempts(), *facts.endings()]
    if not events:
        raise ConfigError(
            f"{folder} has no ticket {ticket}: it was never finished, or the log is purged and its samples "
            "are not kept"
        )
    return TicketHistory(ticket=ticket, events=events, violations=list(facts.faults()))


class _Facts:
    """The records of one ticket."""

    def __init__(self, samples: SampleStore, ticket: int) -> None:
        self._ticket = ticket
        self._rows = samples.ticket(ticket)
        self._digests = samples.digests(ticket)
        self._retirement = samples.retirement(ticket)
        self._outcomes: dict[int, tuple[int, GroupDone | GroupFailed]] = {}
        """Attempt -> (sequence number, outcome), as far as the log has them."""
        self._batches: dict[int, tuple[str, ...]] = {}
        """Version -> ids of the ticket's trajectories in its batch."""

    async def read_log(self, store: StoredRun) -> None:
        kinds = {store.names.groups: GroupDone | GroupFailed, store.names.retired: RetiredTickets}
        async for message in store.messages(store.names.log_stream, kinds):
            match message.content:
                case GroupDone("train", self._ticket, attempt) | GroupFailed("train", self._ticket, attempt):
                    self._outcomes.setdefault(attempt, (message.sequence, message.content))
                case RetiredTickets(tickets):
                    for ticket, account, reason in tickets:
                        if ticket == self._ticket:
                            self._retirement = account, reason
                case _:
                    pass

    async def read_journal(self, folder: Path, store: StoredRun) -> None:
        async for message in journal_messages(folder, store):
            for event in events_in(message) or ():  # `stretto audit` says which cannot be read
                if isinstance(event, BatchStarted) and self._ticket in event.tickets:
                    ids = tuple(row.id for row in event.rows if row.group == self._ticket)
                    self._batches[event.version] = ids  # a later incarnation replaces a previous one

    def attempts(self) -> Iterator[str]:
        """Yield what happened in each attempt."""
        kept: defaultdict[int, list[dict[str, object]]] = defaultdict(list)
        for row in self._rows:
            kept[row["attempt"]].append(row)
        for attempt in sorted({*kept, *self._outcomes}):
            rows = kept.get(attempt, [])
            if attempt in self._outcomes:
                sequence, outcome = self._outcomes[attempt]
                yield f"attempt {attempt}: {_outcome_text(outcome)} (message {sequence} of the log)"
            elif rows:
                first = rows[0]
                who = f"{first['outcome']}, at {first['worker']} in {first['seconds']:.2f} s"
                yield f"attempt {attempt}: {who} (message {first['sequence']} of the log, purged)"
            for row in rows:
                if row["index"] is not None:
                    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:g}"
                    yield (
                        f"  {row['id']}: {row['sampled']} tokens of versions {row['oldest']} to "
                        f"{row['newest']} by {row['engine']}, {reward}, ended by {row['finish']}"
                    )
            if attempt in self._digests:
                said, found = self._digests[attempt]
                yield f"  digest {said[:12]}: " + ("the samples match" if said == found else "DIFFERS")
            elif not rows:
                yield "  its samples are not kept"

    def endings(self) -> Iterator[str]:
        """Yield how the ticket ended."""
        for version, ids in self._batches.items():
            yield f"trained in step {version + 1}, at version {version}: {', '.join(ids)}"
        if self._retirement is not None:
            yield f"{self._retirement[0]}: {self._retirement[1]}"
        columns = [row["importance_weights"] or () for row in self._rows]
        weights = [weight for column in columns for weight in column if weight is not None]
        if weights:
            yield f"importance weights {min(weights):.3f} to {max(weights):.3f}, {len(weights)} tokens"

    def faults(self) -> Iterator[str]:
        """Yield what the records say differently."""
        for attempt, (said, found) in self._digests.items():
            if said != found:
                yield f"attempt {attempt}: its samples have the digest {found}; {said} was recorded"
            _, outcome = self._outcomes.get(attempt, (0, None))
            if isinstance(outcome, GroupDone) and outcome.digest not in ("", said):
                yield f"attempt {attempt}: the samples name the digest {said}; the log has {outcome.digest}"
        kept = {row["id"]: row for row in self._rows}
        for version, ids in self._batches.items():
            for id in ids:
                if kept and id not in kept:
                    yield f"{id} was trained at version {version}, and is not among the samples"
                elif id in kept and (step := kept[id]["step"]) not in (None, version + 1):
                    yield f"{id}: the journal trained it in step {version + 1}, its samples say {step}"


def _outcome_text(outcome: GroupDone | GroupFailed) -> str:
    if isinstance(outcome, GroupDone):
        return f"{len(outcome.members)} trajectories by {outcome.worker} in {outcome.seconds:.2f} s"
    return f"{'left out' if outcome.filtered else 'failed'} at {outcome.worker}: {printable(outcome.reason)}"
