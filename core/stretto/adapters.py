"""Versions that are an adapter alone, and the whole models that they make of the one they were trained on.

For each matrix W that a training engine adapts it publishes two factors: `<name>.lora_A.weight` A and
`<name>.lora_B.weight` B, oriented and scaled so that the matrix is now W + B A. What it does not publish is
as it was. A version travels so, by whichever transport, and is made whole beside each engine, of the model's
own files.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.errors import WeightsError
from stretto.model_files import tensors_of_model
from stretto.tensor_files import Place, places_in, write_header
from stretto.weight_files import FolderUpdate, Manifest
from stretto.weights import digest_of

if TYPE_CHECKING:
    from stretto.weights import WeightUpdate

__all__ = ["FACTOR_A", "FACTOR_B", "is_adapter", "made_whole"]

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"

_TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a version with tensors of these names is an adapter alone."""
    return any(name.endswith(FACTOR_A) for name in names)


def made_whole(update: WeightUpdate, model: Path, folder: Path) -> FolderUpdate:
    """The model that an adapter makes.

    A matrix that is adapted is worked out in float32 and kept in the type of its factors; every other tensor
    is the model's own, to the byte.

    Args:
        update: the adapter.
        model: folder of the model that it was trained on.
        folder: where the whole is written; it goes with the returned update.

    Raises:
        WeightsError: if the adapter does not fit the model, naming the tensor, or a file cannot be read or
            written.
    """
    note = update.note
    assert update.folder is not None
    try:
        own, given = tensors_of_model(model), places_in(update.folder)
        _see_fitting(given, own, model)
        folder.mkdir(mode=0o700, parents=True)
        files = {
            file.name: _write(folder / file.name, [each for each in own.values() if each.file == file], given)
            for file in sorted({place.file for place in own.values()})
        }
        digest = digest_of((name, value) for hashes in files.values() for name, value in hashes.items())
        manifest = Manifest(note.version, digest, files)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    except (OSError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = f"version {note.version} is an adapter, and cannot be put into {model}: {error}"
        raise WeightsError(reason, version=note.version) from error
    return FolderUpdate(msgspec.structs.replace(note, digest=digest), folder, manifest, temporary=True)


def _see_fitting(given: Mapping[str, Place], own: Mapping[str, Place], model: Path) -> None:
    for name, place in given.items():
        owner = name.removesuffix(FACTOR_A).removesuffix(FACTOR_B)
        a, b = given.get(owner + FACTOR_A), given.get(owner + FACTOR_B)
        if a is None or b is None:
            raise ValueError(f"{name!r} is one factor of two, and the other one is missing")
        matrix = own.get(f"{owner}.weight")
        if matrix is None:
            raise ValueError(f"{model} has no tensor '{owner}.weight'; set training.lora.send: merged")
        if (b.shape[0], a.shape[1]) != matrix.shape or b.shape[1] != a.shape[0]:
            raise ValueError(
                f"'{owner}.weight' has shape {matrix.shape}; its factors have {b.shape} and {a.shape}"
            )
        if strange := {place.dtype, matrix.dtype} - _TYPES.keys():
            raise ValueError(f"{name!r} or its matrix is {strange.pop()}; expected {', '.join(_TYPES)}")


def _write(file: Path, own: list[Place], given: Mapping[str, Place]) -> dict[str, str]:
    """Write one file of the whole; tensor name -> SHA-256."""
    hashes: dict[str, str] = {}
    with file.open("wb") as opened:
        write_header(opened, [_outline(place, given) for place in own])
        for place in own:
            data = _data(place, given)
            hashes[place.name] = hashlib.sha256(data).hexdigest()
            opened.write(data)
    return hashes


def _outline(place: Place, given: Mapping[str, Place]) -> Place:
    """What a tensor of the model becomes: its matrix is of the type of its factors."""
    factor = given.get(place.name.removesuffix(".weight") + FACTOR_B)
    if factor is None:
        return place
    size = math.prod(place.shape) * _TYPES[factor.dtype].itemsize
    return replace(place, dtype=factor.dtype, size=size)


def _data(place: Place, given: Mapping[str, Place]) -> bytes:
    owner = place.name.removesuffix(".weight")
    a, b = given.get(owner + FACTOR_A), given.get(owner + FACTOR_B)
    if a is None or b is None:
        return place.read()
    return (_float32(place) + _float32(b) @ _float32(a)).astype(_TYPES[b.dtype]).tobytes()


def _float32(place: Place) -> NDArray[np.float32]:
    return np.frombuffer(place.read(), _TYPES[place.dtype]).reshape(place.shape).astype(np.float32)
