"""Files that survive a power cut and that only the user can read, and the folder for files that stretto can
create again."""

import os
from pathlib import Path

__all__ = ["cache_folder", "sync", "write_private"]


def cache_folder(name: str) -> Path:
    """Return this user's folder for files that stretto can create again, such as copies of checkpoints."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stretto" / name


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only the user can read. It is never partly written, even after a power cut."""
    temporary = path.with_name(f".{path.name}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync(path: Path) -> None:
    """Flush a file, or the names of the files in a folder, to the disk. OSError if that fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
