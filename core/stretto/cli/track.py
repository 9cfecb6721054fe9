"""`stretto track`: send to the trackers of a run what they have not received yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

from stretto.assembly.compose import compose
from stretto.bus.guard import is_locked
from stretto.children.tracker import command
from stretto.errors import ConfigError

__all__ = ["track_run"]


def track_run(folder: Path) -> list[str]:
    """Send everything, one tracker after the other. Return the names of the trackers that failed; they have
    printed why.

    Raises:
        ConfigError: if the folder holds no run, if the run has no trackers, or if it goes on.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{folder} holds no run: it has no config.yaml")
    trackers = compose(file).config.trackers
    if not trackers:
        raise ConfigError(f"the run in {folder} has no trackers")
    if is_locked(folder / "bus" / "kernel.lock"):
        raise ConfigError(f"the run in {folder} goes on, and its trackers follow it; wait for its end")
    names = [section.folder_name for section in trackers]
    return [name for name in names if subprocess.run(command("send", folder, name), check=False).returncode]
