"""Weights on their way from trainer to engine: the transports, what a worker does with them, and a run in
which something goes wrong with them on purpose."""

import itertools
import os
import re
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from bus_testing import context_of, until, welcome
from fixture_types import OpenBus, Start
from patience import patience
from plugin_files import write_plugin
from stretto import Context
from stretto.array import Array
from stretto.bus.client import Bus
from stretto.bus.messages import inference as messages
from stretto.bus.messages.inference import ChunkBatch, SharedRows, SwapDone
from stretto.bus.messages.membership import WorkerProcess
from stretto.bus.messages.subjects import Subjects
from stretto.engine import Chunk, Emit, GenerateRequest, Load, Sampling, SwapReport
from stretto.errors import EngineError, WeightsError
from stretto.models.digest import digest_of, hashes_of
from stretto.models.version_files import FolderPublisher, Outline, RunFolders, lay_out, open_version
from stretto.rl.drift import Drift
from stretto.weights import Canary, Publisher, Subscriber, WeightsNote, WeightUpdate, Wire
from stretto.workers.context import WorkerContext
from stretto.workers.inference import InferenceWorker
from stretto.workers.process import HostProcess
from stretto.workers.weights_wire import BusWire
from stretto_bus import BusTransport, BusTransportConfig
from stretto_collective import CollectiveConfig, CollectiveTransport
from stretto_collective.meeting import choose_backend, gpu_for
from stretto_file import FileSubscriber, FileTransport, FileTransportConfig


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((3, 2), value)), ("b.c", torch.arange(4).bfloat16()), ("d", torch.tensor([1]))]


def context(worker: str) -> Context:
    return Context(run="r", name="n", seed=1, worker=worker)


# ------------------------------------------------------------------------------------------- file


def ends(folder: Path, *, keep: int = 3, shard_gb: float = 2.0) -> tuple[FolderPublisher, FileSubscriber]:
    subscriber = FileSubscriber(RunFolders(context("inference-0"), None))
    return FolderPublisher(folder / "versions", keep, shard_gb), subscriber


async def test_a_copy_leaves_the_workers_other_folders(tmp_path: Path) -> None:
    publisher = FolderPublisher(tmp_path / "versions", 3, 2.0, deltas=True)
    notes = [publisher.publish(version, iter(halves(version))) for version in range(2)]
    files = (tmp_path / "versions").rglob("*v00000000/*.safetensors")
    whole = sum(file.stat().st_size for file in files)
    assert 0 < notes[1].fetched_bytes < notes[0].fetched_bytes == whole
    folders = RunFolders(context("inference-0"), str(tmp_path / "own"))
    merged = folders.own("whole")
    subscriber = FileSubscriber(folders)
    for note in notes:
        (await subscriber.receive(note)).close()
    assert merged.exists()
    assert len(list((tmp_path / "own").iterdir())) == 2
    subscriber.close()


async def test_frozen_tensors_are_written_and_hashed_once(tmp_path: Path) -> None:
    publisher, subscriber = ends(tmp_path, keep=1)
    publisher.freeze(iter(tensors(1.5)[1:]))
    notes = [publisher.publish(version, iter(tensors(version)[:1])) for version in range(2)]
    for version in (1, 2):
        if version == 2:
            notes.append(publisher.publish(2, iter(tensors(2)[:1])))
        update = await subscriber.receive(notes[version])
        assert update.hashes() == hashes_of(dict(tensors(version)))
        [frozen] = Path(notes[version].address).glob("frozen-*")
        [own] = Path(notes[version].address).glob("model-*")
        assert notes[version].fetched_bytes == own.stat().st_size  # an engine has the frozen ones
        assert frozen.stat().st_nlink == 2  # the file of the publisher, and that of the one version
        if version == 1:  # alter it, as nobody could who does not know how: only a hash would show it
            status, damaged = frozen.stat(), bytearray(frozen.read_bytes())
            damaged[-1] ^= 1
            frozen.write_bytes(damaged)
            os.utime(frozen, ns=(status.st_atime_ns, status.st_mtime_ns))
    frozen.touch()  # to the subscriber that has hashed it, it is another file now
    for each in (subscriber, ends(tmp_path)[1]):
        with pytest.raises(WeightsError, match=r"is not the announced one: \['b.c'\] differ"):
            await each.receive(notes[2])


