"""The journal as files: what is written, what readers make of it, and what follows from it."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from bus_testing import until
from fixture_types import OpenBus, Start
from full_disk import no_file_larger_than
from kernel_setup import make_setup
from patience import patience
from stretto.bus.connection import open_once
from stretto.bus.messages.events import Event, EventBatch, RunEnded, StepMeasured, VersionPublished
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.cli.audit.recording import read_recording
from stretto.kernel.durable.journal import JournalWriter, newest_epoch, own_journal
from stretto.observe.advice import Adviser
from stretto.observe.event_log import EventLog
from stretto.observe.report import Report
from stretto.records.events.files import FOLDER, file_name, move_lost, newest_stored, record_of, stored_events
from worlds import in_both_worlds, in_simulation


def write(folder: Path, epoch: int, *sequences: int, cut: int = 0) -> Path:
    """A kernel's file with messages that say their epoch and number; without its last bytes."""
    file = folder / FOLDER / file_name(epoch, sequences[0])
    file.parent.mkdir(exist_ok=True)
    content = b"".join(record_of(each, f"{epoch}: {each}".encode()) for each in sequences)
    file.write_bytes(content[: len(content) - cut])
    return file


def read(folder: Path) -> list[tuple[int, str | None]]:
    return [(number, None if text is None else text.decode()) for number, text in stored_events(folder)]


def test_files_of_several_kernels_are_one_list_without_what_a_successor_has_copied(tmp_path: Path) -> None:
    assert (read(tmp_path), newest_stored(tmp_path, below=99)) == ([], 0)
    write(tmp_path, 1, 2, 3, 4, cut=1)  # the kernel was killed while it wrote the third
    write(tmp_path, 5, 3, 4, 6)
    write(tmp_path, 5, 9)
    assert read(tmp_path) == [(2, "1: 2"), (3, "1: 3"), (4, "5: 4"), (6, "5: 6"), (9, "5: 9")]
    assert newest_stored(tmp_path, below=99) == 9


def test_what_a_store_has_lost_counts_no_more(tmp_path: Path) -> None:
    """The power failed: the files had more than the store. The next lease has a lost number."""
    write(tmp_path, 1, 2, 3, 4, 5)
    write(tmp_path, 4, 6)
    assert read(tmp_path) == [(2, "1: 2"), (3, "1: 3"), (6, "4: 6")]
    assert newest_stored(tmp_path, below=4) == 3


def test_the_files_of_another_store_go_aside(tmp_path: Path) -> None:
    older, lost = write(tmp_path, 1, 2), write(tmp_path, 3, 4)
    assert move_lost(tmp_path, 4, "a store") is None
    assert move_lost(tmp_path, 3, "a store") == tmp_path / "events.lost-1"  # a copy of the store came back
    assert (older.exists(), lost.exists()) == (True, False)
    assert move_lost(tmp_path, 4, "another store") == tmp_path / "events.lost-2"
    assert not older.exists()
    assert newest_stored(tmp_path, below=99) == 0


def test_a_damaged_end_is_written_again_and_foreign_files_are_no_events(tmp_path: Path) -> None:
    file = write(tmp_path, 1, 2, 3, 4)
    content = bytearray(file.read_bytes())
    content[37] ^= 1  # in the message 3: heads have 16 bytes, messages 4
    file.write_bytes(content)
    for name in ("1.bak-2.events", "000000000001-000000000002.events.bak", "0-1.events"):
        (tmp_path / FOLDER / name).write_bytes(b"of somebody else")
    assert read(tmp_path) == [(2, "1: 2"), (3, None), (4, "1: 4")]
    assert newest_stored(tmp_path, below=99) == 2
    write(tmp_path, 5, 3, 4, 6)  # the next kernel copies it from the store
    assert read(tmp_path) == [(2, "1: 2"), (3, "5: 3"), (4, "1: 4"), (6, "5: 6")]


