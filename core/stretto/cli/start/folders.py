"""Folders that commands write."""

from pathlib import Path

OUTPUT = "output.txt"
"""File in a detached run's folder with the output of the run's command. It exists before the run."""


def is_free(folder: Path) -> bool:
    """Return whether a command may write a new folder here: nothing is there yet, or an empty folder."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(path.name == OUTPUT for path in folder.iterdir())
