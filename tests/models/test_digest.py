"""The hash of a tensor: what it covers, and that ranks compute it from any cut of the tensor."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import stretto_vllm
from stretto.models.digest import bytes_hash, digest_of, tensor_hash
from stretto.models.tiles import Leaves, MatrixPart, Tiling, hash_part, hash_pieces, root_hash

SHAPES = [
    (),
    (0,),
    (3, 0),
    (5,),
    (2, 3),
    (300_001,),  # taller tiles
    (1, 300_001),  # wider tiles
    (40, 4000),
    (513, 1500),  # tiles in both dimensions, and smaller ones at the ends
    (2, 300, 400),
]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int64]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    values = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (values % 2 == 0 if dtype == torch.bool else values.view(dtype)).reshape(shape)


def test_a_hash_worked_out_by_hand() -> None:
    """2 x 3 int16 are one tile; 2 x 300,000 uint8 are two: 512 KiB in 2 rows are 262,144 bytes of each."""
    small = np.arange(6, dtype="<i2")
    leaf = hashlib.sha256(b"stretto tile\0" + bytes(16) + small.tobytes()).digest()
    root = hashlib.sha256(b"stretto tensor\0int16 2x3\n" + leaf).hexdigest()
    assert tensor_hash(torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int16)) == root

    wide = tensor_of((2, 300_000), torch.uint8)
    rows = [bytes(row.numpy()) for row in wide]
    leaves = [
        hashlib.sha256(b"stretto tile\0" + bytes(16) + b"".join(row[:262_144] for row in rows)),
        hashlib.sha256(
            b"stretto tile\0"
            + bytes(8)
            + (262_144).to_bytes(8, "little")
            + b"".join(row[262_144:] for row in rows)
        ),
    ]
    joined = b"".join(leaf.digest() for leaf in leaves)
    assert tensor_hash(wide) == hashlib.sha256(b"stretto tensor\0uint8 2x300000\n" + joined).hexdigest()


def test_a_hash_covers_bytes_dtype_shape_and_place() -> None:
    tensor = tensor_of((600, 1024), torch.int32)
    tiles = Tiling("int32", (600, 1024), tensor.nbytes)
    assert (tiles.tile_rows, tiles.tile_width) == (256, 2048)
    changed, moved = tensor.clone(), tensor.clone()
    changed[-1, -1] += 1
    moved[:256, :512], moved[256:512, :512] = tensor[256:512, :512], tensor[:256, :512]  # two whole tiles
    others = [
        changed,
        moved,
        tensor.view(torch.float32),
        tensor.reshape(300, 2048),
        tensor.reshape(600, 1, 1024),
    ]
    assert len({tensor_hash(each) for each in [tensor, *others]}) == 6
    assert tensor_hash(tensor.T.contiguous().T) == tensor_hash(tensor)


def test_a_digest_cannot_be_that_of_other_names() -> None:
    a, b = "a" * 64, "b" * 64
    assert digest_of([("x", a), ("y", b)]) == digest_of([("y", b), ("x", a)])
    assert digest_of([("x", a), ("y", b)]) != digest_of([("x", b), ("y", a)])
    assert digest_of([("x", a), ("y", b)]) != digest_of([(f"x {a}\n1 y", b)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_files_and_vllm_hash_a_tensor_as_torch_does(
    shape: tuple[int, ...], dtype: torch.dtype, in_vllm: ModuleType
) -> None:
    tensor = tensor_of(shape, dtype)
    data = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    assert bytes_hash(data, str(dtype).removeprefix("torch."), shape) == tensor_hash(tensor)
    assert in_vllm.tensor_hash(tensor) == tensor_hash(tensor)


@pytest.fixture
def in_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What stretto adds to a vLLM server. It runs there without stretto."""
    layers = "vllm.model_executor.layers.vocab_parallel_embedding"
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", layers):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(ParallelLMHead=object))
    file = Path(stretto_vllm.__file__).with_name("in_server") / "stretto_in_vllm.py"
    specification = importlib.util.spec_from_file_location("stretto_in_vllm", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------- by parts


def cut(data: st.DataObject, matrix: NDArray[np.uint8], row: int, byte: int, depth: int) -> list[MatrixPart]:
    """Cut a matrix into rectangles, at random: each cut halves one of them, in either dimension."""
    rows, width = matrix.shape
    if not depth or not matrix.size:
        return [MatrixPart(row, byte, matrix)]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, rows))
        parts = [(matrix[:at], row, byte), (matrix[at:], row + at, byte)]
    else:
        at = data.draw(st.integers(0, width))
        parts = [(matrix[:, :at], row, byte), (matrix[:, at:], row, byte + at)]
    return [part for each in parts for part in cut(data, *each, data.draw(st.integers(0, depth - 1)))]


