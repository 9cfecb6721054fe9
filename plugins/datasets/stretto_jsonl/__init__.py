"""Dataset `jsonl`: a file with one JSON object a line."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stretto import Component, Context, DatasetConfig, LocalPath, hookimpl
from stretto.dataset import Row
from stretto.errors import ConfigError

__all__ = ["JsonLines", "JsonLinesConfig"]


class JsonLinesConfig(DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `jsonl`."""

    path: LocalPath
    """The file. Blank lines are passed over."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""


class JsonLines:
    """Rows of a file, read one at a time; only the places of the lines are held in memory."""

    def __init__(self, config: JsonLinesConfig, context: Context) -> None:
        del context
        self._path = Path(config.path)
        self._prompt_column = config.prompt_column
        if self._path.stat().st_size == 0:
            self._bytes: bytes | mmap.mmap = b""  # an empty file cannot be mapped
        else:
            with self._path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._lines = list(_lines(self._bytes))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        number, start, end = self._lines[index]
        try:
            row = msgspec.json.decode(self._bytes[start:end], type=Row)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}:{number}: not a JSON object: {error}") from error
        if self._prompt_column not in row:
            columns = ", ".join(row) or "none"
            raise ConfigError(
                f"{self._path}:{number}: no column {self._prompt_column!r}; its columns: {columns}"
            )
        row["prompt"] = row.pop(self._prompt_column)
        return row

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self._bytes).hexdigest()


def _lines(text: bytes | mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """(line number from 1, start, end) of every line that is not blank."""
    start, number = 0, 1
    while start < len(text):
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        if text[start:end].strip():
            yield number, start, end
        start, number = end + 1, number + 1


@hookimpl
def stretto_dataset() -> Iterator[Component[JsonLinesConfig]]:
    """The component of this package."""
    yield Component("jsonl", JsonLines, JsonLinesConfig, "one JSON object a line of a local file")
