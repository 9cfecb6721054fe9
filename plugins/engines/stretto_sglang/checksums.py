"""Compare an SGLang server's checksums with the weights that it should load.

SGLang returns a checksum of each tensor, under its own names: query, key and value of a layer are one tensor,
as are gate and up; a vocabulary is padded to a multiple of 64; tensors of vision-language models have older
names. On CPU the checksum begins the SHA-256 of the tensor's bytes. On other devices its definition is not
known, but it changes if and only if the tensor does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.models.safetensors import Place, places_in
from stretto.models.vision import newest_name

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj", "qkv"), "gate_up_proj": ("gate_proj", "up_proj")}
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PADDED_TO = 64
_DIGITS = 16


class Checksums:
    """The checksums of one server.

    Args:
        dtype: dtype of the server's weights. Files in another dtype show only which tensors are unchanged.
        exact: whether checksums can be computed from files: on CPU, with the whole model in one process.
    """

    def __init__(self, dtype: str, *, exact: bool) -> None:
        self._dtype = _DTYPES[dtype]
        self._exact = exact
        self._checksums: Mapping[str, str] = {}
        self._published: Mapping[str, str] = {}

    def begin(self, checksums: Mapping[str, str]) -> None:
        """Start with a new server, whose weights are not known."""
        self._checksums, self._published = checksums, {}

    def hashes(
        self, published: Mapping[str, str], folder: Path, checksums: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the published hashes; a tensor that the server's `checksums` show to differ gets a hash that
        says so. `published`: hashes of the version in `folder`, which the server should load."""
        hashes = dict(published)
        tensors = {newest_name(name): place for name, place in places_in(folder).items()}
        for name, checksum in checksums.items():
            places = [tensors[part] for part in _parts(newest_name(name)) if part in tensors]
            if places and not self._matches(name, checksum, places, published):
                hashes |= {place.name: f"server: {checksum}" for place in places}
        self._checksums, self._published = checksums, published
        return hashes

    def _matches(
        self, name: str, checksum: str, places: Sequence[Place], published: Mapping[str, str]
    ) -> bool:
        """Return whether a checksum can belong to a tensor made of these tensors, in order."""
        same_dtype = all(place.dtype == self._dtype for place in places)
        if self._exact and same_dtype:
            return checksum in _expected(places)
        if not self._published:
            return True
        same = all(self._published.get(place.name) == published.get(place.name) for place in places)
        unchanged = checksum == self._checksums.get(name)
        # In a dtype with fewer bits a tensor may be unchanged although the published one has changed.
        return unchanged if same else not (unchanged and same_dtype)


def _parts(name: str) -> list[str]:
    """Return the names of a checkpoint's tensors that make up a tensor of the server, in order."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def _expected(places: Sequence[Place]) -> tuple[str, str]:
    """Return the two possible checksums of a tensor made of these: unpadded and padded."""
    hasher = hashlib.sha256()
    for place in places:
        hasher.update(place.read())
    padded = hasher.copy()
    if len(places) == 1 and len(places[0].shape) == 2:
        rows = places[0].shape[0]
        padded.update(bytes(-rows % _PADDED_TO * (places[0].size // rows)))
    return hasher.hexdigest()[:_DIGITS], padded.hexdigest()[:_DIGITS]