@pytest.mark.parametrize("section", [FileTransportConfig, BusTransportConfig, CollectiveConfig])
def test_one_version_is_not_enough(section: type[msgspec.Struct]) -> None:
    """An engine that starts after a publication and before the announcement reads the version before."""
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 2 - at `\$.keep`"):
        msgspec.convert({"keep": 1}, section)


async def test_old_versions_go_and_say_so(tmp_path: Path) -> None:
    publisher, subscriber = ends(tmp_path, keep=2)
    notes = [publisher.publish(version, iter(tensors(version))) for version in range(4)]
    opened = await subscriber.receive(notes[3])
    held = opened.tensors()["a"]
    with pytest.raises(WeightsError, match=r"version 1 at .* cannot be read") as caught:
        await subscriber.receive(notes[1])
    assert caught.value.version == 1
    publisher.close()
    assert torch.equal(held, torch.full((3, 2), 3.0))  # a reader keeps what it has opened
    transport = FileTransport(FileTransportConfig(folder=str(tmp_path)), context("kernel"))
    left = tmp_path / "stretto-r-trainer-0-17"
    left.mkdir()
    transport.clean()
    assert list(tmp_path.iterdir()) == []


async def test_versions_that_evaluations_need_stay_until_they_are_not_needed(tmp_path: Path) -> None:
    publisher, subscriber = ends(tmp_path, keep=1)
    notes = [publisher.publish(version, iter(tensors(version)), [1, 3]) for version in range(6)]
    for version in (1, 3, 5):
        received = (await subscriber.receive(notes[version])).tensors()
        assert torch.equal(received["a"], torch.full((3, 2), float(version)))
    for version in (0, 2, 4):
        with pytest.raises(WeightsError, match=f"version {version} at .* cannot be read"):
            await subscriber.receive(notes[version])
    publisher.copy(3, tmp_path / "checkpoint" / "evaluation")
    publisher.publish(6, iter(tensors(6)), [3])
    with pytest.raises(WeightsError, match="version 1 at"):
        await subscriber.receive(notes[1])
    publisher.close()
    again = open_version(notes[3], tmp_path / "checkpoint" / "evaluation")
    assert torch.equal(again.tensors()["a"], torch.full((3, 2), 3.0))


async def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    """Also where the tensors are the same."""
    publisher, subscriber = ends(tmp_path)
    notes = [publisher.publish(version, iter(tensors(1.0))) for version in range(2)]
    assert notes[0].digest == notes[1].digest
    with pytest.raises(WeightsError, match=r"version 1 .* announced one: its manifest is of version 0"):
        await subscriber.receive(msgspec.structs.replace(notes[1], address=notes[0].address))


@pytest.mark.parametrize("name", ["../model.safetensors", "..", "", "manifest.json", "a\0.safetensors"])
async def test_a_manifest_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    publisher, subscriber = ends(tmp_path)
    note = publisher.publish(1, iter(tensors(1.0)))
    file = Path(note.address, "manifest.json")
    written = msgspec.json.encode(name)[1:-1].decode()
    file.write_text(file.read_text().replace("model-00000.safetensors", written))
    with pytest.raises(WeightsError, match=r"version 1 at .* has a file .*; expected plain names"):
        await subscriber.receive(note)


async def test_tensors_of_the_same_bytes_and_another_shape_or_dtype_are_refused(tmp_path: Path) -> None:
    publisher, subscriber = ends(tmp_path)
    note = publisher.publish(1, iter(tensors(1.0)))
    file = Path(note.address, "model-00000.safetensors")
    for of_file, other in ((b'"shape":[3,2]', b'"shape":[2,3]'), (b'"BF16"', b'"F16" ')):
        content = file.read_bytes()
        assert content.count(of_file) == 1
        file.write_bytes(content.replace(of_file, other))
        with pytest.raises(WeightsError, match=r"version 1 .* is not the announced one: .* differ"):
            await subscriber.receive(note)
        file.write_bytes(content)
    (await subscriber.receive(note)).close()


