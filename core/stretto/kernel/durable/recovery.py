"""Recovery after a restart. The scheduler takes in again the events since the checkpoint, and the trainers
train again the batches that these events start, to the same digests.

The batches that the scheduler starts are compared with the recorded ones. A kernel takes in only events of
the checkpoint's incarnation: those before the next `RunOwned` of another incarnation. After a checkpoint with
other values, a kernel takes in no event: the run begins again at the checkpoint.

`read_store` first compares the checkpoint, the journal and the log. In a damaged store, events are valid as
long as they start the recorded batches. The run continues without the lost steps and groups, and issues the
tickets of lost groups again. If nothing is left, `read_store` refuses the resume before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages import events
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Purpose
from stretto.bus.store import Extent
from stretto.errors import ConfigError, Malformed, MessageGone, RunError
from stretto.kernel.calls.trainers import StepResult, Trainers
from stretto.kernel.durable.checkpoint import KernelState, LostData
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.schedule.commands import Command, StartBatch
from stretto.kernel.schedule.draws import RecordedDraw
from stretto.kernel.schedule.fold import apply, decisions, outcome_read
from stretto.kernel.schedule.open_tickets import OpenTicket, samples_of
from stretto.kernel.schedule.outcomes import Outcome, follow_outcomes, refs_of
from stretto.kernel.schedule.scheduler import Scheduler, Snapshot
from stretto.weights import WeightsNote

log = structlog.get_logger()

Name = tuple[Purpose, int, int]
"""(purpose, ticket, attempt) of an outcome."""
OnRepeated = Callable[[StartBatch, StepResult | events.StepMeasured | None, float | None, str], None]


class Heard(msgspec.Struct):
    """An event that a previous kernel's scheduler took in."""

    sequence: int
    """Sequence number of the journal's message with the event."""
    event: events.Input
    batch: events.BatchStarted | None = None
    """The batch that the event started."""


class Journal(msgspec.Struct):
    """The content of the journal after a checkpoint."""

    heard: list[Heard] = []
    started: set[int] = set()
    """Versions with a batch of the checkpoint's incarnation."""
    results: list[events.Evaluation] = []
    """Results of evaluations of the checkpoint's incarnation."""
    measured: dict[int, events.StepMeasured] = {}
    """Version -> the newest figures of the step that led to it."""
    digests: dict[int, str] = {}
    """Version -> digest of its weights in the checkpoint's incarnation."""
    draws: dict[int, RecordedDraw] = {}
    incarnation: int | None = None
    """Incarnation of the newest kernel; None if no kernel has owned the run since the checkpoint."""
    heard_at: float = 0.0
    """Unix time of the newest event; 0 without one."""
    is_damaged: bool = False
    """Whether messages are missing. `heard` has no events after the first missing message."""


class Fold(msgspec.Struct):
    """The events that a scheduler has taken in."""

    position: int
    """Sequence number in the journal's stream of the last event."""
    log_sequence: int
    """Sequence number in the log of the last outcome."""
    inputs: list[tuple[events.Input, Outcome | None]] = []
    version: int = 0
    """Training version after the batches that the events start."""
    end: Snapshot = msgspec.field(default_factory=Snapshot)
    is_whole: bool = True
    """Whether the scheduler could take in all events of the journal."""
    is_left: bool = False
    """Whether events of another incarnation or of other values follow."""


class Replay(msgspec.Struct):
    """Batches that a replay trains again without events."""

    batches: list[tuple[tuple[int, ...], list[GroupDone]]] = []
    """(tickets, groups) of each batch. The trajectories are in the log."""
    draws: dict[int, int] = {}
    """Ticket -> its row of the dataset."""


