"""Images: their files, and their pixels.

A row has its images in the column `images`, a list, or in `image`, a single one: a path, `{"bytes": ...,
"path": ...}` (the `datasets` library's form before decoding), or a decoded Pillow image. An image that could
be read in several ways is refused: one with several frames, or with colours other than grey and RGB. A
transparent image lies on white.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stretto.errors import ConfigError, column_error

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "IMAGE_COLUMNS",
    "MAX_FILE_BYTES",
    "ImageError",
    "ImageFile",
    "OpenImage",
    "decode",
    "file_of",
    "files_of",
    "has_images",
    "images_of",
    "names_in",
    "with_names",
    "with_places",
]

IMAGE_COLUMNS = ("images", "image")

MAX_FILE_BYTES = 2**25
"""Largest size of an image's file, 32 MiB."""
MAX_PIXELS = 2**25
"""Largest number of pixels of an image: 96 MiB once it is decoded."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""Pillow's names of the colour modes that convert to RGB in only one way, on white."""


class ImageError(ConfigError):
    """An image cannot be read."""


@dataclass(frozen=True)
class ImageFile:
    """The file of an image."""

    file: bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits: the name under which processes ask for the image."""
        return hashlib.sha256(self.file).hexdigest()


@dataclass(frozen=True)
class OpenImage(ImageFile):
    """An image of a row."""

    pixels: Image
    """The pixels in RGB, rotated according to the file's EXIF data."""


def has_images(row: Mapping[str, Any]) -> bool:
    """Return whether a row has an image column that is not empty."""
    return any(row.get(column) for column in IMAGE_COLUMNS)


def with_places(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row in which paths of images are relative to a folder; anything else stays unchanged."""

    def place_of(images: Any) -> Any:
        if isinstance(images, str):
            return str(folder / images)
        return [place_of(image) for image in images] if isinstance(images, list) else images

    return {name: place_of(value) if name in IMAGE_COLUMNS else value for name, value in row.items()}


def images_of(row: Mapping[str, Any]) -> list[OpenImage]:
    """Read the images of a row; a decoded Pillow image gets a PNG file. Raise ConfigError if both columns
    hold images, a column holds something else, or an image is missing, too large, or cannot be read."""
    images: list[OpenImage] = []
    for column, value in _values(row):
        try:
            file = file_of(value)
        except ImageError as error:
            raise column_error(row, column, str(error)) from error
        try:
            images.append(OpenImage(file, decode(file)))
        except ImageError as error:
            raise column_error(
                row, column, f"{_label(value)} is no image that can be read: {error}"
            ) from error
    return images


def with_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for people and for JSON: each image becomes its path, or a mapping that describes it."""
    named = dict(row)
    for column in IMAGE_COLUMNS:
        value = row.get(column)
        if isinstance(value, list | tuple):
            named[column] = [_name(item) for item in cast("Sequence[Any]", value)]
        elif value is not None:
            named[column] = _name(value)
    return named


def names_in(row: Any) -> list[Any]:
    """Return the images' entries in a row from `with_names`; none if the row is no mapping."""
    columns = cast("Mapping[str, Any]", row) if isinstance(row, Mapping) else {}
    return [name for column in IMAGE_COLUMNS if columns.get(column) for name in _as_list(columns[column])]


def decode(data: bytes) -> Image:
    """Return the image of a file, in RGB, on white, and rotated according to its EXIF data. The size is
    checked before decoding. Raise ImageError if it cannot be read in one way, is too large, or Pillow is not
    installed."""
    module, ops = _pillow()
    try:
        with module.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"it has {width} × {height} pixels; expected at most {MAX_PIXELS:,}")
            if image.format != "JPEG" and getattr(image, "n_frames", 1) > 1:
                raise ImageError(f"it has {image.n_frames} frames; expected one")
            if image.mode not in _MODES:
                raise ImageError(f"its colours are {image.mode}; expected grey or RGB, so convert it")
            if image.format == "PNG" and "transparency" in image.info:
                image.info["transparency"] = _as_eight_bits(image.info["transparency"], image.mode, data[24])
            return _on_white(ops.exif_transpose(image))
    except ImageError:
        raise
    # Pillow raises many kinds of errors when it reads damaged files.
    except Exception as error:
        raise ImageError(str(error) or type(error).__name__) from error