async def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    publisher, subscriber = ends(tmp_path)
    root = tmp_path / "versions"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(WeightsError, match=r"versions is not private: it has mode 777, expected 700"):
        publisher.publish(0, iter(tensors(1.0)))
    assert list(root.iterdir()) == []
    root.chmod(0o700)
    note = publisher.publish(1, iter(tensors(1.0)))
    for folder in (root, Path(note.address)):
        folder.chmod(0o750)
        with pytest.raises(WeightsError, match=f"version 1 at .*{folder.name} is not private: .* mode 750"):
            await subscriber.receive(note)
        folder.chmod(0o700)
    Path(tmp_path / "link").symlink_to(root)
    with pytest.raises(WeightsError, match="link is not private: it is not a folder"):
        FolderPublisher(tmp_path / "link", 3, 2.0).publish(2, iter(tensors(1.0)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    publisher, subscriber = ends(tmp_path)
    note = publisher.publish(0, iter(tensors(1.0)))
    os.chown(tmp_path / "versions", 65534, -1)
    with pytest.raises(WeightsError, match="it belongs to user 65534, but this process is of user 0"):
        publisher.publish(1, iter(tensors(1.0)))
    with pytest.raises(WeightsError, match=r"version 0 at .* it belongs to user 65534"):
        await subscriber.receive(note)


def test_the_folder_of_a_process_is_new_and_its_own(tmp_path: Path) -> None:
    """Whoever knows its name up to the process id can make neither a folder nor a link in its place."""
    guessed = tmp_path / f"stretto-r-trainer-1-{os.getpid()}"
    guessed.mkdir(mode=0o777)
    folders = RunFolders(context("trainer-0"), str(tmp_path / "new"))
    own = folders.own()
    assert re.fullmatch(rf"stretto-r-trainer-0-{os.getpid()}-.+", own.name)
    assert own.stat().st_mode & 0o777 == 0o700
    other = RunFolders(context("trainer-1"), str(tmp_path)).own()
    assert other.parent == tmp_path
    assert other != guessed
    folders.clean()
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"no folder for weights can be made in .*file"):
        RunFolders(context("trainer-0"), str(tmp_path / "file")).own()


async def test_a_version_larger_than_the_room_for_it_is_not_fetched(tmp_path: Path) -> None:
    publisher, _ = ends(tmp_path)
    note = publisher.publish(1, iter(tensors(1.0)))
    outline = msgspec.structs.replace(publisher.find(1).outline, sizes=(2**60,))
    with pytest.raises(WeightsError, match=r"version 1 has 1152921504606846976 bytes; .* has room for"):
        lay_out(outline, note, tmp_path / "received")
    with pytest.raises(msgspec.ValidationError, match="Expected `int` >= 0"):
        msgspec.convert([b"", [-1]], Outline)


def test_weights_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    (tmp_path / "versions").write_text("")
    with pytest.raises(WeightsError, match="version 0 cannot be written"):
        ends(tmp_path)[0].publish(0, iter(tensors(1.0)))


# -------------------------------------------------------------------------------------------- bus


def none(_: int) -> bool:
    return False


class Tampered:
    """A wire that damages some answers, by their number, and on which no transfer may be asked for."""

    def __init__(self, wire: Wire, damages: Callable[[int], bool], *, is_deaf: bool = False) -> None:
        self._wire, self._damages, self._is_deaf = wire, damages, is_deaf
        self.address, self.limit, self.answer = wire.address, wire.limit, wire.answer
        self.asked = 0

    async def ask(self, address: str, question: bytes, *, deadline_s: float) -> bytes:
        self.asked += 1
        number = self.asked
        if self._is_deaf and b"send" in question:
            await anyio.sleep_forever()
        data = await self._wire.ask(address, question, deadline_s=deadline_s)
        return data[:-1] + bytes([data[-1] ^ 1]) if self._damages(number) else data


BIG = [("big", torch.arange(20_000, dtype=torch.float32)), *tensors(1.0)]  # 80 pieces of a KiB, or some more


Subscribe = Callable[[Callable[[int], bool]], tuple[Subscriber, Tampered]]


@asynccontextmanager
async def bus_ends(
    open_bus: OpenBus, folder: Path, **options: Any
) -> AsyncGenerator[tuple[Publisher, Subscribe]]:
    """A publisher, and what makes subscribers whose wire has such damages, in two roles on a real server."""
    config = BusTransportConfig(use="bus", folder=str(folder), piece_kb=1, **options)
    async with open_bus("trainer") as trainer, open_bus("inference") as inference:
        own = BusWire(context_of(trainer, "trainer-0", "first"))
        publisher = BusTransport(config, context("trainer-0")).publisher(own)
        receiving = BusTransport(config, context("inference-0"))

        def subscribe(damages: Callable[[int], bool]) -> tuple[Subscriber, Tampered]:
            wire = Tampered(BusWire(context_of(inference, "inference-0", "x")), damages)
            return receiving.subscriber(wire), wire

        await own.open()
        yield publisher, subscribe


async def test_bus_carries_a_version_piece_by_piece(open_bus: OpenBus, tmp_path: Path) -> None:
    async with bus_ends(open_bus, tmp_path, shard_gb=1e-8) as (publisher, subscribe):
        note = publisher.publish(3, iter(BIG))
        subscriber, wire = subscribe(none)
        update = await subscriber.receive(note)
        assert wire.asked > 80
        folder = update.folder
        assert folder is not None
        assert len(list(folder.glob("*.safetensors"))) == len(BIG)
        loaded = update.tensors()
        for name, tensor in BIG:
            assert torch.equal(loaded[name], tensor)
        assert digest_of(update.hashes().items()) == note.digest
        update.close()
        assert not folder.exists()
        assert torch.equal(loaded["big"], BIG[0][1])  # what is mapped stays
        subscriber.close()
        publisher.close()
        assert list(tmp_path.glob("stretto-r-*")) == []


async def test_bus_asks_again_only_for_damaged_or_missing_pieces(open_bus: OpenBus, tmp_path: Path) -> None:
    broken = True
    async with bus_ends(open_bus, tmp_path, in_flight=2) as (publisher, subscribe):
        note = publisher.publish(0, iter(BIG))
        plain, all_well = subscribe(none)
        (await plain.receive(note)).close()
        subscriber, wire = subscribe(lambda number: number in (7, 20))
        (await subscriber.receive(note)).close()
        assert wire.asked == all_well.asked + 2
        subscriber, wire = subscribe(lambda number: broken and number > 40)
        with pytest.raises(WeightsError, match=r"version 0 from trainer-0/first: a piece of .* damaged 3"):
            await subscriber.receive(note)
        broken, before = False, wire.asked
        update = await subscriber.receive(note)
        # The manifest is asked for again. Of two pieces under way, one may be dropped with the other.
        assert wire.asked - before - (all_well.asked - 40) in (1, 2)
        assert torch.equal(update.tensors()["big"], BIG[0][1])


def halves(version: int) -> list[tuple[str, torch.Tensor]]:
    """40 pieces of a KiB; in each version 3,000 values of 20,000 are others."""
    values = torch.zeros(20_000)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(version):
        values[torch.randperm(20_000, generator=drawn)[:3_000]] = torch.randn(3_000, generator=drawn)
    return [("big", values.bfloat16())]


async def test_a_delta_is_asked_for_again_and_kept_files_stay(open_bus: OpenBus, tmp_path: Path) -> None:
    """A server that starts again loads the version that it served, while the next one is on its way."""
    broken_from = 10**6
    async with bus_ends(open_bus, tmp_path, in_flight=2) as (publisher, subscribe):
        notes = [publisher.publish(version, iter(halves(version))) for version in range(2)]
        subscriber, wire = subscribe(lambda number: number > broken_from)
        update = await subscriber.receive(notes[0])
        assert update.folder is not None
        (kept := tmp_path / "kept").mkdir()
        for file in update.folder.iterdir():
            os.link(file, kept / file.name)
        update.close()
        whole, broken_from = wire.asked, wire.asked + 3
        with pytest.raises(WeightsError, match=r"version 1 .*: a piece of .* damaged 3"):
            await subscriber.receive(notes[1])
        before, broken_from = wire.asked, 10**6
        update = await subscriber.receive(notes[1])
        assert 5 < wire.asked - before < whole / 2
        assert torch.equal(update.tensors()["big"], halves(1)[0][1])
        assert torch.equal(open_version(notes[0], kept).tensors()["big"], halves(0)[0][1])


async def test_bus_says_what_is_gone_and_who_is_silent(open_bus: OpenBus, tmp_path: Path) -> None:
    async with bus_ends(open_bus, tmp_path, keep=2, deadline_s=patience(0.3)) as (publisher, subscribe):
        subscriber, _ = subscribe(none)
        notes = [publisher.publish(version, iter(tensors(version)), [0]) for version in range(4)]
        (await subscriber.receive(notes[0])).close()  # an evaluation needs it
        with pytest.raises(WeightsError, match=r"version 1 is not here \(any more\); the newest is 3"):
            await subscriber.receive(notes[1])
        for address in ("trainer-0/former", "trainer-1/first"):
            with pytest.raises(WeightsError, match=r"trainer-\d did not answer"):
                await subscriber.receive(msgspec.structs.replace(notes[3], address=address))
        wrong = msgspec.structs.replace(notes[3], digest="0" * 64)
        with pytest.raises(WeightsError, match="not the announced one"):
            await subscriber.receive(wrong)


# ------------------------------------------------------------------------------------- collective


async def test_collective_carries_versions_and_leaves_nothing(open_bus: OpenBus, tmp_path: Path) -> None:
    options: Any = {"folder": str(tmp_path), "bucket_mb": 1, "keep": 2, "shard_gb": 0.002}
    config = CollectiveConfig(use="collective", backend="auto", deadline_s=patience(5), **options)
    big = [("big", torch.arange(700_000)), ("half", torch.arange(300_000).bfloat16()), *tensors(1.0)]
    async with open_bus("trainer") as trainer, open_bus("inference") as inference:
        wire = BusWire(context_of(trainer, "trainer-0", "first"))
        asking = BusWire(context_of(inference, "inference-0", "x"))
        publisher = CollectiveTransport(config, context("trainer-0")).publisher(wire)
        await wire.open()
        subscriber = CollectiveTransport(config, context("inference-0")).subscriber(asking)
        notes = [publisher.publish(version, iter(big), [1]) for version in range(4)]
        for note in notes[1:]:
            update = await subscriber.receive(note)
            assert update.folder is not None
            loaded = update.tensors()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in big)
            assert digest_of(update.hashes().items()) == note.digest
            update.close()
        with pytest.raises(WeightsError, match=r"version 0 is not here \(any more\); the newest is 3"):
            await subscriber.receive(notes[0])
        hasty = msgspec.structs.replace(config, deadline_s=patience(0.3))
        deaf_wire = Tampered(asking, none, is_deaf=True)
        deaf = CollectiveTransport(hasty, context("inference-1")).subscriber(deaf_wire)
        with pytest.raises(WeightsError, match="version 2 from trainer-0/first was not received"):
            await deaf.receive(notes[2])
        deaf.close()
        (await subscriber.receive(notes[2])).close()  # whoever failed before
        publisher.close()
        subscriber.close()
        assert list(tmp_path.glob("stretto-r-*")) == []


