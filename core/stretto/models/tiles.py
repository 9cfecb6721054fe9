"""The hash of a tensor: a tree over tiles, so that the ranks of any layout can compute it together.

A tensor of shape (r, a, b, ...) is a matrix of bytes. It has r rows, and each row has the little-endian bytes
of a * b * ... elements. So a vector has rows of one element, and a scalar is one row of one element. Tiles of
256 rows and 2048 bytes of each row cut this matrix. If the rows are shorter, tiles have more rows; if there
are fewer rows, tiles are wider: a tile has 512 KiB where the matrix has as much. The tiles depend on the
shape and the dtype alone.

    leaf = SHA-256 of _LEAF, the tile's first row and first byte (two 64-bit integers), the tile row by row
    root = SHA-256 of _ROOT, the dtype, the shape, and the leaves of all tiles, row of tiles by row of tiles

The root is the hash of the tensor. Ranks that each hold a part of a tensor (rows with FSDP, columns with
tensor parallelism, whole tensors with a pipeline) compute it without gathering the tensor:

1. Each rank calls `hash_part`. It returns the leaves of the tiles that lie in the part, and pieces of the
   tiles that cross the part's border.
2. The ranks send each other the pieces. `hash_pieces` returns the leaves of tiles whose pieces are together.
3. The ranks send each other the leaves, 32 bytes for each tile. `root_hash` returns the hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Leaves", "MatrixPart", "Tiling", "hash_part", "hash_pieces", "root_hash"]

_ROWS, _WIDTH = 256, 2048
_AREA = _ROWS * _WIDTH
_LEAF = b"stretto tile\0"
_ROOT = b"stretto tensor\0"

Leaves = dict[tuple[int, int], bytes]
"""Leaf of each tile, by the tile's first row and first byte."""


@dataclass(frozen=True)
class MatrixPart:
    """A rectangle of a tensor's matrix."""

    row: int
    """First row, counted in the whole tensor."""
    byte: int
    """First byte of each row, counted in the rows of the whole tensor."""
    data: NDArray[np.uint8]
    """(rows, bytes of each row)."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of one tensor.

    Raises:
        ValueError: if a tensor of this shape cannot have this size.
    """

    dtype: str
    """The name that torch and numpy use, such as `bfloat16`."""
    shape: tuple[int, ...]
    size: int
    """Size of the whole tensor in bytes."""

    def __post_init__(self) -> None:
        if self.size % self.rows if self.rows else self.size:
            raise ValueError(f"a tensor of shape {self.shape} cannot have {self.size} bytes")

    @cached_property
    def rows(self) -> int:
        """Number of rows of the matrix."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def width(self) -> int:
        """Number of bytes in a row."""
        return self.size // self.rows if self.rows else 0

    @cached_property
    def tile_rows(self) -> int:
        """Number of rows of a tile."""
        return max(1, min(self.rows, max(_ROWS, _AREA // max(1, self.width))))

    @cached_property
    def tile_width(self) -> int:
        """Number of bytes in a row of a tile."""
        return max(1, min(self.width, max(_WIDTH, _AREA // self.tile_rows // _WIDTH * _WIDTH)))

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield first row and first byte of every tile, in the order of the root."""
        for row in range(0, self.rows, self.tile_rows):
            for byte in range(0, self.width, self.tile_width):
                yield row, byte

    def tile_shape(self, row: int, byte: int) -> tuple[int, int]:
        """Return the rows and bytes of the tile that begins there. The last tiles may be smaller."""
        return min(self.tile_rows, self.rows - row), min(self.tile_width, self.width - byte)


def hash_part(tiling: Tiling, part: MatrixPart) -> tuple[Leaves, list[MatrixPart]]:
    """Return the leaves of the tiles that lie in a part, and the pieces of other tiles that the part has.

    Raises:
        ValueError: if the part does not lie in the tensor.
    """
    rows, width = part.data.shape
    if part.row < 0 or part.byte < 0 or part.row + rows > tiling.rows or part.byte + width > tiling.width:
        raise ValueError(
            f"a part of {rows} rows x {width} bytes at row {part.row}, byte {part.byte} is not in a tensor of"
            f" {tiling.rows} rows x {tiling.width} bytes"
        )
    leaves: Leaves = {}
    pieces: list[MatrixPart] = []
    if not part.data.size:
        return leaves, pieces
    for tile_row in _tiles_from(part.row, rows, tiling.tile_rows):
        for tile_byte in _tiles_from(part.byte, width, tiling.tile_width):
            row, byte = max(tile_row, part.row), max(tile_byte, part.byte)
            below, right = tile_row + tiling.tile_rows - part.row, tile_byte + tiling.tile_width - part.byte
            data = part.data[row - part.row : below, byte - part.byte : right]
            if data.shape == tiling.tile_shape(tile_row, tile_byte):
                leaves[tile_row, tile_byte] = _leaf(tile_row, tile_byte, data)
            else:
                pieces.append(MatrixPart(row, byte, data))
    return leaves, pieces


def hash_pieces(tiling: Tiling, pieces: Iterable[MatrixPart]) -> Leaves:
    """Return the leaves of the tiles that pieces of several parts make up, in any order.

    Raises:
        ValueError: if a piece is not of one tile, if two pieces overlap, or if a tile is not complete.
    """
    tiles: dict[tuple[int, int], tuple[NDArray[np.uint8], NDArray[np.bool_]]] = {}
    for piece in pieces:
        row, byte = piece.row % tiling.tile_rows, piece.byte % tiling.tile_width
        corner = piece.row - row, piece.byte - byte
        shape = tiling.tile_shape(*corner)
        data, covered = tiles.setdefault(corner, (np.empty(shape, np.uint8), np.zeros(shape, np.bool_)))
        area = slice(row, row + piece.data.shape[0]), slice(byte, byte + piece.data.shape[1])
        if data[area].shape != piece.data.shape:
            raise ValueError(f"the piece at row {piece.row}, byte {piece.byte} is not of one tile")
        if covered[area].any():
            raise ValueError(f"two pieces overlap at row {piece.row}, byte {piece.byte}")
        data[area], covered[area] = piece.data, True
    for (row, byte), (_, covered) in tiles.items():
        if not covered.all():
            raise ValueError(f"the tile at row {row}, byte {byte} is not complete")
    return {corner: _leaf(*corner, data) for corner, (data, _) in tiles.items()}


def root_hash(tiling: Tiling, leaves: Mapping[tuple[int, int], bytes]) -> str:
    """Return the hash of a tensor in hex.

    Raises:
        ValueError: if the leaf of a tile is missing.
    """
    shape = "x".join(map(str, tiling.shape))
    hasher = hashlib.sha256(_ROOT + f"{tiling.dtype} {shape}\n".encode())
    for corner in tiling.tiles():
        if corner not in leaves:
            raise ValueError(f"the leaf of the tile at row {corner[0]}, byte {corner[1]} is missing")
        hasher.update(leaves[corner])
    return hasher.hexdigest()


def _tiles_from(start: int, length: int, tile: int) -> range:
    """Return the starts of the tiles that a part crosses, in one dimension."""
    return range(start - start % tile, start + length, tile)


def _leaf(row: int, byte: int, data: NDArray[np.uint8]) -> bytes:
    hasher = hashlib.sha256(_LEAF + struct.pack("<QQ", row, byte))
    hasher.update(np.ascontiguousarray(data).data)
    return hasher.digest()
