"""What an SGLang server's checksums say of the weights that it was given.

SGLang tells a checksum of each tensor that it holds, under names of its own: query, key and value of a layer
are one tensor there, so are gate and up, and a vocabulary is padded to a multiple of 64. On CPU the checksum
is the beginning of the SHA-256 of the tensor's bytes, so it can be worked out from the files. Elsewhere it is
not known how it is made, but it changes if and only if the tensor does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.models.safetensors import Place, places_in

__all__ = ["Checksums"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PADDED_TO = 64
_DIGITS = 16


class Checksums:
    """The checksums of one server.

    Args:
        dtype: of its weights. Files in another say only which tensors must be as they were.
        exact: whether checksums can be worked out: on CPU, with the whole model in one process.
    """

    def __init__(self, dtype: str, *, exact: bool) -> None:
        self._dtype = _DTYPES[dtype]
        self._exact = exact
        self._found: Mapping[str, str] = {}
        self._published: Mapping[str, str] = {}

    def begin(self, found: Mapping[str, str]) -> None:
        """A fresh server, with weights of which nothing is known."""
        self._found, self._published = found, {}

    def hashes(self, published: Mapping[str, str], folder: Path, found: Mapping[str, str]) -> dict[str, str]:
        """The published hashes, but for tensors of which the server's checksums show that it holds another:
        these get a hash that says so.

        Args:
            published: tensor name -> SHA-256, of the version in `folder`, which the server was told to load.
            found: its checksums now, by its own names.
        """
        hashes = dict(published)
        tensors = places_in(folder)
        for name, checksum in found.items():
            parts = [part for part in _parts(name) if part in tensors]
            if parts and not self._right(name, checksum, [tensors[part] for part in parts], published):
                hashes |= dict.fromkeys(parts, f"server: {checksum}")
        self._found, self._published = found, published
        return hashes

    def _right(self, name: str, checksum: str, places: Sequence[Place], published: Mapping[str, str]) -> bool:
        """Whether a checksum can be that of a tensor made of these, in order."""
        alike = all(place.dtype == self._dtype for place in places)
        if self._exact and alike:
            return checksum in _expected(places)
        if not self._published:
            return True
        same = all(self._published.get(place.name) == published.get(place.name) for place in places)
        unchanged = checksum == self._found.get(name)
        # In a type of fewer bits a tensor may be what it was although the published one is not.
        return unchanged if same else not (unchanged and alike)


def _parts(name: str) -> list[str]:
    """Tensors of a checkpoint that make a tensor of the server, in order."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def _expected(places: Sequence[Place]) -> tuple[str, str]:
    """What the checksum of a tensor made of these may be: as it is, or padded."""
    whole = hashlib.sha256()
    for place in places:
        whole.update(place.read())
    padded = whole.copy()
    if len(places) == 1 and len(places[0].shape) == 2:
        rows = places[0].shape[0]
        padded.update(bytes(-rows % _PADDED_TO * (places[0].size // rows)))
    return whole.hexdigest()[:_DIGITS], padded.hexdigest()[:_DIGITS]