def test_nccl_is_for_two_gpus() -> None:
    assert choose_backend("auto", "GPU-1", "GPU-2") == choose_backend("nccl", "GPU-1", "GPU-2") == "nccl"
    assert choose_backend("auto", "GPU-1", "GPU-1") == choose_backend("auto", "", "GPU-2") == "gloo"
    assert choose_backend("gloo", "GPU-1", "GPU-2") == "gloo"
    with pytest.raises(WeightsError, match="they share one GPU"):
        choose_backend("nccl", "GPU-1", "GPU-1")
    with pytest.raises(WeightsError, match="one of them has no GPU"):
        choose_backend("nccl", "GPU-1", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without GPUs")
def test_nccl_is_refused_without_a_gpu() -> None:
    assert gpu_for("auto") == gpu_for("gloo") == ""
    with pytest.raises(WeightsError, match="this process has no GPU; use `auto` or `gloo`"):
        gpu_for("nccl")


def test_publishing_holds_one_shard(tmp_path: Path) -> None:
    """No tensor of a shard that is written stays in memory while the next one is gathered."""
    memory: list[weakref.ref[Any]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            array = np.zeros(1000, dtype=np.float32)
            memory.append(weakref.ref(array))
            most = max(most, sum(each() is not None for each in memory))
            yield f"t{number}", torch.from_numpy(array)

    publisher, _ = ends(tmp_path, shard_gb=4 * 4000 / 2**30)  # four tensors
    publisher.publish(1, gathered())
    assert most <= 6  # those of a shard, the one that did not fit, and the next


def test_collective_is_refused_without_its_interface(refusals: Callable[..., list[str]]) -> None:
    text = "\n".join(refusals("weights={use: collective, interface: nowhere0}"))
    assert "weights.interface: this machine has no network interface 'nowhere0'" in text


# ------------------------------------------------------------------------------- an inference worker


async def cannot() -> list[Any]:
    raise EngineError("it keeps no logits")


class Told:
    """An engine that does what the test tells it to."""

    def __init__(self) -> None:
        self.emit: Emit = list[Chunk]().extend
        self.report: Callable[[WeightUpdate], SwapReport] = honest
        self.score: Callable[[], Awaitable[list[Any]]] = cannot
        self.did: list[str] = []
        """The requests it has taken, aborted, and the swaps, in order."""

    async def start(self, emit: Emit, tasks: Any) -> None:
        self.emit = emit

    async def swap(self, update: WeightUpdate) -> SwapReport:
        self.did.append(f"swap {update.note.version}")
        return self.report(update)

    async def logprobs(self, sequences: Sequence[Any]) -> list[Any]:
        return await self.score()

    def generate(self, request: GenerateRequest) -> None:
        self.did.append(f"take {request.id}")

    def abort(self, request: str) -> None:
        self.did.append(f"abort {request}")

    def load(self) -> Load:
        return Load(0, 0, 0, 1, 0, 0.0, 0, 0.0, 0.0)

    async def stop(self) -> None: ...

    def say(self, sample: int, position: int, *versions: int, finish: Any = "", request: str = "q") -> None:
        count = len(versions)
        tokens, logprobs = np.arange(count, dtype=np.int32), np.zeros(count, np.float32)
        self.emit([Chunk(request, sample, position, tokens, logprobs, np.array(versions, np.int32), finish)])


def honest(update: WeightUpdate, **changed: str) -> SwapReport:
    hashes = hashes_of(update.tensors()) | changed
    return SwapReport(update.note.version, digest_of(hashes.items()), 0.0, hashes)


class Worker:
    """An inference worker under test, with a kernel and a rollout worker around it."""

    def __init__(self, engine: Told, publisher: FolderPublisher, kernel: Bus, rollout: Bus) -> None:
        self.engine, self._publisher, self._kernel, self._rollout = engine, publisher, kernel, rollout
        self.heard: list[tuple[int, int, list[int]]] = []
        """(sample, position, versions) of every chunk that has left."""
        self._numbers = itertools.count()

    async def open(self) -> None:
        chunks = Subjects("test-run").chunks(self._rollout.inbox)
        await self._rollout.subscribe(chunks, ChunkBatch, self._hear)
        await self.ask("q")

    def note(self, version: int, canary: Canary | str = "") -> WeightsNote:
        note = self._publisher.publish(version, iter(tensors(version)))
        return msgspec.structs.replace(note, canary=canary)

    async def swap(self, note: WeightsNote, *, exact: bool = False) -> SwapDone:
        swap = messages.Swap(0, next(self._numbers), note, exact, trainer=WorkerProcess("trainer-0", "t"))
        subject = Subjects("test-run").worker("inference", "inference-0", "x", "swap")
        return await self._kernel.request(subject, swap, SwapDone, deadline_s=patience())

    async def ask(self, id: str, exact_version: int | None = None) -> None:
        request = GenerateRequest(id, Array.of(np.ones(1, np.int32)), (1, 2), Sampling(), 0)
        subject = Subjects("test-run").worker("inference", "inference-0", "x", "generate")
        await self._rollout.publish(subject, messages.Generate(request, self._rollout.inbox, exact_version))

    async def until(self, count: int) -> list[tuple[int, int, list[int]]]:
        await until(lambda: len(self.heard) >= count)
        return self.heard

    def _hear(self, batch: ChunkBatch) -> None:
        at, versions = 0, batch.versions.numpy().tolist()
        for head in batch.heads:
            self.heard.append((head.sample, head.position, versions[at : at + head.count]))
            at += head.count


class Given(WorkerContext):
    """What an inference worker of a run of mock engines is given, but for its engine."""

    engine: Any = None

    def make(self, path: str) -> Any:
        return self.engine if path == "inference" else super().make(path)


@asynccontextmanager
async def inference_worker(
    open_bus: OpenBus, folder: Path, queue: Mapping[str, Any] | None = None, **canary: Any
) -> AsyncGenerator[Worker]:
    engine = Told()
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout, open_bus("inference") as bus:
        inference = {"use": "mock", "canary": canary}
        given = welcome("test-run", 0, inference=inference, queue=queue or {})
        own = Given(bus, Subjects("test-run"), "inference-0", "inference", "x", given, HostProcess())
        own.engine = engine
        worker = Worker(engine, ends(folder)[0], kernel, rollout)
        ready = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(InferenceWorker(own).run, ready.set)
            await ready.wait()
            await worker.open()
            yield worker
            tasks.cancel_scope.cancel()


TEXT = Array.of(np.ones(3, np.int32))
CANARY = Canary((TEXT,), (Array.of(np.array([-1.0, -2.0], np.float32)),))


async def test_chunks_of_a_version_wait_until_it_is_verified(open_bus: OpenBus, tmp_path: Path) -> None:
    async with inference_worker(open_bus, tmp_path) as worker:
        engine, scored, swapped = worker.engine, anyio.Event(), anyio.Event()
        answers: list[SwapDone] = []

        async def score() -> list[Any]:
            swapped.set()
            await scored.wait()
            return [np.array([-1.0, -2.5], np.float32)]

        async def swap() -> None:
            answers.append(await worker.swap(worker.note(1, CANARY)))

        assert not (await worker.swap(worker.note(0))).fault
        engine.score = score
        async with anyio.create_task_group() as tasks:
            engine.say(0, 0, 0, 0)
            tasks.start_soon(swap)
            await swapped.wait()
            engine.say(0, 2, 0, 1)  # doubted from here on
            engine.say(0, 4, finish="stop")
            engine.say(1, 0, 0)
            assert await worker.until(2) == [(0, 0, [0, 0]), (1, 0, [0])]
            scored.set()
        assert (await worker.until(3))[2:] == [(0, 2, [0, 1])]  # both chunks of the sample in one
        [done] = answers
        assert (done.fault, done.unscored, dict(done.report.hashes)) == ("", "", {})
        assert done.drift == Drift(0.5, 0.5)  # of the worst quarter, which is the second token


async def test_a_worker_lent_to_an_evaluation_samples_for_it_alone(open_bus: OpenBus, tmp_path: Path) -> None:
    async with inference_worker(open_bus, tmp_path) as worker:
        engine, notes = worker.engine, [worker.note(version) for version in range(3)]

        async def did(*what: str) -> None:
            await until(lambda: engine.did == list(what))
            engine.did.clear()

        await worker.swap(notes[2])
        await did("take q", "swap 2")
        assert (await worker.swap(notes[1], exact=True)).report.version == 1  # back to an older version
        await did("abort q", "swap 1")
        engine.say(0, 0, 1)  # sampled before the engine heard of the abort, by weights that are not for it
        await worker.ask("train")  # its asker has not heard either
        await worker.ask("other evaluation", 0)
        await worker.ask("evaluation", 1)
        await did("take evaluation")
        engine.say(0, 0, 1, request="evaluation")
        assert await worker.until(1) == [(0, 0, [1])]
        await worker.swap(notes[2])
        await did("abort evaluation", "swap 2")
        await worker.ask("evaluation", 1)
        await worker.ask("train")
        await did("take train")
        assert len(worker.heard) == 1


async def test_a_version_that_is_served_already_is_not_loaded(open_bus: OpenBus, tmp_path: Path) -> None:
    async with inference_worker(open_bus, tmp_path) as worker:
        note = worker.note(0)
        await worker.swap(note)
        await worker.swap(note, exact=True)
        await worker.ask("evaluation", 0)
        await until(lambda: worker.engine.did[-1] == "take evaluation")  # it came on another connection
        await worker.swap(note)
        assert worker.engine.did == ["take q", "swap 0", "abort q", "take evaluation", "abort evaluation"]


async def test_between_training_and_evaluation_it_answers_nobody(open_bus: OpenBus, tmp_path: Path) -> None:
    async with inference_worker(open_bus, tmp_path) as worker:
        engine, notes = worker.engine, [worker.note(version) for version in range(2)]
        await worker.swap(notes[1])
        engine.report = altered
        assert (await worker.swap(notes[0], exact=True)).fault
        await worker.ask("train")
        await worker.ask("evaluation", 0)
        engine.report = honest
        await worker.swap(notes[1])
        await worker.ask("later")
        assert engine.did == ["take q", "swap 1", "abort q", "swap 0", "swap 1"]
        await until(lambda: engine.did[-1] == "take later")


altered = partial(honest, a="0" * 64)


def skipped(update: WeightUpdate) -> SwapReport:
    return SwapReport(update.note.version - 1, "0" * 64, 0.0)


def of_another_digest(update: WeightUpdate) -> SwapReport:
    return SwapReport(update.note.version, "0" * 64, 0.0)


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (altered, r"^the engine does not serve version 1 as the trainer published it .*: 'a' differ$"),
        (skipped, r"^the engine skipped the swap to version 1 .*: it serves version 0$"),
        (of_another_digest, r"^the engine does not serve version 1 .* served 000000000000\)$"),
    ],
)
async def test_nothing_of_a_version_that_is_not_the_announced_one_leaves(
    open_bus: OpenBus, tmp_path: Path, report: Callable[[WeightUpdate], SwapReport], fault: str
) -> None:
    async with inference_worker(open_bus, tmp_path) as worker:
        engine = worker.engine
        await worker.swap(worker.note(0))
        engine.report = report
        assert re.search(fault, (await worker.swap(worker.note(1))).fault)
        engine.say(0, 0, 1)
        engine.say(1, 0, 0)
        assert await worker.until(1) == [(1, 0, [0])]
        engine.report = honest
        assert not (await worker.swap(worker.note(2))).fault
        engine.say(0, 1, 2)
        engine.say(1, 1, 2, finish="stop")
        assert (await worker.until(2))[1:] == [(1, 1, [2])]


