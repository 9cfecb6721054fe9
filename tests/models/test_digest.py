"""The hash of a tensor, and the digest of a set of weights: what they cover."""

import hashlib
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import stretto_vllm
from stretto.models.digest import bytes_hash, digest_of, tensor_hash
from stretto.user_code.importable import load_module

SHAPES = [(), (0,), (3, 0), (5,), (2, 3), (513, 1500), (2, 300, 400)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int64]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    values = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (values % 2 == 0 if dtype == torch.bool else values.view(dtype)).reshape(shape)


def test_a_hash_worked_out_by_hand() -> None:
    small = np.arange(6, dtype="<i2")
    root = hashlib.sha256(b"stretto tensor\0int16 2x3\n" + small.tobytes()).hexdigest()
    assert tensor_hash(torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int16)) == root


def test_a_hash_covers_bytes_dtype_and_shape() -> None:
    tensor = tensor_of((600, 1024), torch.int32)
    changed, moved = tensor.clone(), tensor.flip(0)
    changed[-1, -1] += 1
    shapes = [tensor.view(torch.float32), tensor.reshape(300, 2048), tensor.reshape(600, 1, 1024)]
    assert len({tensor_hash(each) for each in [tensor, changed, moved, *shapes]}) == 6
    assert tensor_hash(tensor.T.contiguous().T) == tensor_hash(tensor)
    with pytest.raises(ValueError, match=r"a tensor of shape \(7,\) cannot have 10 bytes"):
        bytes_hash(bytes(10), "uint8", (7,))


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
    return load_module(str(Path(stretto_vllm.__file__).with_name("in_server") / "stretto_in_vllm.py"))
