"""Dataset `jsonl`: a file with one JSON object a line. Paths of images in it are looked up beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stretto import Component, Context, LocalPath, hookimpl
from stretto.dataset import Row
from stretto.errors import ConfigError
from stretto.models.prompts import ColumnsConfig
from stretto.models.vision import IMAGE_COLUMNS

__all__ = ["JsonLines", "JsonLinesConfig"]


_decode = msgspec.json.Decoder(Row).decode


class JsonLinesConfig(ColumnsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `jsonl`."""

    path: LocalPath
    """The file. Blank lines are passed over."""


class JsonLines:
    """Rows of a file, read one at a time; only the places of the lines are held in memory.

    The file is read rather than mapped: one that is changed in mid-run gives errors, not a killed process.
    """

    def __init__(self, config: JsonLinesConfig, context: Context) -> None:
        del context
        self._config = config
        self._path = Path(config.path)
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {str(self._path)!r}: {error.strerror}") from error
        whole = hashlib.sha256()
        self._lines: list[tuple[int, int, int]] = []
        """(line number from 1, start, length) of every line that is not blank."""
        start = 0
        for number, line in enumerate(self._file, 1):
            whole.update(line)
            if line.strip():
                self._parsed(line, number)
                self._lines.append((number, start, len(line)))
            start += len(line)
        self.fingerprint = whole.hexdigest()
        """SHA-256 of the file as it was opened; images that it names are not looked at."""

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be opened
            self._file.close()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        number, start, length = self._lines[index]
        row = self._parsed(os.pread(self._file.fileno(), length, start), number)
        try:
            row = self._config.with_prompt(row)
        except ConfigError as error:
            raise ConfigError(f"{self._path}:{number}: {error}") from error
        for column in IMAGE_COLUMNS:
            if column in row:
                row[column] = self._beside(row[column])
        return row

    def _beside(self, images: Any) -> Any:
        """Paths of images, looked up beside the file; anything else as it is."""
        if isinstance(images, str):
            return str(self._path.parent / images)
        return [self._beside(each) for each in images] if isinstance(images, list) else images

    def _parsed(self, line: bytes, number: int) -> Row:
        try:
            return _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}:{number}: not a JSON object in UTF-8: {error}") from error


@hookimpl
def stretto_dataset() -> Iterator[Component[JsonLinesConfig]]:
    """The component of this package."""
    yield Component("jsonl", JsonLines, JsonLinesConfig, "one JSON object a line of a local file")
