"""A folder at an fsspec URL, such as `s3://bucket/checkpoints`: write files into it, read and remove them.

Credentials come from the environment or fsspec's settings; a URL with a login is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["RemoteFolder", "file_hash", "missing_file_system"]

_EXTRAS = {"s3": "stretto[s3]", "s3a": "stretto[s3]", "gs": "stretto[gcs]", "gcs": "stretto[gcs]"}


def missing_file_system(url: str) -> str:
    """Return why this machine cannot use a URL, and what to do; empty if it can."""
    from fsspec import get_filesystem_class

    protocol = url.partition("://")[0]
    if protocol == "memory":
        return "memory:// is the memory of one process, and the processes of a run share none"
    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        return str(error)
    except ImportError as error:
        return f"{error}; install {_EXTRAS.get(protocol, f'the fsspec package of {protocol}://')}"
    return ""


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RemoteFolder:
    """One remote folder. It exists once it has a file. The methods block, and any thread may call them.

    All methods raise FileNotFoundError for a file that does not exist, and OSError, which names the URL, for
    every other failure. Names of files are relative, with `/`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def below(self, name: str) -> RemoteFolder:
        """Return a folder in this one."""
        return RemoteFolder(f"{self.url}/{name}")

    def upload(self, folder: Path) -> dict[str, str]:
        """Copy all files of a local folder into this one, and return name -> SHA-256 of each."""
        hashes: dict[str, str] = {}
        for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
            name = path.relative_to(folder).as_posix()
            hashes[name] = file_hash(path)
            with self._connected() as (system, root):
                system.put_file(str(path), f"{root}/{name}")
        return hashes

    def download(self, hashes: Mapping[str, str], folder: Path) -> None:
        """Copy the files named in `hashes` into a local folder, and compare each with its SHA-256 there. Also
        raise OSError if a file differs from its hash, or its name leads out of `folder`."""
        for name, value in hashes.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise OSError(f"{self.url}: {name!r} is not the name of a file in a folder")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._connected() as (system, root):
                system.get_file(f"{root}/{name}", str(path))
            if file_hash(path) != value:
                raise OSError(f"{self.url}/{name} differs from its hash")

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with self._connected() as (system, root):
            return system.cat_file(f"{root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, completely or not at all where the file system can do so."""
        with self._connected() as (system, root):
            system.pipe_file(f"{root}/{name}", data)

    def files(self) -> set[str]:
        """Return the names of all files, also of those in folders below; empty if there is no folder."""
        with self._connected() as (system, root):
            return {path.removeprefix(root).lstrip("/") for path in system.find(root)}

    def remove(self, first: str = "") -> None:
        """Remove all files, and `first` before the others."""
        with self._connected() as (system, root):
            if first and system.exists(f"{root}/{first}"):
                system.rm_file(f"{root}/{first}")
            if system.exists(root):
                system.rm(root, recursive=True)

    @contextmanager
    def _connected(self) -> Generator[tuple[Any, str]]:
        """Yield the file system and the folder's path in it. Its errors are raised as OSError."""
        try:
            import fsspec.core

            local = self.url.startswith(("file://", "local://"))
            # A cached list of files may lack files that another process has written: cache none.
            options: dict[str, Any] = {"use_listings_cache": False, **({"auto_mkdir": True} if local else {})}
            system, root = fsspec.core.url_to_fs(self.url, **options)
            yield system, root
        except FileNotFoundError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error
