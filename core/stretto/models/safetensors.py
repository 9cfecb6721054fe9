"""safetensors files without torch: find the tensors of a file, and write the header of a new file.

The format: the length of a JSON header in 8 bytes, little-endian; the header; then the bytes of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Place", "places", "places_in", "write_header"]


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

    def read(self) -> bytes:
        """Return the bytes of the tensor, little-endian."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


def places(file: Path) -> Iterator[Place]:
    """Yield the tensors of a file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the header is not JSON.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield Place(name, entry["dtype"], tuple(entry["shape"]), file, 8 + size + start, end - start)


def places_in(folder: Path, files: str = "*.safetensors") -> dict[str, Place]:
    """Return tensor name -> its place, for the matching files in a folder; empty if no file matches."""
    return {place.name: place for file in sorted(folder.glob(files)) for place in places(file)}


def write_header(file: IO[bytes], tensors: Iterable[Place]) -> None:
    """Write the header of a file. The caller must then write the tensors' bytes in the same order. `file` and
    `start` of the given places are not used."""
    header: dict[str, Any] = {}
    end = 0
    for place in tensors:
        offsets = (end, end := end + place.size)
        header[place.name] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": offsets}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)  # so that the tensors are aligned
    file.write(len(data).to_bytes(8, "little") + data)
