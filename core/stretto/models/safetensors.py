"""safetensors files without torch: find the tensors of a file, and write the header of a new file.

The format: the length of a JSON header (8 bytes, little-endian), the header, the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from stretto.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FLOATS",
    "Place",
    "cast_file",
    "fault_of_files",
    "layout_of",
    "places",
    "places_in",
    "save_tensors",
    "write_header",
]

T = TypeVar("T")

_DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
}
"""The format's name of a dtype -> the name that torch and numpy use, and the bits of an element."""
FLOATS: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The format's name of a dtype of weights -> NumPy's dtype."""
_FORMAT_NAMES = {name: format_name for format_name, (name, _) in _DTYPES.items()}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""In bytes; the largest header that the safetensors library reads."""


@dataclass(frozen=True)
class Place:
    """The location of a tensor's bytes in a file."""

    name: str
    dtype: str
    """The format's name of the dtype, such as `F32`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int
    """In bytes."""

    @property
    def dtype_name(self) -> str:
        """The name that torch and numpy use, such as `float32`."""
        return _DTYPES[self.dtype][0]

    def read(self) -> bytes:
        """Return the bytes of the tensor, little-endian."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


class _IndexFile(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def layout_of(tensors: Mapping[str, Tensor]) -> list[Place]:
    """Return the places of tensors in a file without a header: `start` counts from the first tensor."""
    layout: list[Place] = []
    start = 0
    for name, tensor in tensors.items():
        dtype = _FORMAT_NAMES[str(tensor.dtype).removeprefix("torch.")]
        layout.append(Place(name, dtype, tuple(tensor.shape), Path(), start, tensor.nbytes))
        start += tensor.nbytes
    return layout


def places(file: Path) -> list[Place]:
    """Return the tensors of a file, in the order of their bytes. Raise OSError if it cannot be read, and
    WeightsError, naming file and tensor, if it is damaged."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_size > min(size - 8, _MAX_HEADER):
            raise _damaged(file, f"it has {size} bytes and announces a header of {header_size} bytes")
        header = _decode(stream.read(header_size), dict[str, msgspec.Raw], file, "its header")
    header.pop("__metadata__", None)
    begin = 8 + header_size
    tensors = [_place(name, entry, file, begin) for name, entry in header.items()]
    tensors.sort(key=lambda place: (place.start, place.size))
    end = begin
    for place in tensors:
        if place.start != end:
            raise _damaged(file, f"tensor {place.name!r} begins at byte {place.start}, expected {end}")
        end += place.size
    if end != size:
        raise _damaged(file, f"its tensors end at byte {end}, but it has {size} bytes")
    return tensors


def places_in(folder: Path) -> dict[str, Place]:
    """Return tensor name -> its place, for the files in a folder that transformers loads, or for all of them
    if none has its names. Raise as `places` does."""
    whole = folder / _WHOLE
    files = [whole] if whole.is_file() else [file for file in _in_index(folder) if file.is_file()]
    return {
        place.name: place for file in files or sorted(folder.glob("*.safetensors")) for place in places(file)
    }


def fault_of_files(folder: Path) -> str | None:
    """Return why a model's files would be loaded in part, or otherwise by some engines than by others."""
    whole, named = folder / _WHOLE, _in_index(folder)
    if whole.is_file() and {whole} < {whole, *named}:
        return f"has two sets of weights, {_WHOLE} and those of {_INDEX}; remove the one that is not meant"
    if lacking := [file.name for file in named if not file.is_file()]:
        return f"lacks {', '.join(lacking)}, which its {_INDEX} names"
    if whole.is_symlink() and not whole.is_file():
        return f"has {_WHOLE} as a link to {whole.readlink()}, which is no file"
    if (folder / "adapter_config.json").is_file():
        return "has an adapter beside its weights, which some engines would load too; move adapter_* away"
    if not whole.is_file() and not named and next(folder.glob("*.safetensors"), None):
        return f"has safetensors files, but no {_WHOLE} or {_INDEX}"
    for place in places_in(folder).values():
        if place.dtype[:2] in ("F8", "F4", "F6") or (place.dtype == "I8" and len(place.shape) > 1):
            return f"has {place.name} in {place.dtype}, quantized; convert the model to bfloat16 or float32"
    return None


def _in_index(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return []
    found = _decode(index.read_bytes(), _IndexFile, index, "it")
    return [folder / name for name in sorted({*found.weight_map.values()})]


def write_header(file: IO[bytes], tensors: Iterable[Place]) -> None:
    """Write a header, after which the caller writes the tensors in order. `file` and `start` are not used."""
    header: dict[str, Any] = {}
    end = 0
    for place in tensors:
        offsets = (end, end := end + place.size)
        header[place.name] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": offsets}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)  # so that the tensors are aligned
    file.write(len(data).to_bytes(8, "little") + data)


def cast_file(file: Path, dtype_name: str) -> None:
    """Rewrite the weights in a file in `float32`, `float16` or `bfloat16`, one tensor at a time."""
    found, dtype, aside = places(file), _FORMAT_NAMES[dtype_name], file.with_suffix(".aside")
    size = FLOATS[dtype].itemsize
    cast = [replace(each, dtype=dtype, size=math.prod(each.shape) * size) for each in found]
    cast = [new if old.dtype in FLOATS else old for old, new in zip(found, cast, strict=True)]
    with aside.open("wb") as stream:
        write_header(stream, cast)
        for old in found:
            data = old.read()
            if old.dtype in FLOATS:
                data = np.frombuffer(data, FLOATS[old.dtype]).astype(FLOATS[dtype]).tobytes()
            stream.write(data)
    aside.replace(file)


def _place(name: str, description: msgspec.Raw, file: Path, begin: int) -> Place:
    """Return the place of a tensor from its description, in which offsets count from byte `begin`."""
    entry = _decode(description, _HeaderEntry, file, f"the header of tensor {name!r}")
    start, end = entry.data_offsets
    if entry.dtype not in _DTYPES:
        raise _damaged(file, f"tensor {name!r} has dtype {entry.dtype!r}, expected {', '.join(_DTYPES)}")
    bits = math.prod(entry.shape) * _DTYPES[entry.dtype][1]
    if bits != 8 * (end - start):
        raise _damaged(
            file,
            f"tensor {name!r} has {end - start} bytes, but {entry.dtype} of shape {list(entry.shape)} has"
            f" {-(-bits // 8)}",
        )
    return Place(name, entry.dtype, entry.shape, file, begin + start, end - start)


def _decode(data: bytes | msgspec.Raw, type: type[T], file: Path, what: str) -> T:
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(file, f"{what} cannot be read: {error}") from error


def _damaged(file: Path, why: str) -> WeightsError:
    return WeightsError(f"{file} is damaged, or not a safetensors file: {why}")


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file, with torch. An OSError names the file; safetensors' own error does not."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {file}: {error}") from error
