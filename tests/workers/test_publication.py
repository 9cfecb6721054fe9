"""The weights of a step are published beside the next one, as they were when the step ended."""

import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.errors import WeightsError
from stretto.weights import WeightsNote
from stretto.workers import publication
from stretto.workers.context import ComputeThread
from stretto.workers.publication import Publication

DEADLINE_S = 60


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

    def copy(self, version: int, folder: Path) -> None:
        raise AssertionError

    def close(self) -> None:
        self.versions.clear()


def test_the_next_call_does_not_wait_for_the_publisher_and_changes_nothing_of_the_version() -> None:
    engine, publisher, compute = Engine(), SlowPublisher(), ComputeThread()
    note = Publication(engine, "no canary", publisher, compute).begin(3, (), "")  # pyright: ignore[reportArgumentType]
    compute.submit(engine.train).result(DEADLINE_S)  # would not end if it waited for `go`
    publisher.go.set()
    assert note.result(DEADLINE_S) == WeightsNote(3, "", "digest", "no canary")
    assert publisher.versions[3]["weight"].tolist() == [1.0] * 4
    assert engine.weight.tolist() == [2.0] * 4


def test_weights_that_are_too_large_to_copy_hold_the_next_call_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_MOST_COPIED", 8)
    engine, publisher, compute = Engine(), SlowPublisher(), ComputeThread()
    note = Publication(engine, "", publisher, compute).begin(3, (), "")  # pyright: ignore[reportArgumentType]
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
    note = Publication(engine, "", publisher, ComputeThread()).begin(3, (), "")  # pyright: ignore[reportArgumentType]
    with pytest.raises(WeightsError, match="version 3 is not published: weights are not finite: 4 of 4"):
        note.result(DEADLINE_S)
    assert not publisher.versions


def test_a_rank_without_a_publisher_takes_part_and_has_no_note() -> None:
    note = Publication(Engine(), "", None, ComputeThread()).begin(3, (), "")  # pyright: ignore[reportArgumentType]
    assert note.result(DEADLINE_S) is None