class Stored(msgspec.Struct, frozen=True):
    """The data of a run that are left in checkpoint, journal and log."""

    snapshot: Snapshot
    """The checkpoint's state. Tickets whose trajectories are gone are unfinished in it."""
    journal: Journal
    fold: Fold
    next_incarnation: int = 0
    """Number of an incarnation that no other weights have."""
    fits: bool = True
    """Whether the checkpoint has the kernel's values. If not, the scheduler takes in no event."""
    outcomes: tuple[tuple[int, Outcome], ...] = ()
    """(sequence number, outcome) of the tickets that ended after the checkpoint."""
    later: tuple[tuple[int, Outcome], ...] = ()
    """(sequence number, outcome) of usable outcomes that no event has taken in."""
    log_is_short: bool = False
    """Whether the log ends before the checkpoint's place in it: none of its messages can be used."""
    lost: LostData = LostData()
    lost_from: int | None = None
    """Version from which steps are lost, where a new incarnation begins; None if no step is lost."""

    @property
    def is_exact(self) -> bool:
        """Whether the events lead to the state that the previous kernel left."""
        is_whole = self.fits and self.fold.is_whole and not self.journal.is_damaged
        return is_whole and not self.lost and self.lost_from is None

    def incarnation_at(self, version: int, former: int) -> int:
        """Return the incarnation that continues at a version: `former`, or a new one where steps are lost."""
        return self.next_incarnation if version == self.lost_from else former

    @classmethod
    def of_replay(cls, state: KernelState, replay: Replay) -> Stored:
        """Return the stored data of a replay that begins with a checkpoint."""
        recorded = {ticket: RecordedDraw(state.version, row) for ticket, row in replay.draws.items()}
        fold = Fold(state.events_after, state.log_sequence, version=state.version)
        return cls(state.snapshot, Journal(draws=recorded), fold)


class Living(msgspec.Struct, frozen=True):
    """The weights of a former kernel's trainers that continue to work."""

    version: int
    """Steps up to this version need not be repeated."""
    notes: tuple[WeightsNote, ...]
    """Notes of the versions that evaluations need, and last of `version`, unless its step is over."""


class Recovered(msgspec.Struct, frozen=True):
    """The result of a repetition."""

    notes: tuple[WeightsNote, ...]
    """Notes of the versions that evaluations still need, and last the newest one."""
    incarnation: int
    log_sequence: int
    later: tuple[tuple[int, Outcome], ...]
    repeated: int
    """Number of steps that were trained again."""
    is_exact: bool
    """Whether later events can continue the stored ones. If not, a checkpoint has to come first."""
    retired: tuple[events.RetiredTicket, ...]


