"""Jobs for launchers: `from worker_jobs import job`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.launcher import Job, Resources, Role


def job(
    worker: str,
    gpus: int = 0,
    share: float = 1.0,
    *,
    code: str = "",
    command: Sequence[str] = (),
    folder: Path | None = None,
    unit: str = "",
    **resources: Any,
) -> Job:
    """Return a job whose worker's id begins with its role.

    Args:
        code: what Python runs, in place of a command.
        folder: for the log, `WORKER.log`.
    """
    role: Role = worker.partition("-")[0]  # pyright: ignore[reportAssignmentType] - the tests name real roles
    return Job(
        worker=worker,
        role=role,
        command=(sys.executable, "-c", code) if code else tuple(command),
        env={},
        resources=Resources(gpus=gpus, share=share, **resources),
        log=str(folder / f"{worker}.log") if folder else "",
        unit=unit,
    )
