"""How far an engine's logprobs are from the trainer's, by depth of context. Needs no torch."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Drift", "drift_by_depth", "kl_of_tokens", "quarters"]


class Drift(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Difference between an engine's and the trainer's logprobs of the same tokens, at the same version."""

    mean: float
    """Mean of |Δ| over the tokens, in nats; infinite if either side returned a value that is not a number."""
    max: float

    def within(self, bound: float) -> bool:
        """Return whether the mean is at most `bound`."""
        return self.mean <= bound


def quarters(depth: int) -> list[int]:
    """Return the edges of the quarters of a depth, from 0 to `depth`, for `drift_by_depth`."""
    return [depth * quarter // 4 for quarter in range(5)]


def drift_by_depth(
    expected: Sequence[NDArray[np.float32]],
    found: Sequence[NDArray[np.float32]],
    edges: Sequence[int],
    first: Sequence[int] | None = None,
) -> list[Drift | None]:
    """Compare two sides' logprobs of the same sequences.

    Args:
        expected: (n_i,) of one side, for consecutive tokens of each sequence.
        found: (n_i,) of the other side.
        edges: K + 1 ascending depths. The depth of a token is the number of tokens before it.
        first: depth of each sequence's first compared token; by default 1.

    Returns:
        The drift of the tokens at depths above edge k and up to edge k + 1; None where there are none.
    """
    begins = [1] * len(expected) if first is None else first
    depths = np.concatenate(
        [begin + np.arange(len(part)) for begin, part in zip(begins, expected, strict=True)]
    )
    with np.errstate(invalid="ignore"):
        differences = np.abs(np.concatenate(found).astype(np.float64) - np.concatenate(expected))
    differences = np.nan_to_num(differences, nan=np.inf, posinf=np.inf)
    bins = np.searchsorted(edges, depths) - 1
    parts = [differences[bins == number] for number in range(len(edges) - 1)]
    return [Drift(float(part.mean()), float(part.max())) if len(part) else None for part in parts]


def kl_of_tokens(sampler: NDArray[np.float32], trainer: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the k3 estimate of KL(sampler || trainer) of each token that the sampler drew, in nats (Schulman
    2020, "Approximating KL divergence"). Both are (n,) logprobs. The estimate is not a number where they are
    not."""
    log_ratio = trainer.astype(np.float64) - sampler
    with np.errstate(over="ignore", invalid="ignore"):
        return np.expm1(log_ratio) - log_ratio
