"""The sample writer as a process on a real bus: killed, it writes every trajectory once."""

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bus_testing import until
from fixture_types import OpenBus
from sample_messages import done, record, retired, trained, trajectories
from stretto.bus.client import Bus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import Follow, Following, Kept, StoredImage
from stretto.models.images import MAX_FILE_BYTES, ImageFile
from stretto.records.samples.store import SampleFilter, SampleStore


class Log:
    """A log to which a test appends groups, and the kernel's answers to the writer."""

    def __init__(self, bus: Bus, names: Subjects) -> None:
        self.bus = bus
        self.names = names
        self.kept_below = 0
        self.follows = 0

    async def open(self) -> None:
        await self.bus.store.make_log(self.names.log_stream, self.names.of_log)
        await self.bus.serve(self.names.kernel("samples", "follow"), Follow, self._follow)
        await self.bus.subscribe(self.names.kernel("samples", "kept"), Kept, self._take_in)

    async def _follow(self, message: Follow) -> Following:
        self.follows += 1
        last = (await self.bus.store.extent(self.names.log_stream)).last
        start = message.start if message.start <= last + 1 else 1
        consumer = await self.bus.store.make_consumer(
            self.names.log_stream, self.names.of_samples, start=start
        )
        return Following(consumer, start, last)

    def _take_in(self, message: Kept) -> None:
        self.kept_below = message.below

    async def group(self, ticket: int, version: int = 0, images: Mapping[str, bytes] | None = None) -> int:
        """Append a finished group with its images, and return the sequence number of its outcome."""
        bundle = trajectories(ticket, version=version, images=None if images is None else (0, *images))
        kept = record(ticket)
        sequence = await self.bus.store.append(self.names.trajectories, bundle, id=f"{ticket}/0")
        for name, file in (images or {}).items():
            await self.bus.store.append(self.names.image(name), StoredImage(file), id=f"{ticket}/{name}")
        await self.bus.store.append(self.names.records, kept, id=f"{ticket}/record")
        outcome = done(bundle, kept, sequence)
        return await self.bus.store.append(self.names.groups, outcome, id=f"{ticket}/end")

    async def trained(self, *tickets: int, version: int = 0) -> int:
        ids = [f"{ticket}/1/{index}" for ticket in tickets for index in (0, 1)]
        return await self.bus.store.append(self.names.trained, trained(ids, version), id=f"trained/{tickets}")


@asynccontextmanager
async def log_of(open_bus: OpenBus, names: Subjects) -> AsyncGenerator[Log]:
    async with open_bus("kernel") as bus:
        log = Log(bus, names)
        await log.open()
        yield log


@asynccontextmanager
async def writer(folder: Path, last: int = 0) -> AsyncGenerator[subprocess.Popen[bytes]]:
    (folder / "logs").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "stretto.records.samples", str(folder), str(last), "2", "0"]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None)
    assert process.returncode == 0


def named(*files: bytes) -> dict[str, bytes]:
    return {ImageFile(file).digest: file for file in files}


def images_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "samples" / "images").iterdir()}


def rows_of(folder: Path) -> list[str]:
    return [row["id"] for row in SampleStore(folder).find(limit=None)]


async def test_a_killed_writer_goes_on_and_doubles_nothing(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    async with log_of(open_bus, names) as log:
        done_at = [await log.group(ticket) for ticket in range(4)]
        await log.trained(1, 2)
        async with writer(tmp_path) as process:
            await until(lambda: log.kept_below == 1)  # ticket 0 holds the cursor
            await until(lambda: len(rows_of(tmp_path)) == 4)
            process.send_signal(signal.SIGKILL)
        await log.trained(0)
        await log.group(4)
        async with writer(tmp_path) as process:
            await until(lambda: log.follows == 2)
            await log.group(5)
            await log.bus.store.append(log.names.trained, trained(["5/1/0"], 0), id="t")
            await log.bus.store.append(log.names.retired, retired(4, "expired", "late"), id="r")
            await end(process)
        rows = SampleStore(tmp_path).find(limit=None)
        expected = {0: "trained", 1: "trained", 2: "trained", 4: "expired", 5: "trained"}
        assert [(row["ticket"], row["outcome"]) for row in rows[::2]] == [*expected.items()]
        assert log.kept_below == done_at[2] + 1, "ticket 3 may be trained by a kernel that resumes the run"
        assert len(list((tmp_path / "samples").glob("*.parquet"))) == 1


async def test_added_images_are_kept_once_and_before_their_row(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    """Whoever may write to the log may write something else than the image, or more than an image has."""
    first, second, other, large = named(b"1"), named(b"2"), named(b"3"), named(bytes(MAX_FILE_BYTES + 1))
    lie = dict.fromkeys(other, b"4")
    async with log_of(open_bus, names) as log:
        await log.group(0, images=first)
        await log.group(1, images=first | second | lie)
        await log.group(2, images=large)
        last = await log.trained(0, 1, 2)
        async with writer(tmp_path) as process:
            await until(lambda: log.kept_below > last)
            await end(process)
    assert images_in(tmp_path) == first | second
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "samples" / "images").iterdir())
    assert [row["images"] for row in SampleStore(tmp_path).find()] == [
        *[[0, *first]] * 2,
        *[[0, *first, *second, *other]] * 2,
        *[[0, *large]] * 2,
    ]
    said = (tmp_path / "logs" / "samples.jsonl").read_text()
    assert said.count("an image is too large, or another one than its name says") == 2


async def test_a_group_without_its_outcome_keeps_its_place_in_the_log(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    async with log_of(open_bus, names) as log:
        first = await log.group(0)
        await log.bus.store.append(log.names.trajectories, trajectories(1), id="1/0")
        await log.group(2)
        last = await log.trained(0, 2)
        async with writer(tmp_path):
            await until(lambda: log.kept_below == first + 1)
            assert [row["ticket"] for row in SampleStore(tmp_path).find()] == [0, 0, 2, 2]
        assert last > log.kept_below


async def test_after_a_lost_log_the_new_one_is_read_from_its_beginning(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    async with log_of(open_bus, names) as log:
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / "cursor.json").write_text('{"position": 1000}')
        await log.group(0)
        await log.trained(0)
        async with writer(tmp_path) as process:
            await until(lambda: log.follows == 1)
            await end(process)
        assert rows_of(tmp_path) == ["0/1/0", "0/1/1"]


async def test_only_the_last_steps_are_kept(open_bus: OpenBus, names: Subjects, tmp_path: Path) -> None:
    async with log_of(open_bus, names) as log:
        async with writer(tmp_path, last=3) as process:
            for step in range(1, 9):
                await log.group(step, version=step - 1, images=named(b"in all", b"%d" % step))
                last = await log.trained(step, version=step - 1)
                await until(lambda last=last: log.kept_below > last)
            await end(process)
        steps = {row["step"] for row in SampleStore(tmp_path).find(SampleFilter(outcome="trained"))}
        assert {6, 7, 8} <= steps
        assert 1 not in steps
        kept = {name for row in SampleStore(tmp_path).find(limit=None) for name in row["images"][1:]}
        assert images_in(tmp_path).keys() == kept
        assert kept >= named(b"in all", b"6", b"7", b"8").keys()
        assert not kept & named(b"1").keys()