async def read_store(
    bus: Bus,
    names: Subjects,
    checkpoint: tuple[Path | None, KernelState],
    scheduler: Scheduler,
    *,
    values: int,
    samples: bool,
    reached: int,
    epoch: int,
) -> Stored:
    """Read what journal and log hold for a run that continues from a checkpoint. Nothing is changed.

    The `scheduler` has the kernel's values, and tries the events. `samples` says that the run trains on
    trajectories in the log, not on rows of a dataset. `reached` is the newest reported version; steps up to
    `reached` are lost if the journal does not lead to them.
    """
    folder, state = checkpoint
    journal = await _read_journal(bus, names, state)
    outcomes = await _outcomes(bus, names, state.log_sequence, samples=samples)
    extent = await bus.store.extent(names.log_stream)  # last: workers of the former kernel may still write
    short = extent.last < state.log_sequence
    outcomes = [] if short else outcomes
    is_new = state.snapshot.phase == "new" and state.version == 0
    snapshot = scheduler.snapshot() if is_new else state.snapshot
    groups = [ticket.done for ticket in snapshot.open if ticket.done]
    groups += [each for _, each in outcomes if isinstance(each, GroupDone) and each.purpose == "train"]
    lost = set[Name]()
    if samples and (needed := {sequence for group in groups for sequence in _messages_of(group)}):
        gone = needed if short else await _gone(bus, names, extent, needed)
        lost = {_name(group) for group in groups if not gone.isdisjoint(_messages_of(group))}
    snapshot = _without(snapshot, lost)
    usable = {sequence: each for sequence, each in outcomes if _name(each) not in lost}
    if not (fits := values == state.values):
        snapshot = _with_other_values(snapshot, journal.results)
    scheduler.restore(snapshot, journal.draws)
    fold = _fold(scheduler, journal.heard if fits else (), usable, state)
    end = fold.version
    lost_steps = max(reached, *journal.digests, end) - end
    is_cut = lost_steps or end in journal.started or fold.is_left  # the events do not lead to all steps
    begins_again = not fits and 0 in journal.started  # the journal is whole: there was no checkpoint yet
    if lost_steps and folder is None and not end and not begins_again:
        raise ConfigError(
            f"the run was at version {lost_steps}, but it has no intact checkpoint, and the store does not "
            "hold its first steps: nothing is left to continue from, and nothing was changed; put back "
            "`checkpoints` or `bus/store` from a copy and resume again, or start a new run"
        )
    if is_cut:
        lost |= {_name(group) for group in groups if any(each.newest > end for each in group.members)}
    taken = {event.sequence for event, _ in fold.inputs if isinstance(event, events.OutcomeRead)}
    later = tuple(  # a failed ticket may be one that was admitted after the lost steps
        (sequence, each)
        for sequence, each in outcomes
        if sequence not in taken
        and _name(each) not in lost
        and not (is_cut and isinstance(each, GroupFailed))
    )
    missing = sum(each > state.log_sequence for each in extent.missing)
    return Stored(
        *(snapshot, journal, fold),
        next_incarnation=max(epoch, state.incarnation + 1),
        fits=fits,
        outcomes=tuple(outcomes),
        later=later,
        log_is_short=short,
        lost=LostData(lost_steps, len(lost), missing, int(journal.is_damaged)),
        lost_from=end if is_cut else None,
    )


