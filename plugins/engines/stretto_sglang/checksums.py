"""Compare an SGLang server's checksums with the weights that it should load.

SGLang returns a checksum of each of its tensors, which differ from those in files: query, key and value of a
layer are one tensor, gate and up too; a vocabulary is padded to a multiple of 64; vision-language models have
older names. On CPU a checksum is the beginning of the SHA-256 of the tensor's bytes. On other devices its
definition is not known, but it changes if and only if the tensor changes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.models.safetensors import Place, places_in
from stretto.models.vision import newest_name

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj", "qkv"), "gate_up_proj": ("gate_proj", "up_proj")}
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PADDED_TO = 64  # rows of a vocabulary
_DIGITS = 16  # of the SHA-256 in a checksum, in hex


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
        """Start with the checksums of a new server, whose version is not known."""
        self._checksums, self._published = checksums, {}

    def hashes(
        self, published: Mapping[str, str], folder: Path, checksums: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the published hashes, but a hash that shows the checksum where the server's tensor differs.
        `published`: hashes of the version in `folder`, which the server should have loaded."""
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
        """Return False only if the server's tensor `name` is not the file tensors `places`, joined in order.
        If the files do not give its checksum, compare whether both have changed since the last version."""
        same_dtype = all(place.dtype == self._dtype for place in places)
        if self._exact and same_dtype:
            return checksum in _expected(places)
        if not self._published:
            return True
        same_hashes = all(self._published.get(place.name) == published.get(place.name) for place in places)
        same_checksum = checksum == self._checksums.get(name)
        # In a dtype with fewer bits, a tensor may be unchanged although the published tensor has changed.
        return same_checksum if same_hashes else not (same_checksum and same_dtype)


def _parts(name: str) -> list[str]:
    """Return the names of the file tensors that are joined to a tensor of the server, in order."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def _expected(places: Sequence[Place]) -> tuple[str, str]:
    """Return the two possible checksums of the joined tensors: unpadded and padded."""
    hasher = hashlib.sha256()
    for place in places:
        hasher.update(place.read())
    padded = hasher.copy()
    if len(places) == 1 and len(places[0].shape) == 2:
        rows = places[0].shape[0]
        padded.update(bytes(-rows % _PADDED_TO * (places[0].size // rows)))
    return hasher.hexdigest()[:_DIGITS], padded.hexdigest()[:_DIGITS]
