"""Folders that commands write."""

from pathlib import Path

OUTPUT = "output.txt"
"""The file in the folder of a detached run that gets what its command prints. It exists before the run."""


def is_free(folder: Path) -> bool:
    """Return whether a command may write a new folder here: nothing is there yet, or an empty folder."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(each.name == OUTPUT for each in folder.iterdir())