@dataclass(eq=False)
class Repetition:
    """Trains the batches of the stored events again, and brings a scheduler into the state after the events.
    After each step, `_on_repeated` is called with batch, result, divergence if known, and digest. For steps
    that living trainers need not repeat, result and digest are those that the former kernel recorded."""

    _writer: JournalWriter
    _scheduler: Scheduler
    _trainers: Trainers
    _folder: Path | None
    _state: KernelState
    _stored: Stored
    _on_repeated: OnRepeated
    _living: Living | None = None

    def __post_init__(self) -> None:
        self._trained = 0
        self._notes: list[WeightsNote] = []
        self._retired: list[events.RetiredTicket] = []
        self._differs = False
        """Whether the last step did not reach its recorded digest."""
        self.has_expired = False

    async def load(self) -> None:
        """Load the checkpoint's weights, and bring the scheduler into its state."""
        folder, state, stored = self._folder, self._state, self._stored
        if not stored.journal.is_damaged:
            self._writer.events_after = state.events_after
        self._scheduler.restore(stored.snapshot, stored.journal.draws)
        if self._living is not None:
            self._notes = [*self._living.notes]
            return
        load = partial(self._trainers.load, folder, state.version, state.needed)
        self._notes = [*await self._trainers.until_done(load)]
        if folder is not None and self._notes[-1].digest != state.digest:
            raise RunError(
                f"the weights loaded from {folder} differ from those that were saved there; "
                "without this folder the run resumes from an older checkpoint"
            )

    async def fold(self, *, expires_batch: bool = False) -> Recovered:
        """Take in the events and train the batches that they start, also the incomplete batch unless it
        expires. If a repeated step has another digest than recorded, a new incarnation begins: samples of
        the previous weights expire, and later events are not taken in."""
        start: StartBatch | None = None
        for event, outcome in self._stored.fold.inputs:
            if start is not None and isinstance(event, events.StepTrained):
                start = await self._repeat(start, event)
            else:
                start = _batch_in(self._take_in(event, outcome)) or start
            if self._differs:
                return self._recovered()
        self._writer.events_after = self._stored.fold.position
        await self._compare_living()
        if expires_batch and self._scheduler.training:
            start = self._expire_batch()
        if start is not None and self._scheduler.training:
            await self._train_next(start)
        return self._recovered()

    async def _repeat(self, start: StartBatch, event: events.StepTrained) -> StartBatch | None:
        """Train a batch again, unless living trainers have its step. Return the batch that follows."""
        is_done = self._living is not None and start.version < self._living.version
        step = None if is_done else await self._train(start)
        event = msgspec.structs.replace(event, hold=event.hold or self._differs)
        following = _batch_in(self._take_in_step(start, step, event))
        if step is not None:
            await self._writer.flush()
        return following

    async def _compare_living(self) -> None:
        """Compare the weights of living trainers with the recorded digest of the last version."""
        # Trainers that are ahead have no note of this version, only of those that evaluations need.
        newest = self._notes[-1] if self._living is not None and self._notes else None
        if newest is not None and newest.version == self._scheduler.version > self._state.version:
            self._compare(newest)
            await self._writer.flush()

    def _expire_batch(self) -> StartBatch | None:
        """Expire the batch under way. Return the batch that takes its place, if one is complete."""
        self.has_expired, expired = True, events.BatchExpired(self._scheduler.version)
        self._writer.hear(expired)
        commands = self._take_in(expired)
        self._record(commands)
        return _batch_in(commands)

    async def replay(self, replay: Replay) -> Recovered:
        for tickets, groups in replay.batches:
            start = self._scheduler.replay(tickets, groups)
            self._record([start])
            await self._train_next(start)
        return self._recovered()

    async def _train_next(self, start: StartBatch) -> None:
        """Train a batch whose step the journal does not record, and record it."""
        step = await self._train(start)
        event = events.StepTrained(step.version, hold=True, skipped=bool(step.skipped))
        self._writer.hear(event)
        self._record(self._take_in_step(start, step, event))
        await self._writer.flush()

    def _take_in_step(
        self, start: StartBatch, step: StepResult | None, event: events.StepTrained
    ) -> list[Command]:
        commands = self._take_in(event)
        journal, version = self._stored.journal, start.version + 1
        digest = journal.digests.get(version, "") if step is None else self._notes[-1].digest
        self._on_repeated(start, step or journal.measured.get(version), event.divergence, digest)
        return commands

    def _take_in(self, event: events.Input, outcome: Outcome | None = None) -> list[Command]:
        apply(self._scheduler, event, outcome)
        commands = self._scheduler.commands()
        self._retired += (each for each in commands if isinstance(each, events.RetiredTicket))
        return commands

    def _record(self, commands: Iterable[Command]) -> None:
        for decision in decisions(commands):
            self._writer.hear(decision)

    async def _train(self, start: StartBatch) -> StepResult:
        """Train a batch. No await follows the comparison: new trainers must find the batch recorded."""

        async def train() -> tuple[StepResult, WeightsNote]:
            step = await self._trainers.step(self._state.incarnation, start.version, refs_of(start.groups))
            await self._trainers.end(start.version, self._scheduler.evaluation.needed_versions)
            return step, await self._trainers.published(step.version)

        step, note = await self._trainers.until_done(train)
        self._notes.append(note)
        self._trained += 1
        self._compare(note)
        log.info("step repeated", version=note.version)
        return step

    def _compare(self, note: WeightsNote) -> None:
        """Compare the digest of a version with the recorded one, or record it."""
        recorded = self._stored.journal.digests.get(note.version)
        if recorded is None:
            self._writer.hear(events.VersionPublished(self._state.incarnation, note.version, note.digest))
        elif recorded != note.digest:
            log.error("repetition differs", version=note.version, digest=note.digest, expected=recorded)
            self._differs = True

    def _recovered(self) -> Recovered:
        scheduler, stored, state = self._scheduler, self._stored, self._state
        version = scheduler.version
        incarnation = stored.incarnation_at(version, state.incarnation)
        is_exact, later = stored.is_exact and not self._differs, stored.later
        log_sequence = stored.fold.log_sequence
        if not is_exact:
            expired = f"sampled by weights of incarnation {state.incarnation}" if self._differs else ""
            incarnation = stored.next_incarnation if self._differs else incarnation
            log_sequence = max([log_sequence, *(sequence for sequence, _ in stored.outcomes)])
            scheduler.owned(scheduler.tickets.attempts_from)  # so that these outcomes start no batch
            for sequence, outcome in () if self._differs else later:
                self._record(self._take_in(outcome_read(sequence, outcome), outcome))
            scheduler.fit(expired)
            later = ()
            commands = scheduler.commands()
            self._retired += (each for each in commands if isinstance(each, events.RetiredTicket))
            self._record(commands)
            self._writer.events_after = self._writer.stored_to  # stored events do not lead to this state
        needed = scheduler.evaluation.needed_versions
        return Recovered(
            notes=(*(each for each in self._notes[:-1] if each.version in needed), self._notes[-1]),
            incarnation=incarnation,
            log_sequence=log_sequence,
            later=later,
            repeated=self._trained,
            is_exact=is_exact,
            retired=tuple(self._retired),
        )