def _on_white(image: Any) -> Image:
    """Return an image in RGB. What is transparent in it shows white."""
    module, _ = _pillow()
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return module.alpha_composite(module.new("RGBA", image.size, "white"), image).convert("RGB")


def _as_eight_bits(colour: Any, mode: str, bits: int) -> Any:
    """Return a PNG's transparent colour as Pillow reads the pixels, in 8 bits. Pillow does not convert it."""
    if mode == "RGB":
        return tuple(value >> bits - 8 for value in colour)
    return colour * {2: 85, 4: 17}.get(bits, 1) if mode == "L" else colour


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError("rows with images need Pillow: pip install 'stretto[vision]'") from error
    return Image, ImageOps


def _values(row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    columns = [column for column in IMAGE_COLUMNS if row.get(column)]
    if len(columns) > 1:
        raise column_error(row, columns[0], "and the column 'image' both hold images; expected one of them")
    if not columns:
        return []
    [column] = columns
    value = row[column]
    if column == "image":
        return [(column, value)]
    if not isinstance(value, list | tuple):
        raise column_error(row, column, f"expected a list of images, found {_describe(value)}")
    return [(column, item) for item in cast("Sequence[Any]", value)]


def file_of(value: Any) -> bytes:
    """Return the file of an image: a path, bytes, `{"bytes": ..., "path": ...}`, or a Pillow image, which
    gets a PNG file. Not decoded. Raise ImageError for another value, or an unreadable or too large file."""
    module, ops = _pillow()
    if isinstance(value, module.Image):
        file = io.BytesIO()
        _on_white(ops.exif_transpose(value)).save(file, "PNG")
        return file.getvalue()
    if isinstance(value, Mapping):  # the form of `datasets`; it has bytes, or only a path
        mapping = cast("Mapping[str, Any]", value)
        value = mapping.get("bytes") or mapping.get("path")
    if isinstance(value, str | Path):
        return _read(str(value))
    if not isinstance(value, bytes):
        raise ImageError(f"expected a path, or {{'bytes': …, 'path': …}}, found {_describe(value)}")
    if len(value) > MAX_FILE_BYTES:
        raise ImageError(f"an image has {len(value)} bytes; expected at most {MAX_FILE_BYTES}")
    return value


def files_of(values: Any) -> tuple[bytes, ...]:
    """Return the files of one message's images. Raise ImageError as `file_of`, or if the sum is too large."""
    if not isinstance(values, list | tuple):
        raise ImageError(f"expected a list of images, found {_describe(values)}")
    files = tuple(map(file_of, cast("Sequence[Any]", values)))
    if (size := sum(map(len, files))) > MAX_FILE_BYTES:
        raise ImageError(f"images have {size} bytes together; expected at most {MAX_FILE_BYTES}")
    return files


def _read(path: str) -> bytes:
    try:
        # O_NONBLOCK: to open a pipe would wait for its writer.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(f"{path!r} is not a regular file")
            size = status.st_size
            if size > MAX_FILE_BYTES:
                raise ImageError(f"{path!r} has {size} bytes; expected at most {MAX_FILE_BYTES}")
            return file.read(MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise ImageError(f"no such file: {path!r}") from error
    except (OSError, ValueError) as error:
        raise ImageError(f"{path!r} cannot be read: {error}") from error


def _path_of(value: Any) -> str | None:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        value = None if mapping.get("bytes") else mapping.get("path")
    return value if isinstance(value, str) else None


def _label(value: Any) -> str:
    path = _path_of(value)
    return "what its bytes hold" if path is None else repr(path)


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _name(value: Any) -> str | dict[str, Any]:
    path = _path_of(value)
    if path is not None:
        return path
    data = cast("Mapping[str, Any]", value).get("bytes") if isinstance(value, Mapping) else value
    return {"bytes": len(data)} if isinstance(data, bytes) else {"type": type(data).__name__}


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
