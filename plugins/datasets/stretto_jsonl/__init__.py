"""Dataset `jsonl`: a file with one JSON object per line. Image paths are relative to the file's folder."""

import codecs
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from stretto import Component, Context, LocalPath, hookimpl
from stretto.chat.prompts import ColumnsConfig
from stretto.dataset import Row, object_of
from stretto.errors import ConfigError
from stretto.machine.private_file import write_private
from stretto.models.images import with_places
from stretto.records.files import open_record
from stretto.records.samples.traces import TraceFormat, read_trace

__all__ = ["JsonLines", "JsonLinesConfig"]


_decode = msgspec.json.Decoder(Row).decode
_STRICT_LINES = 1000
"""Lines in which keys that stand twice are found at once; in others when the row is used: it takes longer."""
_SHARED_ROWS = 10_000
"""Minimum rows of a shared index. Fewer need little memory, and the file's times may miss a change of a file
that is read so fast."""
_ROW = struct.Struct("<4q")
"""A row in an index: line number from 1, start, length, place among the rows of its line."""
_HEAD = 64
"""Bytes of an index before the rows: SHA-256 of the key and of what follows, and SHA-256 of the file."""
_HALF = re.compile(rb"(?i)\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]..")


class JsonLinesConfig(ColumnsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `jsonl`."""

    path: LocalPath
    """The file. Blank lines are skipped."""
    format: Literal["rows", TraceFormat] = "rows"
    """What a line holds. `rows`: a row; `training-trace` (OpenEnv) or `atif` (Harbor): a trajectory, whose
    token ids `sft` trains. A trajectory is several rows where a prompt does not continue the turn before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != "rows" and (
            self.chat or self.system_prompt or self.prompt_template or self.prompt_column != "prompt"
        ):
            raise ValueError(
                f"the format {self.format!r} has its prompts; leave out prompt_column, prompt_template, chat "
                "and system_prompt"
            )


class JsonLines:
    """Rows of a file, read one at a time. The kernel checks all lines and shares the rows' positions with the
    workers. The file is not memory-mapped: a change during the run causes errors instead of killing the
    process."""

    def __init__(self, config: JsonLinesConfig, context: Context) -> None:
        self._config = config
        self._path = Path(config.path)
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {str(self._path)!r}: {error.strerror}") from error
        index = self._index = self._find_index(context)
        size = len(index) if isinstance(index, bytearray) else os.fstat(index.fileno()).st_size
        self._rows = range(_HEAD, size, _ROW.size)
        self.fingerprint = self._read_index(32, 32).hex()
        """SHA-256 of the file when it was opened, without the images that it names."""
        self.sources = [(str(self._path.resolve()), range(len(self)))]
        """See `stretto.dataset.SourcedDataset`."""

    def __del__(self) -> None:
        with suppress(AttributeError):  # the file could not be opened
            self._file.close()
            if not isinstance(self._index, bytearray):
                self._index.close()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        line_number, start, length, place = _ROW.unpack(self._read_index(self._rows[index], _ROW.size))
        row = self._parse(os.pread(self._file.fileno(), length, start), line_number, strict=True)[place]
        if self._config.format != "rows":
            return {"id": f"{self._path}:{line_number}", **row}
        try:
            row = self._config.with_prompt(row)
        except ConfigError as error:
            raise ConfigError(f"{self._path}:{line_number}: {error}", path=error.path) from error
        return with_places(row, self._path.parent)

    def _read_index(self, start: int, size: int) -> bytes:
        if isinstance(self._index, bytearray):
            return bytes(self._index[start : start + size])
        return os.pread(self._index.fileno(), size, start)

    def _find_index(self, context: Context) -> bytearray | BufferedReader:
        """Return the index that the kernel has shared, or check all lines and make one."""
        key = _key_of(self._file, self._config.format)
        name = hashlib.sha256(repr((str(self._path), self._config.format)).encode()).hexdigest()[:16]
        shared = context.path("rows", name) if context.folder else None
        is_kernel = context.worker == "kernel"
        if shared and not is_kernel and (found := _open_index(shared, key)):
            return found
        index, hasher, start = bytearray(_HEAD), hashlib.sha256(), 0
        for line_number, line in enumerate(self._file, 1):
            hasher.update(line)
            if line.strip():
                count = len(self._parse(line, line_number, strict=line_number <= _STRICT_LINES))
                for place in range(count):
                    index += _ROW.pack(line_number, start, len(line), place)
            start += len(line)
        index[32:_HEAD] = hasher.digest()
        is_unchanged = key == _key_of(self._file, self._config.format)
        if shared and is_kernel and is_unchanged and len(index) >= _HEAD + _SHARED_ROWS * _ROW.size:
            checksum = hashlib.sha256(key)
            checksum.update(memoryview(index)[32:])
            index[:32] = checksum.digest()
            if (found := _open_index(shared, key)) and os.pread(found.fileno(), 32, 0) == checksum.digest():
                return found  # workers may read it already
            with suppress(OSError):  # the index stays in memory if it cannot be written
                shared.parent.mkdir(exist_ok=True)
                write_private(shared, bytes(index))
            return _open_index(shared, key) or index
        return index

    def _parse(self, line: bytes, number: int, *, strict: bool) -> list[Row]:
        """Return the rows of a line. `strict`: refuse a key that stands twice in an object."""
        try:
            row = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._path}:{number}: not a JSON object in UTF-8: {_cause(line) or error}"
            ) from error
        try:
            row = json.loads(line, object_pairs_hook=object_of) if strict else row
            return [row] if self._config.format == "rows" else read_trace(row, self._config.format)
        except ConfigError as error:
            raise ConfigError(f"{self._path}:{number}: {error}") from error


