"""What a run continues from when its store, its checkpoints or its metrics are damaged."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pytest

from fixture_types import OpenBus
from kernel_setup import make_setup
from patience import patience
from stretto.bus.client import Bus
from stretto.bus.messages.events import (
    Evaluation,
    EvaluationEnded,
    Event,
    EventBatch,
    Input,
    JournalHead,
    OutcomeRead,
    RunOwned,
    ScheduleStarted,
    StepTrained,
    VersionPublished,
)
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import (
    GroupDone,
    GroupFailed,
    Member,
    StoredImage,
    Ticket,
    TrajectoryBundle,
)
from stretto.bus.messages.training import RowRef
from stretto.bus.payloads import encode
from stretto.bus.server import Bootstrap, run_id
from stretto.dataset import Dataset
from stretto.errors import ConfigError, RunError
from stretto.kernel.calls.trainers import StepResult
from stretto.kernel.durable.changes import fingerprint_changes, is_complete
from stretto.kernel.durable.checkpoint import KernelState, LostData
from stretto.kernel.durable.journal import own_journal
from stretto.kernel.durable.recovery import Recovered, Repetition, Stored, read_store
from stretto.kernel.ending import Ending
from stretto.kernel.ownership import own_run
from stretto.kernel.schedule.commands import Issue, SchedulerSettings, StartBatch
from stretto.kernel.schedule.fold import apply, decisions
from stretto.kernel.schedule.outcomes import Outcome
from stretto.kernel.schedule.scheduler import Scheduler, Snapshot
from stretto.kernel.schedule.tickets import TicketQueue
from stretto.process.life import checkpoint_to_resume
from stretto.records.metrics_file import MetricsFile
from stretto.weights import WeightsNote

T = TypeVar("T")
Checkpoint = tuple[Path | None, KernelState]
FOLDER = Path("checkpoint")
"""Of every checkpoint here; nothing is read from it."""

SETTINGS = SchedulerSettings(steps=20, batch_size=2, max_staleness=1, rows=100)


class History:
    """A run of batches of two groups, as its kernel leaves it in journal and log. Tickets 2v and 2v + 1 are
    trained at version v, on tokens of version v - 1 (0 at version 0)."""

    def __init__(self, bus: Bus, names: Subjects) -> None:
        self.bus = bus
        self.names = names
        self.scheduler = Scheduler(SETTINGS)
        self.bundles: dict[int, int] = {}
        """Ticket -> sequence number of its bundle."""
        self.log_sequence = 0
        self.events = 0
        self.head = JournalHead(0, "")

    async def begin(self) -> None:
        """Make the streams, and start the run."""
        await self.make_streams()
        await self.hear(RunOwned(0, 0, 1, "", 0))
        await self.hear(ScheduleStarted())

    async def hear(self, event: Input, outcome: Outcome | None = None) -> None:
        """Append an event that the scheduler takes in, with what it decides."""
        apply(self.scheduler, event, outcome)
        await self.store(event, *decisions(self.scheduler.commands()))

    async def store(self, *events: Event) -> None:
        raw = tuple(msgspec.Raw(encode(event)) for event in events)
        batch = EventBatch(1, self.events, raw, (0.0,) * len(raw), self.head.digest)
        self.events += len(events)
        sequence = await self.bus.store.append(self.names.events, batch, id=f"event {self.events}")
        self.head = JournalHead(sequence, batch.digest)

    async def make_streams(self) -> None:
        names = self.names
        await self.bus.store.make_log(names.log_stream, [names.trajectories, names.groups])
        await self.bus.store.make_log(names.journal_stream, names.of_journal)

    async def finish(self, ticket: int, images: tuple[int, ...] = ()) -> None:
        oldest = max(0, ticket // 2 - 1)
        bundle = TrajectoryBundle(ticket, 1, ticket, ())
        sequence = await self.bus.store.append(self.names.trajectories, bundle, id=f"{ticket}/1/0")
        self.bundles[ticket] = sequence
        member = Member(f"{ticket}/1/0", sequence, 0, 9, 5, oldest, oldest, 1.0, {}, "stop")
        group = GroupDone("train", ticket, 1, "rollout-0", (member,), 1.0, images=images)
        self.log_sequence = await self.bus.store.append(self.names.groups, group, id=f"{ticket}/1/end")
        await self.hear(OutcomeRead(self.log_sequence), group)

    async def train(self) -> None:
        """Complete the step of the batch that has been started."""
        version = self.scheduler.version + 1
        await self.store(VersionPublished(0, version, f"digest {version}"))
        await self.hear(StepTrained(version, hold=False))

    async def run_to(self, version: int) -> None:
        for step in range(self.scheduler.version, version):
            for ticket in (2 * step, 2 * step + 1):
                if ticket not in self.bundles:
                    await self.finish(ticket)
            await self.train()

    async def checkpoint(self) -> Checkpoint:
        end = (await self.bus.store.end(self.names.journal_stream)).sequence
        data = msgspec.json.encode(self.scheduler.snapshot())
        snapshot = msgspec.json.decode(data, type=Snapshot)
        version = snapshot.version
        state = KernelState(version, 0, f"digest {version}", snapshot, self.log_sequence, 1, "", 1, 0, 0, 0.0)
        return FOLDER, msgspec.structs.replace(state, events_after=end, journal=self.head)


class Trainers:
    """Trainers whose digests depend on the version alone."""

    async def attempt(self, work: Callable[[], Awaitable[T]]) -> T:
        return await work()

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...]
    ) -> tuple[WeightsNote, ...]:
        return (*needed, WeightsNote(version, "", f"digest {version}"))

    async def step(self, incarnation: int, version: int, rows: tuple[RowRef, ...]) -> StepResult:
        return StepResult({}, [], version + 1, began=0.0)

    async def end(self, version: int, needed: tuple[int, ...]) -> None:
        pass

    async def published(self, version: int) -> WeightsNote:
        return WeightsNote(version, "", f"digest {version}")


@pytest.fixture
def beginning() -> Checkpoint:
    return None, KernelState.initial()


async def recovered(
    history: History, checkpoint: Checkpoint, *, reached: int = 0, values: int = 1
) -> tuple[Stored, Recovered, Scheduler]:
    """Recover like a kernel, and start the scheduler."""
    scheduler = Scheduler(SETTINGS)
    writer = await own_journal(history.bus, history.names, "here")
    stored = await read_store(
        history.bus,
        history.names,
        checkpoint,
        scheduler,
        values=values,
        samples=True,
        reached=reached,
        epoch=writer.epoch,
    )
    digests: dict[int, str] = {}

    def report(start: StartBatch, result: Any, divergence: float | None, digest: str) -> None:
        digests[start.version + 1] = digest

    repetition = Repetition(*(writer, scheduler, Trainers(), checkpoint, stored), on_repeated=report)
    await repetition.load()
    result = await repetition.fold()
    # Trainers that take the place of lost ones have to reach them.
    assert all(digest == f"digest {version}" for version, digest in digests.items())
    assert len(digests) >= result.repeated
    scheduler.owned(1000)
    for sequence, outcome in result.later:
        apply(scheduler, OutcomeRead(sequence), outcome)
    scheduler.commands()
    scheduler.start()
    assert_fits(scheduler)
    return stored, result, scheduler


def assert_fits(scheduler: Scheduler) -> None:
    """The ledger adds up, and every open ticket can be trained in time."""
    ledger = scheduler.ledger
    assert ledger.issued == (
        ledger.trained + ledger.filtered + ledger.expired + ledger.failed + ledger.in_flight
    )
    due = sorted(ticket.deadline for ticket in scheduler.snapshot().open)
    for count, deadline in enumerate(due, start=1):
        assert count <= (deadline + 1 - scheduler.version) * SETTINGS.batch_size


async def delete(history: History, *sequences: int) -> None:
    for sequence in sequences:
        await history.bus.store.delete(history.names.log_stream, sequence)


@asynccontextmanager
async def open_history(open_bus: OpenBus, names: Subjects) -> AsyncGenerator[History]:
    async with open_bus("kernel") as bus:
        history = History(bus, names)
        await history.begin()
        yield history


@asynccontextmanager
async def history_at(
    open_bus: OpenBus, names: Subjects, version: int
) -> AsyncGenerator[tuple[History, Checkpoint]]:
    async with open_history(open_bus, names) as history:
        await history.run_to(version)
        yield history, await history.checkpoint()


def issued(scheduler: Scheduler) -> set[int]:
    return {command.ticket.id for command in scheduler.commands() if isinstance(command, Issue)}


async def test_tickets_of_a_former_kernel_are_gone_before_a_worker_can_take_them(
    open_bus: OpenBus, names: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, ending, newest = (
        make_setup(tmp_path, "test-run", steps=1, samples={"keep": "none"}),
        Ending(),
        list[int](),
    )
    setup.resumed = None, KernelState.initial()
    async with open_bus("kernel") as bus:
        subject = names.ticket("eval")
        await bus.store.make_queue(names.tickets_stream, [names.ticket("train"), subject], redeliver_s=60)
        await bus.store.append(subject, Ticket(0, 1, "eval", 0, min_version=0, samples=1), id="eval-0/1")

        async def launch(workers: object, tasks: object) -> None:
            newest.append(await bus.store.last_sequence(names.tickets_stream, subject))
            ending.end("interrupted", "")

        monkeypatch.setattr(setup.fleet, "launch", launch)
        with anyio.fail_after(patience()):
            await own_run(setup, bus, ending)
    assert newest == [0]


async def test_tickets_of_a_kernel_that_has_replaced_this_one_stay(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with open_bus("kernel") as bus:
        subject = names.ticket("train")
        await bus.store.make_queue(names.tickets_stream, [subject, names.ticket("eval")], redeliver_s=60)
        former = await bus.store.append(subject, Ticket(0, 1, "train", 0, min_version=0, samples=1), id="0/1")
        later = await bus.store.append(subject, Ticket(1, 1, "train", 0, min_version=0, samples=1), id="1/1")
        await TicketQueue(bus, names, 1, samples=True).clear(former)
        extent = await bus.store.extent(names.tickets_stream)
        assert (former in extent, later in extent) == (False, True)


async def test_a_lost_log_costs_the_steps_since_the_checkpoint(open_bus: OpenBus, names: Subjects) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(2)
        await history.finish(4)  # finished before the checkpoint, trained after it
        checkpoint = await history.checkpoint()
        await history.run_to(4)
        await history.bus.store.purge(history.names.log_stream)
        stored, result, scheduler = await recovered(history, checkpoint, reached=4)
        assert (stored.lost, stored.lost_from) == (LostData(steps=2, groups=1), 2)
        assert (result.repeated, result.incarnation > 0) == (0, True)
        assert scheduler.version == 2
        assert 4 in issued(scheduler)


async def test_a_new_log_in_the_place_of_a_lost_one_is_not_taken_for_it(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(2)
        await history.finish(4)
        checkpoint = await history.checkpoint()
        await history.bus.store._jetstream.delete_stream(names.log_stream)  # pyright: ignore[reportPrivateUsage]
        await history.make_streams()
        lost = (await recovered(history, checkpoint, reached=2))[0]
        assert (lost.log_is_short, lost.lost) == (True, LostData(groups=1))
        await history.bus.store.purge(
            names.log_stream, below=checkpoint[1].log_sequence + 1
        )  # as the kernel does
        extent = await history.bus.store.extent(names.log_stream)
        assert extent.last == checkpoint[1].log_sequence
        sequence = await history.bus.store.append(
            names.trajectories, TrajectoryBundle(4, 1001, 4, ()), id="new"
        )
        assert sequence == checkpoint[1].log_sequence + 1
        again = (await recovered(history, checkpoint, reached=2))[0]
        assert (again.log_is_short, again.lost) == (False, LostData(groups=1))


async def test_groups_whose_data_is_gone_are_issued_again(open_bus: OpenBus, names: Subjects) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(2)
        await history.finish(4)
        checkpoint = await history.checkpoint()
        await history.finish(6)
        await history.finish(7)
        await delete(history, history.bundles[4], history.bundles[6])
        stored, result, scheduler = await recovered(history, checkpoint, reached=2)
        assert stored.lost == LostData(groups=2, messages=1)
        assert (result.repeated, result.incarnation) == (0, 0)
        assert [group.ticket for group in scheduler.tickets.done_groups] == [7]
        assert issued(scheduler) == {4, 5, 6}


async def test_a_group_whose_bundle_lacks_a_part_is_issued_again(open_bus: OpenBus, names: Subjects) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        part = history.log_sequence + 1
        whole = await history.bus.store.append(names.trajectories, StoredImage(b"x" * 3_000_000), id="parts")
        await history.finish(4)
        member = Member("5/1/0", whole, 0, 9, 5, 1, 1, 1.0, {}, "stop")
        group = GroupDone("train", 5, 1, "rollout-0", (member,), 1.0)
        await history.bus.store.append(names.groups, group, id="5/1/end")
        await delete(history, part)
        stored, _, scheduler = await recovered(history, checkpoint, reached=2)
        assert stored.lost == LostData(groups=1, messages=1)
        assert [group.ticket for group in scheduler.tickets.done_groups] == [4]


async def test_a_group_of_which_an_image_is_gone_is_issued_again(open_bus: OpenBus, names: Subjects) -> None:
    async with open_history(open_bus, names) as history:
        await history.bus.store.make_log(names.log_stream, names.of_log)
        await history.run_to(2)
        checkpoint = await history.checkpoint()
        for ticket in (4, 5):
            subject = names.image(f"{ticket:064}")
            whole = await history.bus.store.append(
                subject, StoredImage(b"x" * 3_000_000), id=f"image {ticket}"
            )
            newest = await history.bus.store.read_newest(names.log_stream, subject, StoredImage)
            assert len(newest.file) == 3_000_000
            await history.finish(ticket, images=(whole,))
            if ticket == 4:
                await delete(history, whole - 1)  # a part of it
        stored, _, scheduler = await recovered(history, checkpoint, reached=2)
        assert stored.lost == LostData(groups=1, messages=1)
        assert [group.ticket for group in scheduler.tickets.done_groups] == [5]


@pytest.mark.parametrize("newest_is_there", [True, False])
async def test_a_journal_without_its_end_costs_its_steps_and_what_they_sampled(
    open_bus: OpenBus, names: Subjects, newest_is_there: bool
) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.run_to(3)
        stream = history.names.journal_stream
        journal = await history.bus.store.end(stream)
        await history.run_to(5)
        await history.finish(10)  # tokens of version 4, which is lost
        end = (await history.bus.store.end(stream)).sequence
        for sequence in range(journal.sequence + 1, end + 1 - newest_is_there):
            await history.bus.store.delete(stream, sequence)
        stored, result, scheduler = await recovered(history, checkpoint, reached=5)
        # Only what follows a hole shows that messages were there.
        assert stored.lost == LostData(steps=2, groups=1, journals=int(newest_is_there))
        assert stored.lost_from == 3
        assert (result.repeated, result.incarnation > 0) == (1, True)
        assert scheduler.version == 3
        # Groups of the lost steps that weights up to version 3 have sampled are trained again.
        assert scheduler.training
        assert [group.ticket for group in scheduler.tickets.done_groups] == [8, 9]


async def test_a_journal_that_is_not_that_of_the_checkpoint_is_a_loss(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with history_at(open_bus, names, 2) as (history, (folder, state)):
        for sequence, digest in (
            (history.head.sequence, "of another message"),
            (history.head.sequence + 1, history.head.digest),
        ):
            other = msgspec.structs.replace(state, journal=JournalHead(sequence, digest))
            stored, result, _ = await recovered(history, (folder, other), reached=2)
            assert (stored.lost, stored.lost_from) == (LostData(journals=1), None)
            assert not result.is_exact


async def test_other_values_begin_with_the_checkpoint(open_bus: OpenBus, names: Subjects) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(2)
        await history.finish(4)
        folder, state = await history.checkpoint()
        snapshot = msgspec.structs.replace(state.snapshot, failure="why the run was to end")
        snapshot.evaluation.due = [2]
        state = msgspec.structs.replace(state, snapshot=snapshot)
        results = [Evaluation(version, 0.5, 1, 0) for version in (2, 3)]
        await history.store(*map(EvaluationEnded, results))
        await history.run_to(4)
        stored, result, scheduler = await recovered(history, (folder, state), reached=4, values=2)
        assert (stored.lost, stored.lost_from) == (LostData(steps=2), 2)
        assert (result.repeated, result.is_exact, result.incarnation > 0) == (0, False, True)
        assert (scheduler.version, scheduler.failure) == (2, "")
        assert scheduler.tickets.batch == {4, 5}
        assert (scheduler.evaluation.results, scheduler.evaluation.needed_versions) == (results[:1], ())


async def test_other_values_lose_nothing_where_no_batch_follows(open_bus: OpenBus, names: Subjects) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.finish(4)
        stored, result, scheduler = await recovered(history, checkpoint, reached=2, values=2)
        assert (stored.lost, stored.lost_from) == (LostData(), None)
        assert (result.is_exact, result.incarnation) == (False, 0)  # a checkpoint comes first
        assert [group.ticket for group in scheduler.tickets.done_groups] == [4]


async def test_other_values_begin_with_the_initial_model_if_there_was_no_checkpoint(
    open_bus: OpenBus, names: Subjects, beginning: Checkpoint
) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(3)
        stored, _, scheduler = await recovered(history, beginning, reached=3, values=2)
        assert (stored.lost.steps, stored.lost_from, scheduler.version) == (3, 0, 0)
        await history.bus.store.purge(names.journal_stream, below=8)  # as after a checkpoint
        with pytest.raises(ConfigError, match="nothing is left to continue from"):
            await recovered(history, beginning, reached=3, values=2)


async def test_an_outcome_that_the_log_has_lost_is_not_taken_for_another_one(
    open_bus: OpenBus, names: Subjects
) -> None:
    """The next kernel gives its number to another outcome, so a checkpoint has to come first."""
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.finish(4)
        await delete(history, history.log_sequence)
        stored, result, _ = await recovered(history, checkpoint, reached=2)
        assert (stored.fold.is_whole, result.is_exact) == (False, False)


async def test_weights_of_another_incarnation_that_follow_begin_a_new_one(
    open_bus: OpenBus, names: Subjects
) -> None:
    """The newest checkpoint is damaged, and an older one of another incarnation is taken."""
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.hear(RunOwned(41, 2, 1, "", 1000))
        stored, result, _ = await recovered(history, checkpoint, reached=2)
        assert (stored.lost.steps, stored.lost_from) == (0, 2)
        assert result.incarnation not in (0, 41)


async def test_what_failed_after_lost_steps_does_not_crowd_the_ledger(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.run_to(6)
        failure = GroupFailed("train", 11, 2, "rollout-0", "why")
        await history.bus.store.append(history.names.groups, failure, id="failed")
        await history.bus.store.purge(history.names.journal_stream)
        stored, _, scheduler = await recovered(history, checkpoint, reached=6)
        assert stored.lost.steps == 4
        assert scheduler.ledger.issued == 8
        assert scheduler.ledger.failed == 0


async def test_an_incarnation_number_is_never_used_twice(open_bus: OpenBus, names: Subjects) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.run_to(4)
        await history.bus.store.purge(history.names.log_stream)
        numbers = [(await recovered(history, checkpoint, reached=4))[1].incarnation for _ in range(3)]
        assert 0 < numbers[0] < numbers[1] < numbers[2]
        folder, state = checkpoint
        later = folder, msgspec.structs.replace(state, incarnation=99)  # the stream may have been lost
        assert (await recovered(history, later, reached=4))[0].next_incarnation == 100


async def test_another_batch_than_the_recorded_one_is_not_trained(open_bus: OpenBus, names: Subjects) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.finish(4)
        apply(history.scheduler, OutcomeRead(0), GroupFailed("train", 5, 1, "rollout-0", "is in no event"))
        await history.finish(6)
        await history.finish(7)
        stored, result, _ = await recovered(history, checkpoint, reached=2)
        assert (stored.fold.is_whole, result.is_exact) == (False, False)
        assert (stored.lost, stored.lost_from, result.repeated) == (LostData(), 2, 0)


async def test_what_follows_events_that_do_not_fit_is_not_continued(
    open_bus: OpenBus, names: Subjects
) -> None:
    """A filter that is not deterministic would do this: the step was trained, and these events start none."""
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.store(StepTrained(3, hold=False))
        stored, result, scheduler = await recovered(history, checkpoint, reached=2)
        assert (stored.lost, stored.lost_from, stored.fold.is_whole) == (LostData(), None, False)
        assert (result.is_exact, scheduler.version) == (False, 2)


async def test_a_batch_that_was_not_complete_is_no_lost_step(open_bus: OpenBus, names: Subjects) -> None:
    async with history_at(open_bus, names, 2) as (history, checkpoint):
        await history.finish(4)
        await history.finish(5)
        await delete(history, history.bundles[5])
        stored, result, scheduler = await recovered(history, checkpoint, reached=2)
        assert (stored.lost, stored.lost_from) == (LostData(groups=1, messages=1), 2)
        assert result.incarnation > 0  # the journal has another batch of this version in the previous one
        assert [group.ticket for group in scheduler.tickets.done_groups] == [4]


async def test_without_a_checkpoint_the_first_steps_must_be_there(
    open_bus: OpenBus, names: Subjects, beginning: Checkpoint
) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(3)
        stored, result, _ = await recovered(history, beginning, reached=3)
        assert (stored.lost, result.repeated) == (LostData(), 3)
        await history.bus.store.purge(history.names.log_stream, below=history.bundles[3])
        with pytest.raises(ConfigError, match=r"was at version 3, but it has no intact checkpoint.*put back"):
            await recovered(history, beginning, reached=3)


async def test_without_a_checkpoint_steps_after_the_first_may_be_lost(
    open_bus: OpenBus, names: Subjects, beginning: Checkpoint
) -> None:
    async with open_history(open_bus, names) as history:
        await history.run_to(3)
        await delete(history, history.bundles[3])
        stored, result, scheduler = await recovered(history, beginning, reached=3)
        assert (stored.lost, stored.lost_from) == (LostData(steps=2, groups=1, messages=1), 1)
        assert (result.repeated, scheduler.version) == (1, 1)


async def test_a_journal_without_its_beginning_is_none_without_a_checkpoint(
    open_bus: OpenBus, names: Subjects, beginning: Checkpoint
) -> None:
    """All checkpoints are damaged. The store has lost what the oldest of them did not need."""
    async with open_history(open_bus, names) as history:
        await history.run_to(3)
        await history.bus.store.purge(names.journal_stream, below=8)
        with pytest.raises(ConfigError, match="nothing is left to continue from"):
            await recovered(history, beginning, reached=3)


async def test_a_run_that_has_lost_its_store_without_a_checkpoint_is_refused(
    open_bus: OpenBus, names: Subjects, beginning: Checkpoint
) -> None:
    async with open_history(open_bus, names) as history:
        with pytest.raises(ConfigError, match="was at version 5, but it has no intact checkpoint"):
            await recovered(history, beginning, reached=5)
        assert (await recovered(history, beginning, reached=0))[
            0
        ].lost == LostData()  # nothing was trained yet


# ------------------------------------------------------------------------------- files of the run


def test_a_resume_with_other_values_says_which_steps_are_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assembly = make_setup(tmp_path, "test-run", steps=9).assembly
    (assembly.folder / "config.yaml").write_text("steps: 9")
    (assembly.folder / "metrics.jsonl").write_text(line(1) + line(2))
    (assembly.folder / "config-1.yaml").write_text(
        "steps: 9"
    )  # the change was killed before it came into force
    checkpoint_to_resume(assembly)
    assert capsys.readouterr().out == ""
    (assembly.folder / "config-1.yaml").write_text("steps: 8")
    checkpoint_to_resume(assembly)
    said = "other values begin with the initial model: steps 1 to 2 are trained again\n"
    assert capsys.readouterr().out == said


def line(step: int) -> str:
    return json.dumps({"step": step, "ledger": {}}) + "\n"


def test_metrics_are_never_shortened_without_a_copy(tmp_path: Path) -> None:
    file, cut = tmp_path / "metrics.jsonl", tmp_path / "metrics.cut.jsonl"
    metrics = MetricsFile(tmp_path)
    metrics.cut_after(0)
    assert not file.exists()
    for step in (1, 2, 3):
        metrics.append({"step": step, "ledger": {}})
    metrics.cut_after(3)
    assert not cut.exists()
    metrics.cut_after(1)
    assert (file.read_text(), cut.read_text()) == (line(1), line(2) + line(3))
    metrics.append({"step": 2, "ledger": {}})
    metrics.cut_after(0)
    assert (file.read_text(), cut.read_text()) == ("", line(2) + line(3) + line(1) + line(2))


@pytest.mark.parametrize("last", ['{"step": 3', '{"step": 3}', "[]\n", "\xff\n"])
def test_a_broken_last_line_of_metrics_goes_aside(tmp_path: Path, last: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes((line(1) + line(2) + last).encode("latin1"))
    metrics = MetricsFile(tmp_path)
    assert [each["step"] for each in metrics.read()] == [1, 2]
    metrics.cut_after(2)
    assert file.read_text() == line(1) + line(2)
    assert (tmp_path / "metrics.cut.jsonl").read_bytes() == f"{last.rstrip()}\n".encode("latin1")


@pytest.mark.parametrize("garbled", ['{"step": 3', '{"step": "3"}', "[]", "7", "\x00\x00"])
def test_a_broken_line_among_the_metrics_is_named(tmp_path: Path, garbled: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + garbled + "\n" + line(2))
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not .*mend the line or move it"):
        MetricsFile(tmp_path).read()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not "):
        MetricsFile(tmp_path).cut_after(0)
    assert file.read_bytes() == before


def test_metrics_that_cannot_be_written_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: .*No space left"):
        MetricsFile(tmp_path).append({"step": 1})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": "completed"}'])
def test_a_damaged_summary_does_not_stop_a_resume(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert not is_complete(tmp_path, 1)


@pytest.mark.parametrize("damage", ["", "{", '{"url": "x"}'])
def test_the_runs_id_is_found_again_when_a_file_of_the_bus_is_empty(tmp_path: Path, damage: str) -> None:
    assert run_id(tmp_path) == ""
    (tmp_path / "store" / "jetstream" / "store" / "streams" / "LOG_mine-1").mkdir(parents=True)
    assert run_id(tmp_path) == "mine-1"
    other = Bootstrap(url="nats://127.0.0.1:1", run="mine-2", role="trainer")
    (tmp_path / "kernel.json").write_text(damage)
    (tmp_path / "trainer.json").write_bytes(msgspec.json.encode(other))
    assert run_id(tmp_path) == "mine-2"


class Rows:
    """A dataset without rows."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError(index)


def test_changed_rows_are_noticed_until_they_are_accepted(tmp_path: Path) -> None:
    def changes(*, accept: bool = False, **fingerprints: str) -> dict[str, tuple[str, str]]:
        datasets: dict[str, Dataset] = {name: Rows(each) for name, each in fingerprints.items()}
        return fingerprint_changes(tmp_path, datasets, accept=accept)

    assert changes(dataset="a") == {}
    assert changes(dataset="a", evaluation="x") == {}
    for _ in range(2):
        assert changes(dataset="b", evaluation="x") == {"dataset": ("a", "b")}
    assert changes(evaluation="x") == {}
    assert changes(dataset="b", accept=True) == {"dataset": ("a", "b")}
    assert changes(dataset="b", evaluation="x") == {}
    (tmp_path / "fingerprints.json").write_text("{")
    with pytest.raises(ConfigError, match=r"fingerprints\.json: .*remove the file"):
        changes(dataset="b")
