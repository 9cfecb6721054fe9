"""Folders that commands write."""

from pathlib import Path

__all__ = ["is_free"]


def is_free(folder: Path) -> bool:
    """Whether a command may write a new folder here: nothing is there yet, or an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
