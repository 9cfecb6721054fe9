"""One kept trajectory as plain values, and the digest over the kept trajectories of a group.

The rollout worker puts the digest into the log with the group's outcome, so that readers can check it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.tickets import KeptText, TicketRecord, WireTrajectory

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True)
class KeptSample:
    """All kept values of one trajectory."""

    id: str
    """`ticket/attempt/index`; `ticket/attempt` for an attempt without a trajectory."""
    index: int | None
    """Position of the trajectory in its group; None if there is no trajectory."""
    sample: int | None
    """Index of the ticket's sample to which the trajectory belongs."""
    row: int
    """Index in the dataset."""
    reward: float | None
    """None if the attempt failed before it was scored."""
    metrics: str
    """A JSON object: parts of the reward, and the workflow's counts."""
    finish: str
    engine: str
    prompt_text: str
    text: str
    messages: str
    """The conversation as a JSON list, with its tool calls; empty if the workflow had none."""
    dataset_row: str
    """A JSON object, with the expected answer."""
    images: str | None
    """`WireTrajectory.images` as a JSON list; None: all images of the row."""
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    kept_counts: NDArray[np.uint16] | None = None
    """As in `WireTrajectory`."""
    kept_ids: NDArray[np.int32] | None = None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> KeptSample:
        """Return the sample in a row of `samples` segments."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__} | arrays_in(row))


_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
}
_KEPT: dict[str, Any] = {"kept_counts": np.uint16, "kept_ids": np.int32}
_FACTS = [name for name in KeptSample.__dataclass_fields__ if name not in (*_ARRAYS, *_KEPT, "images")]
"""Fields in the digest of every sample. Older runs have no images, and most runs have no kept tokens."""


def arrays_in(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of tokens in a row of `samples` segments as arrays, without those that are None."""
    dtypes = _ARRAYS | _KEPT
    return {name: np.asarray(row[name], dtypes[name]) for name in dtypes if row[name] is not None}


def kept_samples(record: TicketRecord, trajectories: Sequence[WireTrajectory]) -> list[KeptSample]:
    """Return the kept samples of an attempt, in the order of its trajectories; one sample without tokens if
    there is no trajectory. ValueError if arrays differ in shape, or an id is malformed."""
    if not trajectories:
        return [_kept(record, None, None)]
    by_index = {int(trajectory.id.rpartition("/")[2]): trajectory for trajectory in trajectories}
    return [_kept(record, index, by_index[index]) for index in sorted(by_index)]


def digest_of(samples: Iterable[KeptSample]) -> str:
    """Return the hex SHA-256 of a kept group."""
    hashed = hashlib.sha256()
    for sample in samples:
        facts = [getattr(sample, name) for name in _FACTS]
        if sample.images is not None:
            facts.append(sample.images)
        dtypes = _ARRAYS if sample.kept_ids is None else _ARRAYS | _KEPT
        arrays = (np.ascontiguousarray(getattr(sample, name), dtypes[name]).tobytes() for name in dtypes)
        for piece in (_encode(facts), *arrays):
            hashed.update(len(piece).to_bytes(8, "little"))
            hashed.update(piece)
    return hashed.hexdigest()


def _kept(record: TicketRecord, index: int | None, trajectory: WireTrajectory | None) -> KeptSample:
    text = KeptText() if index is None or index >= len(record.texts) else record.texts[index]
    row_fields: dict[str, Any] = {
        "row": record.row,
        "prompt_text": record.prompt if text.prompt is None else text.prompt,
        "text": text.text,
        "messages": text.messages,
        "dataset_row": record.dataset_row,
    }
    if trajectory is None:
        empty_fields: dict[str, Any] = {"index": None, "sample": None, "reward": None, "images": None}
        empty_fields |= {name: np.empty(0, dtype) for name, dtype in _ARRAYS.items()}
        return KeptSample(id=record.name, metrics="{}", finish="", engine="", **row_fields, **empty_fields)
    return KeptSample(
        id=trajectory.id,
        index=index,
        sample=trajectory.sample,
        reward=trajectory.reward if math.isfinite(trajectory.reward) else None,
        metrics=_encode(trajectory.metrics).decode(),
        finish=trajectory.finish,
        engine=trajectory.engine,
        images=None if trajectory.images is None else _encode(trajectory.images).decode(),
        **row_fields,
        **_arrays_of(trajectory),
    )


def _arrays_of(trajectory: WireTrajectory) -> dict[str, Any]:
    arrays = {name: getattr(trajectory, name).numpy().astype(dtype) for name, dtype in _ARRAYS.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"{trajectory.id}: arrays of the shapes {sorted(shapes)}")
    kept_tokens = trajectory.kept
    if kept_tokens is None:
        return arrays
    if len(kept_tokens) != len(trajectory.tokens):
        raise ValueError(f"{trajectory.id}: kept tokens of {len(kept_tokens)} tokens")
    return arrays | {"kept_counts": kept_tokens.counts, "kept_ids": kept_tokens.ids}