def _key_of(file: BufferedReader, kind: str) -> bytes:
    """Return a text that changes when the file does. It has no device, because machines number a shared disk
    differently; instead it has the time of the last change of the inode, which no program can set."""
    now = os.fstat(file.fileno())
    return repr((kind, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)).encode()


def _open_index(file: Path, key: bytes) -> BufferedReader | None:
    """Open a shared index; return None if it is damaged, another user's, or has another key."""
    with suppress(OSError):
        index = open_record(file, links=False)
        is_own = os.fstat(index.fileno()).st_uid == os.geteuid()
        if is_own and index.read(32) == hashlib.file_digest(index, lambda: hashlib.sha256(key)).digest():
            return index
        index.close()
    return None


def _cause(line: bytes) -> str:
    """Explain why a line is no JSON object, and how to mend the file; empty if the cause is not clear."""
    text = line.strip()
    if text.startswith(codecs.BOM_UTF8):
        return "the file begins with a byte order mark (BOM); save it as UTF-8 without one"
    if text.startswith(b"["):
        return "it begins a JSON array; write one object on each line, without brackets around them"
    if text == b"{":
        return "an object goes over several lines; write each object on one line"
    if text.startswith(b"\x1f\x8b"):
        return "the file is compressed by gzip; unpack it first: gunzip -k FILE"
    if text.startswith(b"PAR1"):
        return "the file is Parquet; use the dataset 'hf'"
    if column := _not_finite(text):
        return f"the column {column!r} has NaN or an infinity, which JSON does not have; write null"
    if b"\0" in text:
        return "it has zero bytes, as a file in UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE"
    if half := _HALF.search(text):
        return f"{half[0].decode()} is half of a character (a surrogate); write both halves, or leave it out"
    if b"," in text and text[:1] not in b'{"':
        return 'it looks like CSV; write one object on each line, such as {"prompt": "1+1="}'
    return ""


def _not_finite(text: bytes) -> str:
    """Return the first column of a row with NaN or an infinity, which only Python's JSON allows, or ""."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    columns = cast("dict[str, Any]", row).items() if isinstance(row, dict) else ()
    return next((name for name, value in columns if not _is_finite(value)), "")


def _is_finite(value: Any) -> bool:
    items = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else value
    if isinstance(items, list):
        return all(map(_is_finite, cast("list[Any]", items)))
    return not isinstance(value, float) or math.isfinite(value)


@hookimpl
def stretto_dataset() -> Iterator[Component[JsonLinesConfig]]:
    yield Component("jsonl", JsonLines, JsonLinesConfig, "a local file with one JSON object per line")
