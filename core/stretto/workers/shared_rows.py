"""Rows of the last batch that trainer and engine both score under the same weights: the engine's error.

They lie with the trainer; the workers beside engines ask it for them when they have swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.messages import ScoredRow
from stretto.engine import TrainingEngine
from stretto.errors import EngineError

if TYPE_CHECKING:
    from stretto.rl.batch import Batch

__all__ = ["choose_rows", "engine_kl", "score_rows"]

_ROWS = 4
_TRAINED_TOKENS = 64
"""Of each row: together they cost either side no more than a few prompts."""
_BOUND = 1.0
"""Nats that a token counts at most, as in `stretto.rl.functional.bounded_kl`, to which it is compared."""


def choose_rows(rows: Sequence[int]) -> list[int]:
    """A few rows, evenly spread."""
    return [*rows[:: -(-len(rows) // _ROWS)]]


def score_rows(engine: TrainingEngine, batch: Batch) -> tuple[ScoredRow, ...]:
    """What the engine's model says of each sequence up to its 64th trained token. Called in all ranks of the
    group; rank 0's answer counts."""
    short = _beginnings(batch)
    columns = zip(
        short["tokens"].split(short.lengths),
        short["loss_mask"].split(short.lengths),
        engine.forward(short, temperature=1.0).split(short.lengths),
        strict=True,
    )
    return tuple(
        ScoredRow(
            Array.of(tokens.numpy(), np.int32),
            Array.of(trained[1:].numpy(), np.bool_),
            Array.of(logprobs[1:].numpy(), np.float32),
        )
        for tokens, trained, logprobs in columns
    )


def engine_kl(rows: Sequence[ScoredRow], found: Sequence[NDArray[np.float32]]) -> float:
    """Mean k3 estimate of KL(engine || trainer) over the trained tokens, each at most 1 nat.

    Args:
        found: for each row, the engine's (L - 1,) logprobs of its tokens after the first.

    Raises:
        EngineError: if a side gave what is no number.
    """
    trained = np.concatenate([row.trained.numpy() for row in rows])
    trainer = np.concatenate([row.logprobs.numpy() for row in rows])[trained].astype(np.float64)
    d = np.concatenate(found)[trained].astype(np.float64) - trainer
    with np.errstate(over="ignore", invalid="ignore"):
        kl = float(np.minimum(np.expm1(-d) + d, _BOUND).mean())
    if not np.isfinite(kl):
        raise EngineError("rows of the last batch: a logprob of the engine or of the trainer is no number")
    return kl


def _beginnings(batch: Batch) -> Batch:
    """Each sequence up to and with its 64th trained token."""
    import torch

    from stretto.rl.batch import Batch

    keys = ("tokens", "loss_mask")
    parts = [batch[key].split(batch.lengths) for key in keys]
    lengths = [max([2, *(mask.nonzero().flatten()[:_TRAINED_TOKENS] + 1).tolist()]) for mask in parts[1]]
    cut = [torch.cat([row[:length] for row, length in zip(part, lengths, strict=True)]) for part in parts]
    return Batch(lengths, dict(zip(keys, cut, strict=True)), {})
