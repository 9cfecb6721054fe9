"""The engine's error, measured on a few rows of the last batch that trainer and engine score with the same
weights. The trainer keeps the rows, and inference workers request them after a swap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.messages.inference import ScoredRow
from stretto.engine import TrainingEngine
from stretto.errors import EngineError
from stretto.rl.drift import kl_of_tokens

if TYPE_CHECKING:
    from stretto.rl.batch import Batch

_ROWS = 4
_TRAINED_TOKENS = 64
"""Maximum trained tokens of a row: all rows together cost trainer and engine no more than a few prompts."""
_BOUND = 1.0
"""Maximum of a token in nats, the same as in `bounded_kl`, from which this error is subtracted."""


def choose_rows(rows: Sequence[int]) -> list[int]:
    """Choose at most `_ROWS` rows, evenly spread."""
    return [*rows[:: -(-len(rows) // _ROWS)]]


def score_rows(engine: TrainingEngine, batch: Batch) -> tuple[ScoredRow, ...]:
    """Score each sequence up to its 64th trained token. All ranks call it; only rank 0's result counts."""
    short = _shorten(batch)
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


def engine_kl(rows: Sequence[ScoredRow], logprobs: Sequence[NDArray[np.float32]]) -> float:
    """Return the mean k3 estimate of KL(engine || trainer) over the trained tokens, each at most 1 nat.
    `logprobs` has for each row the engine's (L - 1,) logprobs of its tokens after the first."""
    trained = np.concatenate([row.trained.numpy() for row in rows])
    trainer = np.concatenate([row.logprobs.numpy() for row in rows])[trained]
    kl = float(np.minimum(kl_of_tokens(np.concatenate(logprobs)[trained], trainer), _BOUND).mean())
    if not np.isfinite(kl):
        raise EngineError(
            "rows of the last batch: a logprob of the engine or of the trainer is not a "
            "number; lower training.lr, or compute in float32"
        )
    return kl


def _shorten(batch: Batch) -> Batch:
    """Return each sequence up to and including its 64th trained token."""
    import torch

    from stretto.rl.batch import Batch

    keys = ("tokens", "loss_mask")
    parts = [batch[key].split(batch.lengths) for key in keys]
    lengths = [max([2, *(mask.nonzero().flatten()[:_TRAINED_TOKENS] + 1).tolist()]) for mask in parts[1]]
    cut = [torch.cat([row[:length] for row, length in zip(part, lengths, strict=True)]) for part in parts]
    return Batch(lengths, dict(zip(keys, cut, strict=True)), {})
