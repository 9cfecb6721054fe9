"""Runs that a cluster starts: `stretto run` and `stretto resume` with a launcher that submits."""

import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.assembly.assembly import Assembly
from stretto.cli.start.acceptance import accepted
from stretto.errors import ConfigError
from stretto.kernel.durable.changes import compose_changes
from stretto.launcher import Launcher, Submission, SubmittingLauncher

_STRETTO = (sys.executable, "-m", "stretto")


def submitted_run(assembly: Assembly, file: Path, overrides: Sequence[str], *, dry_run: bool) -> bool:
    """Submit a run if its launcher submits runs, and return whether the launcher does."""
    folder = assembly.folder
    begin = (*_STRETTO, "run", str(file.absolute()), *overrides, f"out={folder}")
    resume = (*_STRETTO, "resume", str(folder))
    return _submitted(assembly, begin, resume, dry_run=dry_run, resumed=False)


def submitted_resume(
    assembly: Assembly, overrides: Sequence[str], options: Sequence[str], *, dry_run: bool
) -> bool:
    """Submit the resumption of a run if its launcher submits runs, and return whether the launcher does."""
    resume = (*_STRETTO, "resume", str(assembly.folder), *overrides, *options)
    if overrides and isinstance(assembly.make("launcher"), SubmittingLauncher):
        assembly = compose_changes(assembly, overrides)  # a run that starts here checks values later
    return _submitted(assembly, resume, resume, dry_run=dry_run, resumed=True)


def _submitted(
    assembly: Assembly, begin: tuple[str, ...], resume: tuple[str, ...], *, dry_run: bool, resumed: bool
) -> bool:
    launcher: Launcher = assembly.make("launcher")
    text: str | None = None
    if isinstance(launcher, SubmittingLauncher):
        jobs = tuple(worker.job() for worker in assembly.workers)
        submission = Submission(begin=begin, resume=resume, folder=str(assembly.folder), jobs=jobs)
        text = launcher.submission(submission)
    if not isinstance(launcher, SubmittingLauncher) or text is None:
        if dry_run:
            name = assembly.config.launcher.use
            raise ConfigError(
                f"--dry-run prints what is submitted to a cluster; the launcher {name!r} starts the run here"
            )
        return False
    if dry_run:
        print(text, end="")
        return True
    accepted(assembly, starting=False, resumed=resumed)
    folder = assembly.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"{launcher.submit(text)}; the run's folder is {folder}")
    print(f"to follow the run once it has begun: stretto watch {folder}")
    return True