@settings(max_examples=60)
@given(st.data())
def test_any_cut_of_a_tensor_gives_the_hash_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 1300))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    tensor = tensor_of((rows, columns), dtype, seed=rows)
    tiling = Tiling(str(dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
    matrix = tensor.view(torch.uint8).numpy()

    parts = cut(data, matrix, 0, 0, depth=5)
    leaves: Leaves = {}
    pieces: list[MatrixPart] = []
    for part in parts:
        of_part, at_border = hash_part(tiling, part)
        leaves |= of_part
        pieces += at_border
    exchanged = sum(piece.data.size for piece in pieces)
    assert exchanged == sum(
        np.prod(tiling.tile_shape(*tile)) for tile in tiling.tiles() if tile not in leaves
    )
    leaves |= hash_pieces(tiling, data.draw(st.permutations(pieces)))
    assert root_hash(tiling, leaves) == tensor_hash(tensor)


def test_ranks_exchange_only_what_crosses_a_border() -> None:
    """4096 x 2048 bfloat16 have 16 x 2 tiles. Rows of 8 ranks and columns of 2 are whole tiles."""
    matrix = tensor_of((4096, 2048), torch.bfloat16).view(torch.uint8).numpy()
    tiling = Tiling("bfloat16", (4096, 2048), matrix.size)
    for rank in range(8):
        leaves, pieces = hash_part(tiling, MatrixPart(512 * rank, 0, matrix[512 * rank : 512 * (rank + 1)]))
        assert (len(leaves), pieces) == (4, [])
    for rank in range(2):
        leaves, pieces = hash_part(
            tiling, MatrixPart(0, 2048 * rank, matrix[:, 2048 * rank : 2048 * (rank + 1)])
        )
        assert (len(leaves), pieces) == (16, [])
    leaves, pieces = hash_part(tiling, MatrixPart(0, 0, matrix[:1000]))  # 3 rows of tiles, and 232 rows
    assert (len(leaves), [piece.data.shape for piece in pieces]) == (6, [(232, 2048), (232, 2048)])


def test_parts_that_do_not_make_up_the_tensor_are_refused() -> None:
    matrix = tensor_of((300, 3000), torch.uint8).numpy()
    tiling = Tiling("uint8", (300, 3000), matrix.size)
    with pytest.raises(
        ValueError, match="a part of 300 rows x 3000 bytes at row 1, byte 0 is not in a tensor"
    ):
        hash_part(tiling, MatrixPart(1, 0, matrix))
    _, pieces = hash_part(tiling, MatrixPart(0, 0, matrix[:, :100]))
    with pytest.raises(ValueError, match="the tile at row 0, byte 0 is not complete"):
        hash_pieces(tiling, pieces)
    with pytest.raises(ValueError, match="two pieces overlap at row 0, byte 0"):
        hash_pieces(tiling, [pieces[0], pieces[0]])
    with pytest.raises(ValueError, match="the piece at row 10, byte 0 is not of one tile"):
        hash_pieces(tiling, [MatrixPart(10, 0, matrix)])
    with pytest.raises(ValueError, match="the leaf of the tile at row 256, byte 0 is missing"):
        root_hash(tiling, hash_part(tiling, MatrixPart(0, 0, matrix[:256]))[0])
    with pytest.raises(ValueError, match=r"a tensor of shape \(7,\) cannot have 10 bytes"):
        bytes_hash(bytes(10), "uint8", (7,))
