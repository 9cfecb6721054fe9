"""The rows of a batch: read ahead of the step, joined in the batch's order."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sample_messages import trajectories
from stretto.bus.messages.tickets import TrajectoryBundle
from stretto.bus.messages.training import RowRef
from stretto.workers.training.batch_store import BatchStore


class Log:
    """A store with bundles of two rows by sequence number, which counts how often each is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    async def read_some(
        self, stream: str, subject: str, sequences: set[int], kind: type[TrajectoryBundle]
    ) -> dict[int, TrajectoryBundle]:
        self.reads += sorted(sequences)
        return {each: trajectories(each, version=each, reward=each / 4) for each in sequences}


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def store(log: Log) -> BatchStore:
    graph = SimpleNamespace(samples=True, source=None, writers={})
    names = SimpleNamespace(log_stream="log", trajectories="trajectories")
    context: Any = SimpleNamespace(bus=SimpleNamespace(store=log), names=names)
    placement: Any = SimpleNamespace(graph=graph)
    return BatchStore(context, placement, {})


def refs(*tickets: int) -> tuple[RowRef, ...]:
    return tuple(
        RowRef(f"{ticket}/1/{index}", ticket, index, ticket, 4) for ticket in tickets for index in (0, 1)
    )


async def test_rows_are_joined_in_the_order_asked_for_with_the_dtypes_of_training(store: BatchStore) -> None:
    await store.begin(0, refs(2, 3))
    batch = await store.batch([3, 0], (), media=False)
    assert batch.lengths == [4, 4]
    assert batch["versions"].tolist() == [-1, -1, 3, 3, -1, -1, 2, 2]
    assert batch["behaviour_logprobs"].tolist() == [0, 0, -0.5, -0.25] * 2
    assert (batch["group"].tolist(), batch["sample"].tolist()) == ([3, 2], [1, 0])
    assert batch["rewards"].tolist() == [0.75, 0.5]
    dtypes = {name: column.dtype for name, column in (batch.tokens | batch.sequences).items()}
    integers = dict.fromkeys(("tokens", "versions", "group", "sample"), torch.int64)
    floats = {"behaviour_logprobs": torch.float32, "rewards": torch.float64}
    assert dtypes == integers | floats | dict.fromkeys(("loss_mask", "truncated"), torch.bool)


async def test_announced_rows_are_read_once_and_dropped_when_not_needed(store: BatchStore, log: Log) -> None:
    await store.prefetch(refs(1), complete=False)
    await store.prefetch(refs(2), complete=False)
    assert log.reads == [1, 2]
    await store.begin(0, refs(1))
    await store.batch([0, 1], (), media=False)
    assert log.reads == [1, 2]
    await store.prefetch(refs(3), complete=True)  # 2 was announced, but is not needed any more
    store.end()
    await store.begin(1, refs(2, 3))
    await store.batch([0, 2], (), media=False)
    assert log.reads == [1, 2, 3, 2]
