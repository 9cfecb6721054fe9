"""NumPy arrays inside bus messages: raw little-endian bytes with dtype and shape, read without a copy. And
the ids from which a sampler drew each token, as two arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Array", "KeptTokens"]

# The kinds of dtype that may be sent. Object and string arrays would need pickle or guesses.
_KINDS = "biuf"


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"{name[:40]!r} is not a dtype") from error
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of dtype {name[:40]!r} is not accepted in a message")
    return dtype


class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One array in a message. `Array.of(x).numpy()` equals `x`; the result is read-only."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        """Check the parts, also when a message is decoded.

        Raises:
            ValueError: if the dtype is not accepted, or dtype, shape and number of bytes do not match.
        """
        shape, size = self.shape, _dtype(self.dtype).itemsize
        for length in shape:
            size *= length
        if size != self.data.nbytes or (shape and min(shape) < 0):
            raise ValueError(
                f"an array of shape {shape} and dtype {self.dtype!r} has {size} bytes, not {self.data.nbytes}"
            )

    @classmethod
    def of(cls, values: Any, dtype: DTypeLike | None = None) -> Self:
        """Copy `values` (anything that NumPy accepts) into a contiguous little-endian array.

        Raises:
            TypeError: for a dtype that is not boolean, integer or floating point.
        """
        array = np.asarray(values, dtype=dtype)
        own = array.dtype
        if own.kind not in _KINDS:
            raise TypeError(f"cannot send an array of dtype {own}; expected numbers or booleans")
        if not own.isnative or sys.byteorder != "little":
            array = array.astype(own.newbyteorder("<"), copy=False)
        return cls(array.dtype.str, array.shape, memoryview(array.tobytes()))

    def numpy(self) -> NDArray[Any]:
        """Return the array, as a view of the bytes of the message."""
        return np.frombuffer(self.data, dtype=_dtype(self.dtype)).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """For each of n tokens, the ids from which it was drawn; none for a token that was not sampled, or that
    was drawn from the whole vocabulary.

    Under top_p, top_k or min_p a token is drawn from a part of the vocabulary, and its probability is that
    within this part. A trainer has to renormalise over the same ids: the ratio of its probabilities to the
    sampler's otherwise misses the kept mass (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Keep Sampling
    Mask").
    """

    counts: NDArray[np.uint16]
    """(n,) number of ids of each token."""
    ids: NDArray[np.int32]
    """(sum of counts,) the ids, those of the first token first, ascending for each token."""

    @classmethod
    def of(cls, ids: Sequence[NDArray[np.int32]]) -> KeptTokens:
        """Join the ids of some tokens, which ascend for each."""
        counts = np.array([len(each) for each in ids], np.uint16)
        return cls(counts, np.concatenate([np.empty(0, np.int32), *ids]))

    @classmethod
    def read(cls, counts: Array | None, ids: Array | None) -> KeptTokens | None:
        """Return what a message has in these two fields; None if it has none."""
        return None if counts is None or ids is None else cls(counts.numpy(), ids.numpy())

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
