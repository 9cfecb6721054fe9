"""The weights of a step are published beside the next one, as they were when the step ended."""

import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.errors import WeightsError
from stretto.models.version_files import FolderPublisher, open_version
from stretto.weights import WeightsNote
from stretto.workers.context import ComputeThread
from stretto.workers.training import publication
from stretto.workers.training.publication import Publication

DEADLINE_S = 60


def thread() -> ComputeThread:
    return ComputeThread(ThreadPoolExecutor(1))


class Engine:
    """Weights that `train` changes in place, as an optimizer does."""

    def __init__(self, value: float = 1.0) -> None:
        self.weight = torch.full((4,), value)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight

    def train(self) -> None:
        self.weight += 1


class SlowPublisher:
    """A publisher that waits for `go` before it looks at the tensors."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.versions: dict[int, dict[str, Tensor]] = {}

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        assert self.go.wait(DEADLINE_S)
        self.versions[version] = {name: tensor.clone() for name, tensor in tensors}
        return WeightsNote(version, "", "digest")


class FrozenEngine(Engine):
    """Has a weight besides that no step changes."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.trained_weights()
        yield from self.frozen_weights()

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().weights()

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.asked = getattr(self, "asked", 0) + 1
        yield "tower", torch.zeros(2)

    load = forward = save = stop = Engine.train


@pytest.mark.parametrize("freezes", [True, False])
def test_what_no_step_changes_is_published_once_after_a_load(tmp_path: Path, freezes: bool) -> None:
    """A publisher that cannot freeze gets it with every version."""
    engine, slow = FrozenEngine(), SlowPublisher()
    slow.go.set()
    publisher = FolderPublisher(tmp_path / "versions", 1, 1.0) if freezes else slow
    publishing = Publication(engine, "", publisher, thread(), thread())  # pyright: ignore[reportArgumentType]
    places: set[int] = set()
    for version, loaded in enumerate((True, False, False, True)):
        note = publishing.begin(version, (), loaded=loaded).result(DEADLINE_S)
        assert note is not None
        if freezes:
            folder = Path(note.address)
            assert open_version(note, folder).tensors().keys() == {"weight", "tower"}
            places.add((folder / "frozen-00000.safetensors").stat().st_ino)
        else:
            assert slow.versions[version].keys() == {"weight", "tower"}
    assert engine.asked == 2
    assert len(places) <= 2


def test_the_next_call_does_not_wait_for_the_publisher_and_changes_nothing_of_the_version() -> None:
    engine, publisher, compute = Engine(), SlowPublisher(), thread()
    note = Publication(engine, "no canary", publisher, compute, thread()).begin(3, ())  # pyright: ignore[reportArgumentType]
    compute.submit(engine.train).result(DEADLINE_S)  # would not end if it waited for `go`
    publisher.go.set()
    published = note.result(DEADLINE_S)
    assert published is not None
    assert published == WeightsNote(3, "", "digest", "no canary", publish_s=published.publish_s)
    assert publisher.versions[3]["weight"].tolist() == [1.0] * 4
    assert engine.weight.tolist() == [2.0] * 4


def test_weights_that_are_too_large_to_copy_hold_the_next_call_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_MOST_COPIED", 8)
    engine, publisher, compute = Engine(), SlowPublisher(), thread()
    note = Publication(engine, "", publisher, compute, thread()).begin(3, ())  # pyright: ignore[reportArgumentType]
    trained = compute.submit(engine.train)
    assert not trained.done()
    publisher.go.set()
    trained.result(DEADLINE_S)
    assert note.result(DEADLINE_S) is not None
    assert publisher.versions[3]["weight"].tolist() == [1.0] * 4


def test_weights_that_are_not_finite_are_not_published() -> None:
    publisher = SlowPublisher()
    publisher.go.set()
    engine = Engine(float("nan"))
    note = Publication(engine, "", publisher, thread(), thread()).begin(3, ())  # pyright: ignore[reportArgumentType]
    with pytest.raises(WeightsError, match="version 3 is not published: weights are not finite: 4 of 4"):
        note.result(DEADLINE_S)
    assert not publisher.versions


def test_a_rank_without_a_publisher_takes_part_and_has_no_note() -> None:
    note = Publication(Engine(), "", None, thread(), thread()).begin(3, ())  # pyright: ignore[reportArgumentType]
    assert note.result(DEADLINE_S) is None
