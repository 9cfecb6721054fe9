"""What a run continues from when its store, its checkpoints or its metrics are damaged."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import anyio
import msgspec
import pytest

from fixture_types import OpenBus
from kernel_setup import make_setup
from patience import patience
from stretto.bus.client import Bus
from stretto.bus.messages.base import Message
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
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Member, StoredImage, Ticket, TrajectoryBundle
from stretto.bus.messages.training import RowRef
from stretto.bus.payloads import encode
from stretto.bus.server import Bootstrap, run_id
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
from stretto.records.metrics_file import MetricsFile
from stretto.runs.life import checkpoint_to_resume
from stretto.weights import WeightsNote

T = TypeVar("T")
FOLDER = Path("checkpoint")
"""Of every checkpoint here; nothing is read from it."""

SETTINGS = SchedulerSettings(steps=20, batch_size=2, max_staleness=1, rows=100)


class History:
    """A run of batches of two groups, as its kernel leaves it in journal and log. Tickets 2v and 2v + 1 are
    trained at version v, on tokens of version v - 1 (0 at version 0)."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.names = Subjects("test-run")
        self.scheduler = Scheduler(SETTINGS)
        self.bundles: dict[int, int] = {}
        """Ticket -> sequence number of its bundle."""
        self.log_sequence = 0
        self.events = 0
        self.head = JournalHead(0, "")
        self.newest: tuple[Path | None, KernelState] = None, KernelState.initial()
        """The newest checkpoint."""
        self.values, self.reported = 1, 0

    async def tell(self, story: str) -> None:
        """Do what a story says, such as `run_to 2; finish 4 5; checkpoint`: each word is a method."""
        for sentence in filter(None, story.split("; ")):
            name, *numbers = sentence.split()
            await getattr(self, name)(*map(int, numbers))

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
        await self.bus.store.make_log(self.names.log_stream, self.names.of_log)
        await self.bus.store.make_log(self.names.journal_stream, self.names.of_journal)

    async def log(self, message: Message, subject: str, id: str) -> int:
        return await self.bus.store.append(subject, message, id=id)

    async def finish(self, *tickets: int, data: int | None = None, images: tuple[int, ...] = ()) -> None:
        for ticket in tickets:
            bundle = TrajectoryBundle(ticket, 1, ticket, ())
            sequence = data or await self.log(bundle, self.names.trajectories, f"{ticket}/1/0")
            self.bundles[ticket] = sequence
            oldest = max(0, ticket // 2 - 1)
            member = Member(f"{ticket}/1/0", sequence, 0, 9, 5, oldest, oldest, 1.0, {}, "stop")
            group = GroupDone("train", ticket, 1, "rollout-0", (member,), 1.0, images=images)
            self.log_sequence = await self.log(group, self.names.groups, f"{ticket}/1/end")
            await self.hear(OutcomeRead(self.log_sequence), group)

    async def run_to(self, version: int) -> None:
        for step in range(self.scheduler.version, version):
            await self.finish(*(each for each in (2 * step, 2 * step + 1) if each not in self.bundles))
            await self.store(VersionPublished(0, step + 1, f"digest {step + 1}"))
            await self.hear(StepTrained(step + 1, hold=False))

    async def checkpoint(self) -> None:
        end = (await self.bus.store.end(self.names.journal_stream)).sequence
        data = msgspec.json.encode(self.scheduler.snapshot())
        snapshot = msgspec.json.decode(data, type=Snapshot)
        version = snapshot.version
        state = KernelState(version, 0, f"digest {version}", snapshot, self.log_sequence, 1, "", 1, 0, 0, 0.0)
        self.newest = FOLDER, msgspec.structs.replace(state, events_after=end, journal=self.head)

    def change(self, **changes: Any) -> None:
        self.newest = self.newest[0], msgspec.structs.replace(self.newest[1], **changes)

    # ---- what may happen to the run

    async def change_values(self) -> None:
        self.values = 2

    async def report(self, version: int) -> None:
        self.reported = version

    async def delete(self, sequence: int) -> None:
        await self.bus.store.delete(self.names.log_stream, sequence)

    async def lose(self, ticket: int) -> None:
        await self.delete(self.bundles[ticket])

    async def lose_outcome(self) -> None:
        await self.delete(self.log_sequence)

    async def lose_part(self, ticket: int) -> None:
        """A bundle of several messages lacks one."""
        whole = await self.log(StoredImage(b"x" * 3_000_000), self.names.trajectories, "parts")
        await self.finish(ticket, data=whole)
        await self.delete(whole - 1)

    async def finish_with_image(self, ticket: int) -> int:
        subject = self.names.image(f"{ticket:064}")
        whole = await self.log(StoredImage(b"x" * 3_000_000), subject, f"image {ticket}")
        newest = await self.bus.store.read_newest(self.names.log_stream, subject, StoredImage)
        assert len(newest.file) == 3_000_000
        await self.finish(ticket, images=(whole,))
        return whole

    async def lose_image(self, ticket: int) -> None:
        await self.delete(await self.finish_with_image(ticket) - 1)  # a part of it

    async def purge_log(self, below: int | None = None) -> None:
        await self.bus.store.purge(self.names.log_stream, below=below)

    async def purge_journal(self, below: int | None = None) -> None:
        await self.bus.store.purge(self.names.journal_stream, below=below)

    async def cut_journal(self, version: int, left: int) -> None:
        """Lose the events after a version, but the last `left` messages."""
        stream = self.names.journal_stream
        await self.run_to(version)
        first = (await self.bus.store.end(stream)).sequence + 1
        await self.tell("run_to 5; finish 10")  # 10 has tokens of version 4, which is lost
        end = (await self.bus.store.end(stream)).sequence
        for sequence in range(first, end + 1 - left):
            await self.bus.store.delete(stream, sequence)

    async def begin_incarnation(self, number: int) -> None:
        await self.hear(RunOwned(number, 2, 1, "", 1000))

    async def fail_unheard(self, ticket: int, attempt: int) -> None:
        """A failure is in the log, and in no event."""
        await self.log(GroupFailed("train", ticket, attempt, "rollout-0", "why"), self.names.groups, "failed")

    async def fail_unlogged(self, ticket: int) -> None:
        """The scheduler takes in a failure that is in no event."""
        apply(self.scheduler, OutcomeRead(0), GroupFailed("train", ticket, 1, "rollout-0", "is in no event"))

    async def train_unstarted(self, version: int) -> None:
        """A step follows that no event starts, as with a filter that is not deterministic."""
        await self.store(StepTrained(version, hold=False))


class Trainers:
    """Trainers whose digests depend on the version alone."""

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
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


async def recovered(history: History) -> tuple[Stored, Recovered, Scheduler]:
    """Recover like a kernel, and start the scheduler."""
    scheduler, bus, names = Scheduler(SETTINGS), history.bus, history.names
    writer = await own_journal(bus, names, "here")
    reached = max(history.scheduler.version, history.reported)
    options: Any = {"values": history.values, "samples": True, "reached": reached, "epoch": writer.epoch}
    stored = await read_store(bus, names, history.newest, scheduler, **options)
    digests: dict[int, str] = {}

    def report(start: StartBatch, result: Any, divergence: float | None, digest: str) -> None:
        digests[start.version + 1] = digest

    repetition = Repetition(writer, scheduler, cast(Any, Trainers()), *history.newest, stored, report)
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
    ledger = msgspec.to_builtins(scheduler.ledger)
    assert ledger.pop("issued") == sum(ledger.values())
    due = sorted(ticket.deadline for ticket in scheduler.snapshot().open)
    for count, deadline in enumerate(due, start=1):
        assert count <= (deadline + 1 - scheduler.version) * SETTINGS.batch_size


@asynccontextmanager
async def opened(open_bus: OpenBus) -> AsyncGenerator[History]:
    """A run that has started."""
    async with open_bus("kernel") as bus:
        history = History(bus)
        await history.make_streams()
        await history.hear(RunOwned(0, 0, 1, "", 0))
        await history.hear(ScheduleStarted())
        yield history


async def test_tickets_of_a_former_kernel_are_gone_before_a_worker_can_take_them(
    open_bus: OpenBus, names: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup(tmp_path, "test-run", steps=1, samples={"keep": "none"})
    ending, newest = Ending(), list[int]()
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


async def test_tickets_of_a_kernel_that_replaced_this_one_stay(open_bus: OpenBus, names: Subjects) -> None:
    async with open_bus("kernel") as bus:
        subject = names.ticket("train")
        await bus.store.make_queue(names.tickets_stream, [subject, names.ticket("eval")], redeliver_s=60)
        former = await bus.store.append(subject, Ticket(0, 1, "train", 0, min_version=0, samples=1), id="0/1")
        later = await bus.store.append(subject, Ticket(1, 1, "train", 0, min_version=0, samples=1), id="1/1")
        await TicketQueue(bus, names, 1, samples=True).clear(former)
        extent = await bus.store.extent(names.tickets_stream)
        assert (former in extent, later in extent) == (False, True)


class Found(NamedTuple):
    """What a run continues from, at the checkpoint of version 2 if nothing else is said."""

    lost: LostData = LostData()
    lost_from: int | None = None
    begins_incarnation: bool = False
    is_exact: bool = False
    """If not, a checkpoint comes first."""
    repeated: int = 0
    version: int = 2
    done: tuple[int, ...] = ()
    """Finished groups that wait for training."""


@pytest.mark.parametrize(
    ("story", "found"),
    [
        ("", Found(is_exact=True, version=0)),
        ("run_to 3", Found(is_exact=True, repeated=3, version=3)),
        # What the log has lost: the steps since the checkpoint, or groups, which are issued again.
        ("run_to 2; finish 4; checkpoint; run_to 4; purge_log", Found(LostData(2, 1), 2, True)),
        ("run_to 2; finish 4; checkpoint; finish 6 7; lose 4; lose 6", Found(LostData(0, 2, 1), done=(7,))),
        ("run_to 2; checkpoint; finish 4; lose_part 6", Found(LostData(0, 1, 1), done=(4,))),
        ("run_to 2; checkpoint; lose_image 4; finish_with_image 6", Found(LostData(0, 1, 1), done=(6,))),
        ("run_to 3; lose 3", Found(LostData(2, 1, 1), 1, True, repeated=1, version=1, done=(5,))),
        # A batch that was not complete is no lost step, but the journal has another one of this version.
        ("run_to 2; checkpoint; finish 4 5; lose 5", Found(LostData(0, 1, 1), 2, True, done=(4,))),
        # The next kernel gives the number of a lost outcome to another one.
        ("run_to 2; checkpoint; finish 4; lose_outcome", Found(LostData(0, 0, 1))),
        # What the journal has lost: steps, and what they sampled. Only what follows a hole shows that there
        # was more. Groups of the lost steps that weights up to version 3 have sampled are trained again.
        ("run_to 2; checkpoint; cut_journal 3 0", Found(LostData(2, 1), 3, True, False, 1, 3, (8, 9))),
        ("run_to 2; checkpoint; cut_journal 3 1", Found(LostData(2, 1, 0, 1), 3, True, False, 1, 3, (8, 9))),
        # Other values begin with the checkpoint or the initial model. They lose nothing if no batch follows.
        ("run_to 2; checkpoint; finish 4; change_values", Found(done=(4,))),
        ("run_to 3; change_values", Found(LostData(3, 2), 0, True, version=0)),
        # The newest checkpoint is damaged, and an older one of another incarnation is taken.
        ("run_to 2; checkpoint; begin_incarnation 41", Found(lost_from=2, begins_incarnation=True)),
        # Events that do not fit: another batch than the recorded one is not trained, nor what follows it.
        (
            "run_to 2; checkpoint; finish 4; fail_unlogged 5; finish 6 7",
            Found(LostData(), 2, True, done=(7,)),
        ),
        ("run_to 2; checkpoint; train_unstarted 3", Found()),
    ],
)
async def test_a_run_continues_from_what_is_left(open_bus: OpenBus, story: str, found: Found) -> None:
    async with opened(open_bus) as history:
        await history.tell(story)
        stored, result, scheduler = await recovered(history)
        done = tuple(group.ticket for group in scheduler.tickets.done_groups)
        begins = result.incarnation not in (0, 41)
        facts = (stored.lost, stored.lost_from, begins, result.is_exact, result.repeated)
        assert Found(*facts, scheduler.version, done) == found
        issued = {each.ticket.id for each in scheduler.commands() if isinstance(each, Issue)}
        assert issued == scheduler.tickets.open.keys() - {*done, *scheduler.tickets.batch}


@pytest.mark.parametrize(
    ("story", "message"),
    [
        ("run_to 3; purge_log 8", r"was at version 3, but it has no intact checkpoint.*put back"),
        ("run_to 3; purge_journal 8", "nothing is left to continue from"),  # a damaged checkpoint was there
        ("run_to 3; purge_journal 8; change_values", "nothing is left to continue from"),
        ("report 5", "was at version 5, but it has no intact checkpoint"),
    ],
)
async def test_without_a_checkpoint_the_first_steps_must_be_there(
    open_bus: OpenBus, story: str, message: str
) -> None:
    async with opened(open_bus) as history:
        await history.tell(story)
        with pytest.raises(ConfigError, match=message):
            await recovered(history)


async def test_a_new_log_in_the_place_of_a_lost_one_is_not_taken_for_it(open_bus: OpenBus) -> None:
    async with opened(open_bus) as history:
        store, names = history.bus.store, history.names
        await history.tell("run_to 2; finish 4; checkpoint")
        await store._jetstream.delete_stream(names.log_stream)  # pyright: ignore[reportPrivateUsage]
        await history.make_streams()
        lost = (await recovered(history))[0]
        assert (lost.log_is_short, lost.lost) == (True, LostData(groups=1))
        end = history.newest[1].log_sequence
        await history.purge_log(end + 1)  # as the kernel does
        assert (await store.extent(names.log_stream)).last == end
        assert await history.log(TrajectoryBundle(4, 1001, 4, ()), names.trajectories, "new") == end + 1
        again = (await recovered(history))[0]
        assert (again.log_is_short, again.lost) == (False, LostData(groups=1))


@pytest.mark.parametrize(("further", "digest"), [(0, "of another message"), (1, "")])
async def test_a_journal_that_is_not_that_of_the_checkpoint_is_a_loss(
    open_bus: OpenBus, further: int, digest: str
) -> None:
    async with opened(open_bus) as history:
        await history.tell("run_to 2; checkpoint")
        head = history.head
        history.change(journal=JournalHead(head.sequence + further, digest or head.digest))
        stored, result, _ = await recovered(history)
        assert (stored.lost, stored.lost_from, result.is_exact) == (LostData(journals=1), None, False)


async def test_other_values_begin_with_the_checkpoint(open_bus: OpenBus) -> None:
    async with opened(open_bus) as history:
        await history.tell("run_to 2; finish 4; checkpoint")
        snapshot = history.newest[1].snapshot
        snapshot.failure, snapshot.evaluation.due = "why the run was to end", [2]
        results = [Evaluation(version, 0.5, 1, 0) for version in (2, 3)]
        await history.store(*map(EvaluationEnded, results))
        await history.tell("run_to 4; change_values")
        stored, result, scheduler = await recovered(history)
        assert (stored.lost, stored.lost_from) == (LostData(steps=2), 2)
        assert (result.repeated, result.is_exact, result.incarnation > 0) == (0, False, True)
        assert (scheduler.version, scheduler.failure) == (2, "")
        assert scheduler.tickets.batch == {4, 5}
        assert (scheduler.evaluation.results, scheduler.evaluation.needed_versions) == (results[:1], ())


async def test_what_failed_after_lost_steps_does_not_crowd_the_ledger(open_bus: OpenBus) -> None:
    async with opened(open_bus) as history:
        await history.tell("run_to 2; checkpoint; run_to 6; fail_unheard 11 2; purge_journal")
        stored, _, scheduler = await recovered(history)
        assert (stored.lost.steps, scheduler.ledger.issued, scheduler.ledger.failed) == (4, 8, 0)


async def test_an_incarnation_number_is_never_used_twice(open_bus: OpenBus) -> None:
    async with opened(open_bus) as history:
        await history.tell("run_to 2; checkpoint; run_to 4; purge_log")
        numbers = [(await recovered(history))[1].incarnation for _ in range(3)]
        assert 0 < numbers[0] < numbers[1] < numbers[2]
        history.change(incarnation=99)  # the stream may have been lost
        assert (await recovered(history))[0].next_incarnation == 100


# ------------------------------------------------------------------------------- files of the run


def test_a_resume_with_other_values_says_which_steps_are_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assembly = make_setup(tmp_path, "test-run", steps=9).assembly
    (assembly.folder / "config.yaml").write_text("steps: 9")
    (assembly.folder / "metrics.jsonl").write_text(line(1) + line(2))
    former = assembly.folder / "config-1.yaml"
    former.write_text("steps: 9")  # the change was killed before it came into force
    checkpoint_to_resume(assembly)
    assert capsys.readouterr().out == ""
    former.write_text("steps: 8")
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


def test_changed_rows_are_noticed_until_they_are_accepted(tmp_path: Path) -> None:
    def changes(*, accept: bool = False, **fingerprints: str) -> dict[str, tuple[str, str]]:
        return fingerprint_changes(tmp_path, fingerprints, accept=accept)

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
