"""The digest of a set of weights. Trainer and engines compute it over the same tensors, one tensor at a time.

A tensor's hash is the SHA-256 of the text `stretto tensor`, a zero byte, dtype and shape, such as
`int16 2x3`, a line end, and the little-endian bytes of its elements. The digest covers names and hashes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from stretto.engine import SwapReport
    from stretto.weights import WeightsNote

__all__ = ["bytes_hash", "differing_names", "digest_of", "hashes_of", "swap_fault", "tensor_hash"]


def tensor_hash(tensor: Tensor) -> str:
    """Return the hash in hex of a CPU tensor."""
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes_hash(data, str(tensor.dtype).removeprefix("torch."), tensor.shape)


def hashes_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return tensor name -> its hash in hex, for tensors on any device."""
    return {name: tensor_hash(tensor.cpu()) for name, tensor in tensors.items()}


def bytes_hash(data: bytes | memoryview | NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> str:
    """Return the hash in hex of a tensor from its little-endian bytes. `dtype`: the name that torch and numpy
    use, such as `bfloat16`. Raise ValueError if a tensor of this shape cannot have this number of bytes."""
    flat, elements = np.frombuffer(data, np.uint8), math.prod(shape)
    if len(flat) % elements if elements else len(flat):
        raise ValueError(f"a tensor of shape {tuple(shape)} cannot have {len(flat)} bytes")
    hasher = hashlib.sha256(f"stretto tensor\0{dtype} {'x'.join(map(str, shape))}\n".encode())
    hasher.update(flat.data)
    return hasher.hexdigest()


def digest_of(hashes: Iterable[tuple[str, str]]) -> str:
    """Return the digest of a set of weights from (tensor name, hash), in any order."""
    hasher = hashlib.sha256()
    for name, tensor_hash in sorted(hashes):
        # The length of the name keeps a name with line ends from looking like several lines.
        hasher.update(f"{len(name)} {name} {tensor_hash}\n".encode())
    return hasher.hexdigest()


def differing_names(loaded: Mapping[str, str], published: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the tensors whose hashes differ or that only one side has."""
    names = loaded.keys() | published.keys()
    return sorted(name for name in names if loaded.get(name) != published.get(name))


def swap_fault(report: SwapReport, note: WeightsNote, published: Mapping[str, str]) -> str:
    """Return how the served weights differ from the announced version; empty if they match."""
    different = differing_names(report.hashes, published) if report.hashes else []
    rest = f" and {len(different) - 3} more" if len(different) > 3 else ""
    names = f": {', '.join(map(repr, different[:3]))}{rest} differ" if different else ""
    if report.version != note.version:
        return (
            f"the engine skipped the swap to version {note.version} without an error: it serves version "
            f"{report.version}{names}"
        )
    if different or report.digest != note.digest:
        return (
            f"the engine does not serve version {note.version} as the trainer published it (digest "
            f"{note.digest[:12]}, served {report.digest[:12]}){names}"
        )
    return ""
