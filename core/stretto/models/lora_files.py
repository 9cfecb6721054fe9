"""Versions that contain only an adapter: merge one into the model that the adapter was trained on.

A training engine publishes two factors for each matrix W that it adapts, `<name>.lora_A.weight` and
`<name>.lora_B.weight`, oriented and scaled so that the new matrix is W + B A.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.errors import WeightsError
from stretto.models.digest import bytes_hash
from stretto.models.files import tensors_of_model
from stretto.models.safetensors import FLOATS, Place, places_in, write_header
from stretto.models.version_files import FolderUpdate, FrozenFiles, Manifest
from stretto.weights import WeightUpdate

__all__ = ["FACTOR_A", "FACTOR_B", "is_adapter", "matrix_of", "merge_adapter_files"]

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether a version whose tensors have these names contains only an adapter."""
    return any(name.endswith(FACTOR_A) for name in names)


def matrix_of(factor: str) -> str:
    """Return the name of the matrix that a factor belongs to."""
    return f"{factor.removesuffix(FACTOR_A).removesuffix(FACTOR_B)}.weight"


def merge_adapter_files(
    update: WeightUpdate, model: Path, folder: Path, frozen: FrozenFiles | None = None
) -> FolderUpdate:
    """Merge an adapter into the model that it was trained on. Other tensors are copied byte for byte.
    An adapted matrix is computed in float32 and stored in the dtype of its factors.

    Args:
        model: folder of the model that the adapter was trained on.
        folder: where the merged model is written. Closing the returned update removes it.
        frozen: keeps the files with the other tensors, so that they are written and hashed only once.

    Raises:
        WeightsError: if the adapter does not fit the model (the error names the tensor), or a file cannot be
            read or written.
    """
    note = update.note
    assert update.folder is not None
    try:
        adapter = places_in(update.folder)
        if adapter.keys() != update.hashes().keys():
            raise WeightsError(f"files in {update.folder} were removed")
    except (OSError, WeightsError) as error:
        raise WeightsError(f"version {note.version} cannot be read: {error}", version=note.version) from error
    try:
        model_tensors = tensors_of_model(str(model))
        _check_fit(adapter, model_tensors, model)
        folder.mkdir(mode=0o700)
        adapted, others = dict[str, list[Place]](), dict[str, list[Place]]()
        for tensor in sorted(model_tensors.values(), key=lambda place: place.file):
            if _factors(tensor.name, adapter) is not None:
                adapted.setdefault(tensor.file.name, []).append(tensor)
            else:
                others.setdefault(f"frozen-{tensor.file.name}", []).append(tensor)
        files = {name: _write(folder / name, tensors, adapter) for name, tensors in adapted.items()}
        for name, tensors in others.items():
            stored = frozen.find(name) if frozen is not None else None
            if stored is not None and {*stored[1]} == {tensor.name for tensor in tensors}:
                (folder / name).hardlink_to(stored[0])
                files[name] = dict(stored[1])
            else:
                files[name] = _write(folder / name, tensors, adapter)
        manifest = Manifest.of(note.version, files, others)
        manifest.write(folder)
        if frozen is not None:
            frozen.keep(folder, manifest)
    except (OSError, ValueError, WeightsError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        # Merging elsewhere helps if the model is at fault, not if the version is gone or the disk is full.
        is_of_model = not isinstance(error, OSError) or Path(error.filename or "").is_relative_to(model)
        cure = "; set training.lora.send: merged" if is_of_model else ""
        reason = f"version {note.version} is an adapter, and cannot be merged into {model}: {error}{cure}"
        raise WeightsError(reason, version=note.version) from error
    note = msgspec.structs.replace(note, digest=manifest.digest)
    return FolderUpdate(note, folder, manifest, temporary=True)


def _check_fit(adapter: Mapping[str, Place], model_tensors: Mapping[str, Place], model: Path) -> None:
    for name, place in adapter.items():
        target = matrix_of(name)
        factors, matrix = _factors(target, adapter), model_tensors.get(target)
        if factors is None:
            raise ValueError(f"{name!r} is one factor of two, and the other one is missing")
        if matrix is None:
            raise ValueError(f"{model} has no tensor {target!r}")
        b, a = factors
        if (b.shape[0], a.shape[1]) != matrix.shape or b.shape[1] != a.shape[0]:
            raise ValueError(f"{target!r} has shape {matrix.shape}; its factors have {b.shape} and {a.shape}")
        if unsupported := {place.dtype, matrix.dtype} - FLOATS.keys():
            raise ValueError(f"{name!r} or its matrix is {unsupported.pop()}; expected {', '.join(FLOATS)}")


def _factors(matrix: str, adapter: Mapping[str, Place]) -> tuple[Place, Place] | None:
    owner = matrix.removesuffix(".weight")
    b, a = adapter.get(owner + FACTOR_B), adapter.get(owner + FACTOR_A)
    return (b, a) if b is not None and a is not None else None


def _write(file: Path, places: list[Place], adapter: Mapping[str, Place]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    with file.open("wb") as output:
        merged_places = [_merged_place(place, adapter) for place in places]
        write_header(output, merged_places)
        for place, merged in zip(places, merged_places, strict=True):
            data = _merged_bytes(place, adapter)
            hashes[place.name] = bytes_hash(data, merged.dtype_name, merged.shape)
            output.write(data)
    return hashes


def _merged_place(place: Place, adapter: Mapping[str, Place]) -> Place:
    factors = _factors(place.name, adapter)
    if factors is None:
        return place
    dtype = factors[0].dtype
    return replace(place, dtype=dtype, size=math.prod(place.shape) * FLOATS[dtype].itemsize)


def _merged_bytes(place: Place, adapter: Mapping[str, Place]) -> bytes:
    factors = _factors(place.name, adapter)
    if factors is None:
        return place.read()
    b, a = factors
    return (_float32(place) + _float32(b) @ _float32(a)).astype(FLOATS[b.dtype]).tobytes()


def _float32(place: Place) -> NDArray[np.float32]:
    return np.frombuffer(place.read(), FLOATS[place.dtype]).reshape(place.shape).astype(np.float32)
