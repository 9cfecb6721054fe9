"""NumPy arrays inside bus messages: raw little-endian bytes with dtype and shape, read without a copy."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Array"]

# The kinds of dtype that may be sent. Object and string arrays would need pickle or guesses.
_KINDS = "biuf"


class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One array in a message. `Array.of(x).numpy()` equals `x`; the result is read-only."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

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
        """Return the array, as a view of the bytes of the message.

        Raises:
            ValueError: if the dtype is not accepted, or dtype, shape and number of bytes do not match.
        """
        dtype = np.dtype(self.dtype)
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of dtype {self.dtype!r} is not accepted in a message")
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0
