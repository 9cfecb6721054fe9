"""The headers of safetensors files, damaged in every way: one kind of error, which names file and tensor."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from stretto.errors import WeightsError
from stretto.models.files import shapes_in
from stretto.models.safetensors import places, save_tensors
from stretto.models.version_files import FolderPublisher, open_version

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(folder: Path, header: bytes, size: int | None = None) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes((len(header) if size is None else size).to_bytes(8, "little") + header + bytes(8))
    return file


def entries(**changes: Any) -> dict[str, Any]:
    return {"w": {**ENTRY, **changes}}


def test_every_dtype_of_torch_is_known(tmp_path: Path) -> None:
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float8_e4m3fn float8_e5m2 float8_e8m0fnu"
    names += " float16 bfloat16 float32 float64 complex64"
    tensors = {name: torch.zeros(3, 2, dtype=getattr(torch, name)) for name in names.split()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {place.name: place for place in places(tmp_path / "model.safetensors")}
    assert {name: (place.dtype_name, place.shape) for name, place in found.items()} == {
        name: (name, (3, 2)) for name in tensors
    }
    assert shapes_in(str(tmp_path)) == dict.fromkeys(tensors, (3, 2))


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ([], "its header cannot be read: Expected `object`, got `array`"),
        ({"w": 3}, "the header of tensor 'w' cannot be read: Expected `object`"),
        ({"w": {}}, "tensor 'w' cannot be read: Object missing required field `dtype`"),
        (entries(dtype="F31"), "tensor 'w' has dtype 'F31', expected BOOL, U8"),
        (entries(shape=[-2]), r"tensor 'w' cannot be read: Expected `int` >= 0 - at `\$.shape"),
        (entries(shape=[1] * 100), "tensor 'w' cannot be read: Expected `array` of length <= 64"),
        (entries(shape=[2**62, 2**62]), "tensor 'w' has 8 bytes, but F32 of shape"),
        (entries(shape=[3]), r"tensor 'w' has 8 bytes, but F32 of shape \[3\] has 12"),
        (entries(data_offsets=[8, 0]), "tensor 'w' has -8 bytes"),
        (entries(data_offsets=[0]), "tensor 'w' cannot be read: Expected `array` of length 2"),
        (entries(data_offsets=[8, 16]), "tensor 'w' begins at byte 78, expected 70"),
        (entries(data_offsets=[2**62, 2**62 + 8]), "tensor 'w' begins at byte"),
        ({"w": ENTRY, "v": ENTRY}, "tensor '[wv]' begins at byte"),
        ({"__metadata__": {"a": "b"}}, r"its tensors end at byte \d+, but it has \d+ bytes"),
    ],
)
def test_what_is_wrong_with_a_header_is_named(tmp_path: Path, header: Any, error: str) -> None:
    file = file_of(tmp_path, json.dumps(header).encode())
    with pytest.raises(WeightsError, match=f"^{re.escape(str(file))} is damaged, or not .*{error}"):
        places(file)


@pytest.mark.parametrize(
    ("content", "size", "error"),
    [
        (b'{"w":' * 100_000, None, "its header cannot be read: maximum recursion depth"),
        (b'{"w":{"dtype":' + b"[" * 100_000, None, "its header cannot be read"),
        (b'{"w\xff":3}', None, "its header cannot be read: .* codec can't decode"),
        (b"{", None, "its header cannot be read: Input data was truncated"),
        (b"{}", 2**62, "it has 18 bytes and announces a header of 4611686018427387904 bytes"),
        (b"{}", 100, "it has 18 bytes and announces a header of 100 bytes"),
    ],
)
def test_a_header_that_is_no_header(tmp_path: Path, content: bytes, size: int | None, error: str) -> None:
    with pytest.raises(WeightsError, match=error):
        places(file_of(tmp_path, content, size=size))


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(WeightsError, match="it has 0 bytes and announces a header of 0 bytes"):
        places(tmp_path / "model.safetensors")


# ------------------------------------------------------------------------------------------ generated

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
OFFSET = st.sampled_from([-(2**63), -8, 0, 3, 8, 16, 2**31, 2**62, 2**64, 10**400]) | JSON
DAMAGED = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I64", "BOOL", "f32", ""]) | JSON,
        "shape": st.lists(OFFSET, max_size=5) | JSON,
        "data_offsets": st.lists(OFFSET, max_size=3) | JSON,
    },
)
FUZZ = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TENSORS = {"a": torch.arange(4.0), "b.c": torch.ones(2, 3).bfloat16()}
Reopen = Callable[[bytes], Mapping[str, torch.Tensor]]


@pytest.fixture
def reopen(tmp_path: Path) -> Reopen:
    """Publish a version, replace its file, open it again and load its tensors."""
    note = FolderPublisher(tmp_path / "versions", 3, 2.0).publish(1, TENSORS.items())
    folder = Path(note.address)

    def with_content(content: bytes) -> Mapping[str, torch.Tensor]:
        (folder / "model-00000.safetensors").write_bytes(content)
        return open_version(note, folder).tensors()

    return with_content


@FUZZ
@given(header=st.dictionaries(st.sampled_from(["a", "b.c", "x", "__metadata__"]), DAMAGED | JSON) | JSON)
def test_any_other_header_is_refused(reopen: Reopen, header: Any) -> None:
    data = json.dumps(header).encode()
    with pytest.raises(WeightsError, match=r"version 1 at .*model-00000.safetensors is damaged"):
        reopen(len(data).to_bytes(8, "little") + data + bytes(28))


@FUZZ
@given(
    cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)
)
@example(cut=400, flips=[])
def test_a_file_with_other_bytes_is_refused_or_the_same(
    reopen: Reopen, tmp_path: Path, cut: int, flips: list[tuple[int, int]]
) -> None:
    """Spaces in the header are no difference; nothing else passes."""
    intact = tmp_path / "intact"
    save_file(TENSORS, intact)
    content = bytearray(intact.read_bytes()[:cut])
    for at, value in flips:
        if at < len(content):
            content[at] = value
    try:
        tensors = reopen(bytes(content))
    except WeightsError:
        return
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "absent" / "model.safetensors"
    with pytest.raises(OSError, match=re.escape(str(file))):
        save_tensors({"a": torch.zeros(2)}, file)
