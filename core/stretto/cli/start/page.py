"""`stretto run --ui`: the page of the run, until the command ends."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer

from stretto.errors import RunError
from stretto.user_code.guard import end_with_parent


@contextmanager
def page_of(folder: Path, *, serve: bool) -> Generator[None]:
    """If `serve`, serve the run's page during the block and print its address; else print the command."""
    command = ["stretto", "ui", str(folder)]
    if not serve:
        typer.echo(f"to see the run in a browser: {shlex.join(command)}", err=True)
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the page stays while the first Ctrl-C drains the run
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    ) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            if not address:
                raise RunError("--ui: `stretto ui` has ended; its message is above")
            typer.echo(f"the run in a browser: {address}", err=True)
            yield
        finally:
            server.terminate()