def _fold(
    scheduler: Scheduler, heard_events: Iterable[Heard], outcomes: Mapping[int, Outcome], state: KernelState
) -> Fold:
    """Let a scheduler take in the journal's events, without training. Stop at another incarnation, and where
    an event does not start the recorded batch. Skip an event whose outcome is missing, or stop there if the
    event started a batch."""
    fold = Fold(state.events_after, state.log_sequence, version=state.version)
    expected = state.incarnation, state.values
    for heard in heard_events:
        event = heard.event
        if isinstance(event, events.RunOwned) and (event.incarnation, event.values) != expected:
            fold.is_whole, fold.is_left = False, True
            break
        outcome = outcomes.get(event.sequence) if isinstance(event, events.OutcomeRead) else None
        if isinstance(event, events.OutcomeRead) and outcome is None:
            fold.is_whole = False
            if heard.batch is None:
                continue
            break
        if isinstance(event, events.StepTrained) and not scheduler.training:
            fold.is_whole = False
            break
        apply(scheduler, event, outcome)
        start = _batch_in(scheduler.commands())
        if (start and refs_of(start.groups)) != (heard.batch and heard.batch.rows):
            fold.is_whole = False
            break
        fold.version = scheduler.version + scheduler.training
        fold.position = heard.sequence
        fold.inputs.append((event, outcome))
        if isinstance(event, events.OutcomeRead):
            fold.log_sequence = event.sequence
    fold.end = scheduler.snapshot()
    return fold


def _batch_in(commands: Iterable[Command]) -> StartBatch | None:
    return next((each for each in commands if isinstance(each, StartBatch)), None)


async def _outcomes(bus: Bus, names: Subjects, after: int, *, samples: bool) -> list[tuple[int, Outcome]]:
    last = await bus.store.last_sequence(names.log_stream, names.groups)
    outcomes: list[tuple[int, Outcome]] = []
    if last > after:
        async for sequence, outcome in follow_outcomes(bus, names, start=after + 1, samples=samples):
            outcomes.append((sequence, outcome))
            if sequence >= last:
                break
    return outcomes


async def _gone(bus: Bus, names: Subjects, extent: Extent, sequences: set[int]) -> set[int]:
    """Return the sequence numbers whose message, or a part of it, is no longer in the log."""
    gone = {sequence for sequence in sequences if sequence not in extent}
    if extent.missing:  # a message without a gap before it has all its parts
        for sequence in sequences - gone:
            if not await bus.store.holds(names.log_stream, sequence):
                gone.add(sequence)
    return gone


