"""Numpy arrays inside bus messages: raw little-endian bytes with dtype and shape, read without a copy."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Array"]

# What may travel. Object and string arrays would need pickle or guesswork, so they do not.
_KINDS = "biuf"


class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One array on the wire. `Array.of(x).numpy()` equals `x`; the result is read-only."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, values: Any, dtype: DTypeLike | None = None) -> Self:
        """Copy `values` (anything numpy takes), contiguous and little-endian.

        Raises:
            TypeError: for a dtype that is not boolean, integer or floating point.
        """
        array = np.asarray(values, dtype=dtype)
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {array.dtype} do not travel; expected numbers or booleans")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(array.dtype.str, array.shape, memoryview(array.tobytes()))

    def numpy(self) -> NDArray[Any]:
        """The array, a view of the message's own bytes.

        Raises:
            ValueError: if dtype, shape and number of bytes do not fit together.
        """
        dtype = np.dtype(self.dtype)
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of dtype {self.dtype!r} is not accepted from the wire")
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0
