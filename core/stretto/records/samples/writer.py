"""The process that writes a run's samples. The kernel starts it on the kernel's machine, and restarts it.

It follows the log and writes rows of known outcome every few seconds: first their images, then all rows of a
group in one file. Then it moves its cursor to the first message of the oldest unwritten group and reports the
cursor; the kernel keeps the log from there on. After a crash it reads from the cursor and skips groups with
rows on disk.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskStatus

from stretto.assembly.logs import log_to
from stretto.bus.client import Bus, connect
from stretto.bus.lock import KernelLock
from stretto.bus.messages import tickets
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.errors import Malformed, MessageGone, NoAnswer, RunError, leaves
from stretto.machine.private_file import write_private
from stretto.models.images import MAX_FILE_BYTES, ImageFile
from stretto.records.samples.files import FOLDER, Table
from stretto.records.samples.images import SampleImages
from stretto.records.samples.join import Joiner
from stretto.records.samples.segments import FLUSHES, SegmentWriter

log = structlog.get_logger()

CURSOR = "cursor.json"
"""File beside the segments: the place in the log from which the next writer reads."""
_LOCK = "writer.lock"
_FLUSH_S = 3.0  # readers see samples after this time, and each flush makes a file
_FLUSH_BYTES = 2**25
"""Rows of this many bytes are written at once, and the writer reads no further until they are on disk."""
_RETRY_S = 5.0  # while the disk is full
_POLL_S = 0.5  # how soon the writer notices that its kernel is gone
_BEAT_S = 5.0
"""Seconds between two reports to the kernel, also if nothing new is on disk."""
_ANSWER_S = 60.0  # the server may be away for a while
_DRAIN_S = 15.0
"""Seconds to read the rest of the log at the end of the run."""
_NICE = 5
_PARTS = 4
"""If only the last n steps are kept, a segment has at most n / `_PARTS` flushes."""


@dataclass(frozen=True)
class Keeping:
    """The rule which samples stay on disk."""

    last: int
    """Keep the samples of this many newest steps; 0 for all."""
    staleness: int
    """The run's `queue.max_staleness`."""
    answers: bool
    """Keep the samples of all evaluations."""

    def prunes(self, purpose: tickets.Purpose) -> bool:
        """Return whether old samples of a purpose are removed."""
        return bool(self.last) and not (purpose == "eval" and self.answers)

    def flushes(self, purpose: tickets.Purpose) -> int:
        """Return the number of flushes in a segment, so that old segments can be removed."""
        return min(FLUSHES, max(1, self.last // _PARTS)) if self.prunes(purpose) else FLUSHES


def main(folder: Path, keeping: Keeping) -> int:
    """Run the writer of the run in `folder`, and return the exit status of the process."""
    os.umask(0o077)
    os.nice(_NICE)
    bootstrap = Bootstrap.read(folder / "bus" / "samples.json")
    log_to(folder / "logs" / "samples.jsonl", run=bootstrap.run, role="samples")
    try:
        with _owned(folder / FOLDER):
            anyio.run(_write, folder, bootstrap, keeping)
    except Exception as error:
        first = leaves(error)[0]
        log.error("sample writer failed", error=f"{type(first).__name__}: {first}", exc_info=first)
        return 1
    return 0


@contextmanager
def _owned(folder: Path) -> Generator[None]:
    """Hold the folder's lock, as its only writer. A killed kernel's writer may hold it a moment longer."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kernel = KernelLock.of(folder.parent / "bus")
    with (folder / _LOCK).open("w") as file:
        while kernel.is_held():
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            raise RunError("the kernel is gone")
        yield


async def _write(folder: Path, bootstrap: Bootstrap, keeping: Keeping) -> None:
    async with connect(bootstrap) as bus:
        await _SampleWriter(folder, bus, Subjects(bootstrap.run), keeping).run()


class _SampleWriter:
    def __init__(self, folder: Path, bus: Bus, names: Subjects, keeping: Keeping) -> None:
        self._folder = folder / FOLDER
        self._lock = KernelLock.of(folder / "bus")
        self._bus = bus
        self._names = names
        self._keeping = keeping
        self._segments = SegmentWriter(self._folder)
        self._images = SampleImages(folder)
        self._images_move = anyio.Lock()
        """Held while the images of a row are kept and the row is added to the joiner, and while images
        without a row are removed."""
        self._joiner = Joiner(1, staleness=keeping.staleness)
        self._unwritten: dict[tickets.Purpose, Table] = {}
        """Rows that were taken from the joiner and are not on disk yet."""
        self._position = 0
        """The cursor once `_unwritten` is on disk."""
        self._confirmed = 0
        self._taken = anyio.Event()
        """Set when the complete rows were taken from the joiner."""
        self._wake = anyio.Event()
        """Set when rows should be written now."""
        self._over = anyio.Event()
        """Set when the run is over, or its kernel is gone."""

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._obey_signals)
            tasks.start_soon(self._watch_kernel)
            tasks.start_soon(self._beat)
            following = await self._ask(_read_cursor(self._folder))
            self._joiner = await anyio.to_thread.run_sync(self._joiner_from, following.start)
            await self._confirm(self._joiner.position)
            tasks.start_soon(self._follow, following)
            tasks.start_soon(self._flush_often)
            await self._over.wait()
            if self._lock.is_held() and await self._read_the_rest():
                self._joiner.finish()
            tasks.cancel_scope.cancel()
        await self._flush()  # the rows that an interrupted flush has left
        await self._flush()
        await self._change_files(lambda purpose: self._segments.close(purpose, 2))

    def _joiner_from(self, start: int) -> Joiner:
        written = {*self._segments.attempts_since(start)}
        return Joiner(start, staleness=self._keeping.staleness, written=written)

    # ------------------------------------------------------------------------------------ the log

    async def _follow(self, first: tickets.Following) -> None:
        unused = [first]

        async def consumer_at(start: int) -> str:
            return (unused.pop() if unused else await self._ask(start)).consumer

        kinds: dict[str, Any] = {
            self._names.trajectories: tickets.TrajectoryBundle,
            self._names.kept_trajectories: tickets.TrajectoryBundle,
            self._names.records: tickets.TicketRecord,
            self._names.groups: tickets.GroupDone | tickets.GroupFailed,
            self._names.trained: tickets.TrainedRows,
            self._names.retired: tickets.RetiredTickets,
        }
        messages = self._bus.store.follow_consumer(
            self._names.log_stream, kinds, consumer_at, start=self._joiner.following
        )
        async for sequence, message in messages:
            await self._add(sequence, message)
            while self._joiner.size > _FLUSH_BYTES:
                self._wake.set()
                await self._taken.wait()

    async def _add(self, sequence: int, message: Any) -> None:
        """Keep images of rows that a message completes, then add the message. Retry if the disk is full."""
        images = self._joiner.images_of(message)
        if not images:
            self._joiner.add(sequence, message)
            return
        has_logged = False
        while True:
            try:
                async with self._images_move:
                    for name in images:
                        await self._keep_image(name)
                    self._joiner.add(sequence, message)
                    return
            except (OSError, NoAnswer) as error:
                if not has_logged:
                    has_logged = True
                    log.warning("images of samples cannot be kept; trying again", error=str(error))
                await anyio.sleep(_RETRY_S)

    async def _keep_image(self, name: str) -> None:
        """Copy an image from the log, unless it is on disk or the log lacks it."""
        if name in self._images:
            return
        names = self._names
        try:
            stored = await self._bus.store.read_newest(
                names.log_stream, names.image(name), tickets.StoredImage
            )
        except (MessageGone, Malformed) as error:
            log.warning("an image of a sample is not in the log", image=name, reason=str(error))
            return
        image = ImageFile(stored.file)
        if len(image.file) > MAX_FILE_BYTES or image.digest != name:
            log.warning("an image is too large, or another one than its name says", image=name)
            return
        await anyio.to_thread.run_sync(self._images.write, image)

    async def _ask(self, start: int) -> tickets.Following:
        subject = self._names.kernel("samples", "follow")
        return await self._bus.request(
            subject, tickets.Follow(start), tickets.Following, deadline_s=_ANSWER_S
        )

    async def _read_the_rest(self) -> bool:
        with anyio.move_on_after(_DRAIN_S):
            last = (await self._ask(self._joiner.following)).last
            while self._joiner.following <= last:
                await anyio.sleep(0.02)
            return True
        return False

    # ------------------------------------------------------------------------------------- the disk

    async def _flush_often(self) -> None:
        while True:
            with anyio.move_on_after(_FLUSH_S):
                await self._wake.wait()
            self._wake = anyio.Event()
            await self._flush()

    async def _flush(self) -> None:
        """Write and confirm the complete rows. Retry while the disk is full: the log keeps the rows."""
        if not self._unwritten:
            self._position, self._unwritten = self._joiner.position, self._joiner.pop_rows()
            self._taken.set()
            self._taken = anyio.Event()
        has_logged = False
        while self._unwritten:
            try:
                with anyio.CancelScope(shield=True):
                    await self._write_one()
            except OSError as error:
                if not has_logged:
                    has_logged = True
                    log.warning("samples cannot be written; trying again", error=str(error))
                if self._over.is_set():
                    return
                await anyio.sleep(_RETRY_S)
        await self._confirm(self._position)
        if self._keeping.last:
            async with self._images_move:
                await self._change_files(self._prune)
        await self._change_files(
            lambda purpose: self._segments.close(purpose, self._keeping.flushes(purpose))
        )

    async def _write_one(self) -> None:
        purpose, table = next(iter(self._unwritten.items()))
        await anyio.to_thread.run_sync(self._segments.write, purpose, table)
        del self._unwritten[purpose]

    async def _confirm(self, position: int) -> None:
        if position == self._confirmed:
            return
        cursor = msgspec.json.encode({"position": position})
        try:
            await anyio.to_thread.run_sync(write_private, self._folder / CURSOR, cursor)
        except OSError as error:
            log.warning("the cursor of samples cannot be written", error=str(error))
            return
        self._confirmed = position
        await self._report()

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(_BEAT_S)
            await self._report()

    async def _report(self) -> None:
        if self._bus.connected:
            await self._bus.publish(self._names.kernel("samples", "kept"), tickets.Kept(self._confirmed))

    async def _change_files(self, work: Callable[[tickets.Purpose], None]) -> None:
        try:
            for purpose in get_args(tickets.Purpose):
                await anyio.to_thread.run_sync(work, purpose)
        except OSError as error:
            log.warning("segments of samples cannot be changed", error=str(error))

    def _prune(self, purpose: tickets.Purpose) -> None:
        # A trajectory whose newest token has version v is trained at step v + staleness + 1 or before.
        below = self._joiner.newest_step - self._keeping.last - self._keeping.staleness
        if self._keeping.prunes(purpose) and self._segments.prune(purpose, below):
            self._images.keep_only(self._segments.images() | self._joiner.images)

    # ------------------------------------------------------------------------------------- the end

    async def _obey_signals(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGTERM:  # the user sends the other signals, and the kernel obeys them
                    self._over.set()

    async def _watch_kernel(self) -> None:
        while self._lock.is_held():
            await anyio.sleep(_POLL_S)
        log.info("the kernel is gone")
        self._over.set()


def _read_cursor(folder: Path) -> int:
    try:
        return msgspec.json.decode((folder / CURSOR).read_bytes(), type=dict[str, int])["position"]
    except FileNotFoundError:
        return 1