@pytest.mark.parametrize("place", range(0, 40, 3))
def test_a_flipped_bit_is_seen(tmp_path: Path, place: int) -> None:
    file = write(tmp_path, 1, 2, 3)
    whole, content = read(tmp_path), bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert read(tmp_path) != whole


# ------------------------------------------------------------------------------------- the writer


async def store(writer: JournalWriter, *versions: int) -> None:
    for version in versions:
        writer.hear(VersionPublished(0, version, "digest"))
        await writer.flush()


async def test_what_a_former_kernel_did_not_write_and_a_full_disk_held_up_is_written(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    facts = make_setup(tmp_path, steps=1).facts
    async with open_bus("kernel") as bus, anyio.create_task_group() as tasks:
        await store(await own_journal(bus, names, "0"), 1, 2)  # and it was killed
        writer, events = await own_journal(bus, names, "0"), EventLog(tmp_path, facts)
        writer.on_stored = lambda sequence, message, _: events.append(sequence, message)
        await store(writer, 3)
        tasks.start_soon(events.keep, bus, names)
        await until(lambda: versions(tmp_path) == [1, 2, 3])
        with capture_logs(), no_file_larger_than(10):
            await store(writer, 4, 5)
        assert versions(tmp_path) == [1, 2, 3]
        await store(writer, 6)
        await events.complete(bus, names, facts.ending)
        assert versions(tmp_path) == [1, 2, 3, 4, 5, 6]
        assert facts.events_on_disk == writer.head.sequence == newest_stored(tmp_path, below=99)
        events.close()
        tasks.cancel_scope.cancel()
    assert facts.problems == []
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


async def test_a_message_that_is_read_back_before_its_acknowledgement_is_written_once(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    facts = make_setup(tmp_path, steps=1).facts
    async with open_bus("kernel") as bus:
        writer, events = await own_journal(bus, names, "0"), EventLog(tmp_path, facts)
        acknowledged: list[tuple[int, EventBatch]] = []
        writer.on_stored = lambda sequence, message, _: acknowledged.append((sequence, message))
        await store(writer, 1, 2)
        events.append(*acknowledged[0])
        await events.complete(bus, names, facts.ending)  # reads both
        events.append(*acknowledged[1])
        await store(writer, 3)
        events.append(*acknowledged[2])
        events.close()
    assert versions(tmp_path) == [1, 2, 3]


async def test_a_message_in_parts_is_kept_with_its_parts(open_bus: OpenBus, names: Subjects) -> None:
    """What a checkpoint needs begins with the first part of the newest message."""
    async with open_bus("kernel") as bus:
        writer = await own_journal(bus, names, "0")
        await store(writer, 1)
        assert writer.head_from == writer.head.sequence
        writer.hear(RunEnded("failed", "x" * 2**24))
        await writer.flush()
        assert writer.head_from < writer.head.sequence
        await bus.store.purge(names.journal_stream, below=writer.head_from)
        assert await bus.store.holds(names.journal_stream, writer.head.sequence)


async def test_the_newest_lease_is_known_when_its_message_is_gone(open_bus: OpenBus, names: Subjects) -> None:
    async with open_bus("kernel") as bus:
        former, writer = await own_journal(bus, names, "0"), await own_journal(bus, names, "0")
        assert await newest_epoch(bus, names) == writer.epoch > former.epoch
        await store(writer, 1)
        await bus.store.purge(names.journal_stream, below=writer.head_from)
        assert await newest_epoch(bus, names) == writer.epoch


async def test_a_disk_that_stays_full_is_a_problem_of_the_summary(
    open_bus: OpenBus, names: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.observe.event_log._COMPLETE_S", 0.5)
    facts = make_setup(tmp_path, steps=1).facts
    async with open_bus("kernel") as bus:
        writer, events = await own_journal(bus, names, "0"), EventLog(tmp_path, facts)
        writer.on_stored = lambda sequence, message, _: events.append(sequence, message)
        await store(writer, 1)
        with capture_logs(), no_file_larger_than(10):
            await events.complete(bus, names, facts.ending)
        events.close()
    [problem] = facts.problems
    assert problem.startswith("the files in events end before the run does (")
    assert facts.events_on_disk == 0


def versions(folder: Path) -> list[int]:
    """The versions in the files, which name nothing else."""
    return [event.version for _, event in events_of(folder) if isinstance(event, VersionPublished)]


# ------------------------------------------------------------------------------- what follows from it


def events_of(folder: Path) -> list[tuple[float, Event]]:
    batches = [msgspec.msgpack.decode(data or b"", type=EventBatch) for _, data in stored_events(folder)]
    return list(chain.from_iterable(zip(each.times, each.decoded(), strict=True) for each in batches))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@in_simulation
def test_the_server_keeps_only_what_a_resume_may_need(start: Start) -> None:
    frequent = ("checkpoint.every=10", "checkpoint.keep=1", "training.seconds_per_step=0.5")
    run = start("steps=40", *frequent)
    run.assert_completed(40)
    first, last = run.call(span_of_journal, run.folder)
    numbers = [number for number, _ in stored_events(run.folder)]
    assert numbers[0] == 2  # the first one is the lease
    assert 100 < first <= numbers[-1] <= last
    resumed = start("steps=42", resume=run)
    resumed.assert_completed(42)
    assert [number for number, _ in stored_events(run.folder)][: len(numbers)] == numbers


async def span_of_journal(folder: Path) -> tuple[int, int]:
    bootstrap = Bootstrap.read(folder / "bus" / "kernel.json")
    client = await open_once(bootstrap, bootstrap.url, patience())
    state = (await client.jetstream().stream_info(Subjects(bootstrap.run).journal_stream)).state
    await client.close()
    return state.first_seq, state.last_seq


@pytest.mark.slow
def test_a_completed_run_is_audited_without_its_store(start: Start) -> None:
    run = start("steps=4", "samples.keep=all")
    run.assert_completed(4)
    recording = read_recording(run.folder)
    shutil.rmtree(run.folder / "bus" / "store")
    run.assert_audit_is_clean()
    checks = {check.name: check for check in run.audit().checks}
    assert checks["journal unaltered"].checked.startswith(f"{len(list(stored_events(run.folder)))} messages")
    assert checks["trained samples"].checked.startswith("versions 0-3")
    assert read_recording(run.folder) == recording


@in_both_worlds
def test_figures_follow_from_the_files(start: Start, tmp_path: Path) -> None:
    evaluation = f"evaluation={{dataset: {{use: jsonl, path: {tmp_path}/rows.jsonl}}, every: 3, rows: 4}}"
    run = start("steps=6", evaluation)
    run.assert_completed(6)
    assert run.summary()["journal"]["sequence"] == newest_stored(run.folder, below=2**63)
    again = tmp_path / "again"
    again.mkdir()
    setup = make_setup(again, steps=6)
    report = Report(setup, Adviser(setup.composed.document))
    events = events_of(run.folder)
    for time, event in events:
        report.add(time, event)
    assert lines_of(again) == lines_of(run.folder)
    time, newest = next(each for each in reversed(events) if isinstance(each[1], StepMeasured))
    report.add(time, msgspec.structs.replace(newest, skipped=("", "critic/")))
    said = "step 6: the gradient of the lead model and critic was not finite, and changed nothing"
    assert setup.facts.problems == [said]


@in_simulation
def test_a_repeated_step_has_its_own_time(start: Start) -> None:
    run = start("steps=12", "checkpoint.every=4")
    run.until_step(7)
    run.kill("trainer-0")
    resumed = start(resume=run)
    resumed.assert_completed(12)
    cut = [json.loads(line) for line in (run.folder / "metrics.cut.jsonl").read_text().splitlines()]
    first = next(line for line in cut if line["step"] == 6)  # before step 5 the new trainer starts
    repeated = next(line for line in resumed.metrics() if line["step"] == 6)
    assert repeated["time_s"] < first["time_s"] + 5
    assert repeated["step_s"] < 1 < repeated["time_s"]
