"""`stretto track`: send to the trackers of a run what they have not received yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

from stretto.assembly.compose import compose
from stretto.children.tracker import command
from stretto.errors import ConfigError
from stretto.run_folder import RunFolder


def track_run(folder: Path) -> list[str]:
    """Send everything, one tracker after the other. Return the names of the trackers that failed; they have
    printed why.

    Raises:
        ConfigError: if the folder holds no run, if the run has no trackers, or if it continues.
    """
    record = RunFolder(folder)
    trackers = compose(folder / "config.yaml").config.trackers
    if not trackers:
        raise ConfigError(f"the run in {folder} has no trackers")
    if record.state == "running":
        raise ConfigError(f"the run in {folder} still runs, and its trackers follow it; wait for its end")
    names = [section.folder_name for section in trackers]
    return [name for name in names if subprocess.run(command("send", folder, name), check=False).returncode]