async def nothing_like_it() -> list[Any]:
    return [np.array([-1.0, np.nan], np.float32)]


async def test_a_drift_is_reported_and_may_be_a_fault(open_bus: OpenBus, tmp_path: Path) -> None:
    async with inference_worker(open_bus, tmp_path / "warn") as worker:
        worker.engine.score = nothing_like_it
        done = await worker.swap(worker.note(0, CANARY))
        assert (done.fault, done.drift) == ("", Drift(np.inf, np.inf))
        worker.engine.score = cannot
        done = await worker.swap(worker.note(1, CANARY))
        assert (done.fault, done.drift, done.unscored) == ("", None, "it keeps no logits")
    async with inference_worker(open_bus, tmp_path / "stop", on_drift="stop", bound=0.2) as worker:
        worker.engine.score = nothing_like_it
        done = await worker.swap(worker.note(0, CANARY))
        assert re.search(r"canary of version 0 drifts by inf .*inference.canary.bound is 0.2", done.fault)
        worker.engine.score = cannot
        done = await worker.swap(worker.note(1, CANARY))
        assert re.search(r"version 1 was not compared \(it keeps no logits\), but .*on_drift", done.fault)
        worker.engine.say(0, 0, 1)
        worker.engine.say(1, 0, finish="abort")
        assert await worker.until(1) == [(1, 0, [])]


