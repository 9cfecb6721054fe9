"""The digest of a set of weights. Trainer and engines compute it over the same bytes, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["differing_names", "digest_of", "tensor_hash"]


def tensor_hash(tensor: Tensor) -> str:
    """Return the SHA-256 in hex of a CPU tensor's little-endian bytes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def digest_of(hashes: Iterable[tuple[str, str]]) -> str:
    """Return the digest of a set of weights from (tensor name, SHA-256 hex of its little-endian bytes), in
    any order."""
    hasher = hashlib.sha256()
    for name, tensor_hash in sorted(hashes):
        hasher.update(f"{name} {tensor_hash}\n".encode())
    return hasher.hexdigest()


def differing_names(loaded: Mapping[str, str], published: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the tensors whose hashes differ or that only one side has."""
    names = loaded.keys() | published.keys()
    return sorted(name for name in names if loaded.get(name) != published.get(name))