async def _read_journal(bus: Bus, names: Subjects, state: KernelState) -> Journal:
    """Read the journal after the checkpoint. After a missing message, add no more events to `heard`."""
    journal, after, stream = Journal(), state.events_after, names.journal_stream
    last = await bus.store.last_sequence(stream, names.events)
    journal.is_damaged = await _lacks(bus, names, state)
    former_digest = None if state.journal.sequence > after else state.journal.digest
    if last <= after:
        return journal
    async for sequence, batch in bus.store.follow(stream, names.events, events.EventBatch, start=after + 1):
        journal.is_damaged |= former_digest not in (None, batch.former)
        former_digest = batch.digest
        journal.heard_at = batch.times[-1]
        for event in _events_of(batch, sequence):
            _add(journal, sequence, event, state.incarnation)
        if sequence >= last:
            break
    return journal


async def _lacks(bus: Bus, names: Subjects, state: KernelState) -> bool:
    """Return whether the journal lacks the checkpoint's newest message, or ends before the checkpoint."""
    if (await bus.store.end(names.journal_stream)).sequence < state.events_after:
        return True
    if not state.journal.sequence:
        return False
    try:
        newest = await bus.store.read(names.journal_stream, state.journal.sequence, events.EventBatch)
    except (MessageGone, Malformed):
        return True
    return newest.digest != state.journal.digest


def _events_of(batch: events.EventBatch, sequence: int) -> list[events.Event]:
    try:
        return batch.decoded()
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"message {sequence} of the journal cannot be read ({error}): resume the run with the stretto "
            "that wrote it"
        ) from error


def _add(journal: Journal, sequence: int, event: events.Event, incarnation: int) -> None:
    match event:
        case events.RowsDrawn(version, draws):  # a new incarnation keeps the draws of the previous one
            journal.draws |= {ticket: RecordedDraw(version, row) for ticket, row in draws}
        case events.BatchStarted(version):
            if journal.incarnation in (None, incarnation):
                journal.started.add(version)
            if journal.heard and not journal.is_damaged:
                journal.heard[-1].batch = event
        case events.StepMeasured(version):
            journal.measured[version] = event
        case events.EvaluationEnded(result):
            if journal.incarnation in (None, incarnation):
                journal.results.append(result)
        case events.VersionPublished(published_in, version, digest):
            if published_in == incarnation:
                journal.digests.setdefault(version, digest)
        case _ if isinstance(event, events.Input):
            if isinstance(event, events.RunOwned):
                journal.incarnation = event.incarnation
            if not journal.is_damaged:
                journal.heard.append(Heard(sequence, event))
        case _:
            pass


def _with_other_values(snapshot: Snapshot, results: Iterable[events.Evaluation]) -> Snapshot:
    """Return the snapshot without its failure, and with only those evaluations due that have no result."""
    state = snapshot.evaluation
    all_results = [*state.results, *(each for each in results if each.version <= snapshot.version)]
    due = [each for each in state.needed_versions if each not in {result.version for result in all_results}]
    evaluation = msgspec.structs.replace(state, results=all_results, round=None, open=[], due=due)
    return msgspec.structs.replace(snapshot, failure="", evaluation=evaluation)


def _without(snapshot: Snapshot, lost: Set[Name]) -> Snapshot:
    """Return the snapshot with the tickets of lost groups unfinished, and the groups' samples missing."""
    tickets: list[OpenTicket] = []
    missing = snapshot.members.missing
    for ticket in snapshot.open:
        if ticket.done and _name(ticket.done) in lost:
            missing += samples_of(ticket.done)
            ticket = msgspec.structs.replace(ticket, done=None)
        tickets.append(ticket)
    members = msgspec.structs.replace(snapshot.members, missing=missing)
    return msgspec.structs.replace(snapshot, open=tickets, members=members)


def _name(outcome: Outcome) -> Name:
    return outcome.purpose, outcome.ticket, outcome.attempt


def _messages_of(group: GroupDone) -> set[int]:
    return {*(member.sequence for member in group.members), *group.images}
