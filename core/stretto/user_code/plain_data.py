"""Rows as bytes: msgpack, and the values of Python for which msgpack has no type."""

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast

import msgspec

__all__ = ["decode_row", "encode_row"]

_INTEGER = 1  # extension code of integers that need more than 64 bits
_TYPES: dict[int, type[Any]] = {2: datetime, 3: date, 4: time, 5: timedelta, 6: Decimal}
"""Extension codes of types whose values msgpack carries as JSON text."""
_CODES = {kind: code for code, kind in _TYPES.items()}


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as bytes. Raise TypeError if a value is no plain data."""
    try:
        return msgspec.msgpack.encode(_wrapped(row))
    except OverflowError as error:  # an integer as the key of a map
        raise TypeError(f"a key is too large: {error}") from error


def decode_row(data: bytes) -> dict[str, Any]:
    """Return the row that `encode_row` encoded. Its values have their original types."""
    return msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=_value)


def _wrapped(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_INTEGER, f"{value:x}".encode())
    if (code := _CODES.get(type(value))) is not None:
        return msgspec.msgpack.Ext(code, msgspec.json.encode(value))
    if isinstance(value, Mapping):
        return {key: _wrapped(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_wrapped(item) for item in cast("list[Any]", value)]
    return value


def _value(code: int, data: memoryview) -> Any:
    if code == _INTEGER:
        return int(data.tobytes(), 16)
    return msgspec.json.decode(data, type=_TYPES[code])
