"""NumPy arrays inside bus messages: raw little-endian bytes with dtype and shape, read without a copy.
Also the ids from which a sampler drew each token, as two arrays."""

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
        original = array.dtype
        if original.kind not in _KINDS:
            raise TypeError(f"cannot send an array of dtype {original}; expected numbers or booleans")
        if not original.isnative or sys.byteorder != "little":
            array = array.astype(original.newbyteorder("<"), copy=False)
        return cls(array.dtype.str, array.shape, memoryview(array.tobytes()))

    def numpy(self) -> NDArray[Any]:
        """Return the array, as a view of the bytes of the message."""
        return np.frombuffer(self.data, dtype=_dtype(self.dtype)).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """For each of n tokens, the ids from which it was drawn; no ids for a token that was not sampled, or
    that was drawn from the whole vocabulary.

    Under top_p, top_k or min_p a token is drawn from a part of the vocabulary, and its probability is
    normalised over this part. A trainer has to renormalise over the same ids: otherwise the ratio of its
    probabilities to the sampler's misses the kept mass (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Keep
    Sampling Mask").
    """

    counts: NDArray[np.uint16]
    """(n,) number of ids of each token."""
    ids: NDArray[np.int32]
    """(sum of counts,) the ids of all tokens, token after token; the ids of each token ascend."""

    @classmethod
    def of(cls, ids: Sequence[NDArray[np.int32]]) -> KeptTokens:
        """Join the ids of several tokens. The ids of each token must ascend."""
        counts = np.array([len(token_ids) for token_ids in ids], np.uint16)
        return cls(counts, np.concatenate([np.empty(0, np.int32), *ids]))

    @classmethod
    def read(cls, counts: Array | None, ids: Array | None) -> KeptTokens | None:
        """Return the kept tokens in these two fields of a message; None if the fields are empty."""
        return None if counts is None or ids is None else cls(counts.numpy(), ids.numpy())

    @classmethod
    def none(cls, length: int) -> KeptTokens:
        """Return the kept tokens of `length` tokens that were not sampled: no ids."""
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
        """Return the kept tokens of the tokens from `start` to `stop`."""
        earlier, counts = self.counts[:start], self.counts[start:stop]
        first = int(earlier.sum(dtype=np.int64))
        return KeptTokens(counts, self.ids[first : first + int(counts.sum(dtype=np.int64))])

    def at(self, places: NDArray[np.int64]) -> KeptTokens:
        """Return the kept tokens of the tokens at these ascending indices."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[places] = True
        return KeptTokens(self.counts[chosen], self.ids[np.repeat(chosen, self.counts)])

    def fault(self, tokens: NDArray[np.int32], sampled: NDArray[np.bool_]) -> str:
        """Return why these cannot be the kept tokens of an answer's tokens, (n,); empty if they can.

        Args:
            sampled: (n,) the tokens that the policy sampled. Each must be one of its own kept ids; other
                tokens must have no kept ids.
        """
        if self.counts.shape != tokens.shape or self.ids.shape != (int(self.counts.sum(dtype=np.int64)),):
            return f"{len(self.ids)} ids for {len(self.counts)} of {len(tokens)} tokens"
        if not np.array_equal(self.counts > 0, sampled):
            return "not each sampled token has kept tokens"
        owner = np.repeat(np.arange(len(tokens)), self.counts)
        matches = np.bincount(owner[self.ids == tokens[owner]], minlength=len(tokens))
        if not (matches[sampled] == 1).all():
            return "a sampled token is not one of its kept tokens"
        return ""
