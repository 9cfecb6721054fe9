"""The images that workflows added to kept samples, in the folder `samples/images` of a run.

A file's name is its SHA-256: so each image is kept once, and a reader can check it.
"""

import re
from pathlib import Path

from stretto.errors import ConfigError
from stretto.machine.private_file import write_private
from stretto.models.images import MAX_FILE_BYTES, ImageFile
from stretto.records.files import open_record
from stretto.records.samples.files import FOLDER

_NAME = re.compile(r"\A[0-9a-f]{64}\Z")


def is_image_name(name: object) -> bool:
    """Return whether a value is an image's name, 64 hexadecimal digits. Only such names enter a path."""
    return isinstance(name, str) and _NAME.match(name) is not None


class SampleImages:
    """The images in a run's folder. The folder of images need not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER / "images"

    def __contains__(self, name: str) -> bool:
        """Return whether there is a file of this name, without reading it."""
        return self._path(name).is_file()

    def read(self, name: str) -> bytes | None:
        """Return an image's file; None if missing or damaged. ConfigError if unreadable or misnamed."""
        path = self._path(name)
        try:
            with open_record(path, links=False) as file:  # a link may lead out of the folder
                image = ImageFile(file.read(MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return image.file if image.digest == name else None

    def write(self, image: ImageFile) -> None:
        """Keep an image; OSError if the disk is full or cannot be written."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._folder / image.digest, image.file)

    def keep_only(self, names: set[str]) -> None:
        """Remove all other images, and incomplete files that a killed writer has left."""
        for path in self._folder.glob("*"):
            if path.name not in names:
                path.unlink()

    def _path(self, name: str) -> Path:
        if not is_image_name(name):
            raise ConfigError(f"{name[:80]!r} is no image's name; expected 64 hexadecimal digits")
        return self._folder / name
