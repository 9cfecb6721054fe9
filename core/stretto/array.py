"""NumPy arrays inside bus messages: raw little-endian bytes with dtype and shape, read without a copy."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Array"]

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
        size = _dtype(self.dtype).itemsize * math.prod(self.shape)
        if size != self.data.nbytes or min(self.shape, default=0) < 0:
            raise ValueError(
                f"an array of shape {self.shape} and dtype {self.dtype!r} has {size} bytes, not "
                f"{self.data.nbytes}"
            )

    @classmethod
    def of(cls, values: Any, dtype: DTypeLike | None = None) -> Self:
        """Copy `values` (anything that NumPy accepts) into a contiguous little-endian array.

        Raises:
            TypeError: for a dtype that is not boolean, integer or floating point.
        """
        array = np.asarray(values, dtype=dtype)
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"cannot send an array of dtype {array.dtype}; expected numbers or booleans")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(array.dtype.str, array.shape, memoryview(array.tobytes()))

    def numpy(self) -> NDArray[Any]:
        """Return the array, as a view of the bytes of the message."""
        return np.frombuffer(self.data, dtype=_dtype(self.dtype)).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0
