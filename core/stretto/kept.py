"""The tokens that a sampler kept: from which ids each token of an answer was drawn.

Under top_p, top_k or min_p a token is drawn from a part of the vocabulary, and its probability is that within
this part. A trainer has to renormalise over the same ids: the ratio of its probabilities to the sampler's
otherwise misses the kept mass (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Keep Sampling Mask").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeptTokens"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """For each of n tokens, the ids from which it was drawn; none for a token that was not sampled, or that
    was drawn from the whole vocabulary."""

    counts: NDArray[np.uint16]
    """(n,) number of ids of each token."""
    ids: NDArray[np.int32]
    """(sum of counts,) the ids, those of the first token first, ascending for each token."""

    @classmethod
    def none(cls, length: int) -> KeptTokens:
        """Return what `length` tokens have that were not sampled."""
        return cls(np.zeros(length, np.uint16), np.empty(0, np.int32))

    @classmethod
    def concat(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Return the tokens of all parts, in order."""
        return cls(
            np.concatenate([part.counts for part in parts]), np.concatenate([part.ids for part in parts])
        )

    def __len__(self) -> int:
        return len(self.counts)

    def part(self, start: int, stop: int | None = None) -> KeptTokens:
        """Return what the tokens from `start` to `stop` have."""
        before, own = self.counts[:start], self.counts[start:stop]
        first = int(before.sum(dtype=np.int64))
        return KeptTokens(own, self.ids[first : first + int(own.sum(dtype=np.int64))])

    def at(self, places: NDArray[np.int64]) -> KeptTokens:
        """Return what the tokens at these places have, which ascend."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[places] = True
        return KeptTokens(self.counts[chosen], self.ids[np.repeat(chosen, self.counts)])

    def fault(self, tokens: NDArray[np.int32], sampled: NDArray[np.bool_]) -> str:
        """Return what is wrong with this as the kept tokens of an answer's tokens, (n,); empty if nothing.

        Args:
            sampled: (n,) the tokens that the policy sampled. Each must be one of its own kept ids, and the
                others must have none.
        """
        if self.counts.shape != tokens.shape or self.ids.shape != (int(self.counts.sum(dtype=np.int64)),):
            return f"{len(self.ids)} ids for {len(self.counts)} of {len(tokens)} tokens"
        if not np.array_equal(self.counts > 0, sampled):
            return "not each sampled token has kept tokens"
        owner = np.repeat(np.arange(len(tokens)), self.counts)
        own = np.bincount(owner[self.ids == tokens[owner]], minlength=len(tokens))
        if not (own[sampled] == 1).all():
            return "a sampled token is not one of its kept tokens"
        return ""
