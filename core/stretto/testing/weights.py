"""The contract of weight transports as tests."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from stretto import weights
from stretto.component import Kind
from stretto.errors import NoAnswer, Refused, StrettoError, WeightsError
from stretto.models.digest import digest_of, hashes_of
from stretto.models.version_files import open_version
from stretto.testing.component import ComponentConformance, ComponentUnderTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WeightsConformance"]

_Handler = Callable[[bytes], Awaitable[bytes]]


def _tensors(version: int) -> dict[str, Tensor]:
    """Return tensors of several dtypes, one of them larger than a message."""
    import torch

    return {
        "model.embed.weight": torch.arange(40_000, dtype=torch.float32).reshape(400, 100) + version,
        "model.norm.weight": torch.full((7,), 0.5 + version).bfloat16(),
        "model.steps": torch.tensor([version, 2**40]),
        "lm_head.weight": torch.full((3, 1, 2), -float(version), dtype=torch.float16),
    }


def _small_steps(version: int) -> dict[str, Tensor]:
    """Return 16-bit tensors. Few values differ from the version before: a transport may send only these."""
    import torch

    generator = torch.Generator().manual_seed(version)
    weight = torch.arange(40_000, dtype=torch.int32).reshape(400, 100).bfloat16()
    weight[:, torch.randint(0, 100, (1,), generator=generator)] += 1 + version
    return {
        "model.embed.weight": weight,
        "model.norm.weight": torch.full((7,), 0.5 + version // 8).bfloat16(),
        "model.mask": torch.tensor([True, version % 2 == 0, False]),
    }


class _LocalWire:
    """A `stretto.weights.Wire` between two ends in this process."""

    limit = 2**16

    def __init__(self, handlers: dict[str, _Handler], address: str) -> None:
        self._handlers = handlers
        self.address = address

    def answer(self, handler: _Handler) -> None:
        self._handlers[self.address] = handler

    async def ask(self, address: str, question: bytes, *, deadline_s: float) -> bytes:
        if address not in self._handlers:
            raise NoAnswer(address, address, deadline_s)
        with anyio.fail_after(deadline_s):
            try:
                answer = await self._handlers[address](bytes(question))
            except StrettoError as error:
                raise Refused(address, str(error)) from error
        assert len(answer) <= self.limit, f"an answer has {len(answer)} bytes; the limit is {self.limit}"
        return bytes(answer)


class _Ends:
    """A run's publisher, used from the test's thread, and subscribers in their own event loop."""

    def __init__(self, under_test: ComponentUnderTest, portal: BlockingPortal) -> None:
        self._under_test = under_test
        self._portal = portal
        self._run = f"conformance-{secrets.token_hex(4)}"  # folders have its name; tests run side by side
        self._handlers: dict[str, _Handler] = {}
        self._subscribers: list[weights.Subscriber] = []
        transport = self.transport("trainer-0")
        self.publisher: weights.Publisher = portal.call(transport.publisher, self._wire("trainer-0"))

    def transport(self, worker: str) -> weights.WeightsTransport:
        return self._portal.call(lambda: self._under_test.make(run=self._run, worker=worker))

    def subscriber(self) -> weights.Subscriber:
        worker = f"inference-{len(self._subscribers)}"
        self._subscribers.append(self._portal.call(self.transport(worker).subscriber, self._wire(worker)))
        return self._subscribers[-1]

    def publish(
        self,
        version: int,
        *needed: int,
        frozen: Collection[str] = (),
        tensors_of: Callable[[int], Mapping[str, Tensor]] = _tensors,
    ) -> weights.WeightsNote:
        tensors = iter([pair for pair in tensors_of(version).items() if pair[0] not in frozen])
        return self.publisher.publish(version, tensors, needed)

    def freeze(self, *names: str) -> None:
        assert isinstance(self.publisher, weights.FreezingPublisher)
        self.publisher.freeze(iter([(name, _tensors(0)[name]) for name in names]))

    def receive(self, subscriber: weights.Subscriber, note: weights.WeightsNote) -> weights.WeightUpdate:
        return self._portal.call(subscriber.receive, note)

    def assert_arrives(
        self,
        subscriber: weights.Subscriber,
        note: weights.WeightsNote,
        frozen: Collection[str] = (),
        tensors_of: Callable[[int], Mapping[str, Tensor]] = _tensors,
    ) -> None:
        tensors = {**tensors_of(note.version)} | {name: _tensors(0)[name] for name in frozen}
        update = self.receive(subscriber, note)
        try:
            assert update.note.version == note.version, f"received version {update.note.version} for {note}"
            assert dict(update.hashes()) == hashes_of(tensors), f"the hashes of version {note.version} differ"
            assert digest_of(update.hashes().items()) == note.digest, (
                "the digest of the hashes is not the note's"
            )
            _assert_equal(update.tensors(), tensors)
        finally:
            update.close()

    def assert_refused(self, subscriber: weights.Subscriber, note: weights.WeightsNote, what: str) -> None:
        try:
            update = self.receive(subscriber, note)
        except WeightsError:
            return
        update.close()
        raise AssertionError(f"`receive` returned {what}; expected a WeightsError")

    def close(self) -> None:
        for subscriber in self._subscribers:
            self._portal.call(subscriber.close)
        self.publisher.close()
        self.transport("kernel").clean()

    def _wire(self, worker: str) -> _LocalWire:
        return _LocalWire(self._handlers, f"{worker}/nonce")


@contextmanager
def _ends_of(under_test: ComponentUnderTest) -> Generator[_Ends]:
    with start_blocking_portal("asyncio") as portal:
        ends = _Ends(under_test, portal)
        try:
            yield ends
        finally:
            ends.close()


class WeightsConformance(ComponentConformance):
    """The contract of `stretto.weights.WeightsTransport`: an engine gets exactly the tensors that the trainer
    has published, or an error. Needs torch."""

    kind: ClassVar[Kind] = "weights"

    @pytest.fixture
    def ends(self, under_test: ComponentUnderTest) -> Iterator[_Ends]:
        """The publisher of a run, and its subscribers."""
        with _ends_of(under_test) as ends:
            yield ends

    @classmethod
    def stored(cls, note: weights.WeightsNote, section: Mapping[str, Any]) -> list[Path]:
        """Return the files with the tensors of a published version, which a test damages. By default, they
        are in the folder at the note's address."""
        del section
        return sorted(Path(note.address).glob("*.safetensors"))

    def test_every_version_arrives_as_it_was_published(self, ends: _Ends) -> None:
        """Two engines receive every tensor with its hash."""
        subscribers = [ends.subscriber(), ends.subscriber()]
        for version in range(4):
            note = ends.publish(version)
            assert note.version == version, f"version {version} has a note of version {note.version}"
            for subscriber in subscribers:
                ends.assert_arrives(subscriber, note)

    def test_frozen_tensors_are_a_part_of_every_version(self, ends: _Ends) -> None:
        """Tested with an engine that gets every version, and with later ones. `freeze` is called again."""
        names = ("model.embed.weight", "model.steps")
        if not isinstance(ends.publisher, weights.FreezingPublisher):
            pytest.skip("its publisher takes all tensors with every version")
        subscriber = ends.subscriber()
        ends.freeze(*names)
        for version in range(3):
            note = ends.publish(version, frozen=names)
            for reader in (subscriber, ends.subscriber()):
                ends.assert_arrives(reader, note, names)
        ends.freeze()
        ends.assert_arrives(subscriber, ends.publish(3))

    def test_a_late_engine_gets_the_newest_version(self, ends: _Ends) -> None:
        """Publishing does not wait for the engine. Fetching a removed version raises WeightsError."""
        notes = [ends.publish(version) for version in range(8)]
        subscriber = ends.subscriber()
        ends.assert_arrives(subscriber, notes[-1])
        with suppress(WeightsError):  # it may be gone, but it must not be another version
            ends.assert_arrives(subscriber, notes[0])

    def test_small_steps_arrive_as_they_were_published(self, ends: _Ends) -> None:
        """Tested with an engine that gets every version, one that gets some, and engines that come later."""
        always, sometimes = ends.subscriber(), ends.subscriber()
        note = ends.publish(0, tensors_of=_small_steps)
        for version in range(40):
            note = ends.publish(version, tensors_of=_small_steps) if version else note
            readers = [always, *([sometimes] if version % 7 == 0 else [])]
            readers += [ends.subscriber()] if version in (1, 12, 33) else []
            for subscriber in readers:
                ends.assert_arrives(subscriber, note, tensors_of=_small_steps)
        ends.assert_arrives(always, note, tensors_of=_small_steps)  # again
        for version in (38, 39, 40):  # lost steps are trained again, with other weights
            note = ends.publish(version)
            ends.assert_arrives(always, note)
        note = ends.publish(41, tensors_of=_small_steps)
        ends.assert_arrives(always, note, tensors_of=_small_steps)

    def test_a_damaged_copy_of_an_older_version_does_no_harm(self, ends: _Ends, tmp_path: Path) -> None:
        """The subscriber then fetches all tensors again. Needed versions stay and can be copied."""
        subscriber = ends.subscriber()
        notes: list[weights.WeightsNote] = []
        for version in range(6):
            notes.append(ends.publish(version, 2, tensors_of=_small_steps))
            update = ends.receive(subscriber, notes[-1])
            folder = update.folder
            update.close()
            has_own_copy = folder is not None and folder.exists() and folder != Path(notes[-1].address)
            if version == 3 and folder is not None and has_own_copy:
                file = sorted(folder.glob("*.safetensors"))[-1]
                file.write_bytes(file.read_bytes()[:-2] + b"??")
        ends.assert_arrives(subscriber, notes[-1], tensors_of=_small_steps)
        ends.assert_arrives(ends.subscriber(), notes[2], tensors_of=_small_steps)
        for version in (2, 5):
            copy = tmp_path / f"copy-{version}"
            ends.publisher.copy(version, copy)
            _assert_equal(open_version(notes[version], copy).tensors(), _small_steps(version))

    def test_a_version_can_be_copied(self, ends: _Ends, tmp_path: Path) -> None:
        """Checkpoints need this. Copying a version that was never published raises WeightsError."""
        note = ends.publish(2)
        ends.publisher.copy(2, tmp_path / "copy")
        _assert_equal(open_version(note, tmp_path / "copy").tensors(), _tensors(2))
        with pytest.raises(WeightsError):
            ends.publisher.copy(3, tmp_path / "other")

    def test_other_weights_than_the_announced_ones_are_refused(self, ends: _Ends) -> None:
        """The digest of the note decides. The subscriber then continues with the right one."""
        note = ends.publish(0)
        subscriber = ends.subscriber()
        wrong = msgspec.structs.replace(note, digest="0" * len(note.digest))
        ends.assert_refused(subscriber, wrong, "weights with another digest than the note's")
        ends.assert_arrives(subscriber, note)

    def test_damaged_weights_are_refused(self, ends: _Ends, section: Mapping[str, Any]) -> None:
        """A single wrong bit in one tensor is enough."""
        note = ends.publish(0)
        files = self.stored(note, section)
        if not files:
            pytest.skip("it names no files with the tensors of a version (`stored`)")
        data = bytearray(files[-1].read_bytes())
        data[-1] ^= 1
        files[-1].write_bytes(data)
        ends.assert_refused(ends.subscriber(), note, "damaged weights")

    def test_nothing_is_left_after_the_end(self, under_test: ComponentUnderTest) -> None:
        """No version and no file in the run's folder is left, also when a publisher was killed."""
        with _ends_of(under_test) as ends:
            note = ends.publish(0)
            ends.transport("kernel").clean()
            ends.assert_refused(ends.subscriber(), note, "a version that `clean` has removed")
        files = [file for file in under_test.folder.rglob("*") if file.is_file()]
        assert not files, f"{files[0]} is left after `close` and `clean`"


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    import torch

    assert found.keys() == expected.keys(), f"the version has the tensors {sorted(found)}"
    for name, tensor in expected.items():
        same = found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert same, f"tensor {name!r} is not the published one"