async def test_samples_do_not_wait_for_the_engines_error(open_bus: OpenBus, tmp_path: Path) -> None:
    """k3 of d = 0.5 and 0 nats is 0.106531 and 0."""
    tokens, trained = Array.of(np.ones(3, np.int32)), Array.of(np.ones(2, np.bool_))
    rows = (messages.ScoredRow(tokens, trained, Array.of(np.array([-1.0, -2.0], np.float32))),)
    asked, scored = anyio.Event(), anyio.Event()
    answers: list[SwapDone] = []

    async def shared(message: messages.AskSharedRows) -> SharedRows:
        return SharedRows(rows if message.version else ())

    async def score() -> list[Any]:
        asked.set()
        await scored.wait()
        return [np.array([-0.5, -2.0], np.float32)]

    bounded = {"max_divergence": 0.01}
    async with open_bus("trainer") as trainer, inference_worker(open_bus, tmp_path, bounded) as worker:
        subject = Subjects("test-run").worker("trainer", "trainer-0", "t", "shared_rows")
        await trainer.serve(subject, messages.AskSharedRows, shared)
        worker.engine.score = score

        async def swap() -> None:
            answers.append(await worker.swap(worker.note(1)))

        first = await worker.swap(worker.note(0))
        assert (first.engine_kl, first.rows_unscored) == (None, "")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(swap)
            await asked.wait()
            worker.engine.say(0, 0, 1, finish="stop")
            assert await worker.until(1) == [(0, 0, [1])]
            scored.set()
        assert answers[0].engine_kl == pytest.approx(0.106531 / 2, abs=1e-6)
        worker.engine.score = cannot
        done = await worker.swap(worker.note(2))
        assert (done.fault, done.engine_kl, done.rows_unscored) == ("", None, "it keeps no logits")


# ------------------------------------------------------------------------------------- a whole run


def test_weights_that_are_not_the_announced_ones_end_the_run(start: Start, tmp_path: Path) -> None:
    """Other faults of a swap reach the kernel in the same way: as the `fault` of the worker's answer."""
    body = """
        import msgspec
        from stretto_mock.inference import MockInference

        class make(MockInference):
            async def swap(self, update):
                report = await super().swap(update)
                return msgspec.structs.replace(report, digest="0" * 64) if report.version >= 2 else report
    """
    wrong = write_plugin(tmp_path, "inference", body, "stretto_mock.MockInferenceConfig")
    run = start(f"plugins=[{wrong}]", "inference=mine")
    assert run.end() == 1, run.text()
    summary = run.assert_balanced()
    fault = r"inference-0: the engine does not serve version (\d+) as the trainer "
    found = re.search(fault, summary["reason"])
    assert found, summary["reason"]
    assert 2 <= int(found[1]) <= summary["version"]
    run.assert_nothing_is_left()
