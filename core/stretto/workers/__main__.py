"""`python -m stretto.workers BOOTSTRAP [--bus URL]`: run one worker process. Launchers use this command,
because the command line of `stretto` would take 0.1 s more to import."""

import argparse
import faulthandler
import os
import resource
import signal
import sys
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.assembly.logs import log_to
from stretto.assembly.worker_numbers import EVALUATOR
from stretto.bus.server import Bootstrap
from stretto.errors import leaves
from stretto.machine.proxies import spare_this_machine
from stretto.workers.output import limit_output
from stretto.workers.process import HostProcess
from stretto.workers.worker import work

log = structlog.get_logger()

_NICE = 10
"""Niceness of the evaluator: it gets idle processor time, and about a tenth of the share of others."""


def main(bootstrap: Bootstrap, *, by_hand: bool) -> int:
    """Run a worker. One started `by_hand` also logs to the terminal, and joins without the kernel's lock."""
    # SIGUSR1 writes the stacks of all threads to stderr, even while the event loop hangs.
    faulthandler.register(signal.SIGUSR1)
    os.umask(0o077)  # a worker that was started by hand does not inherit it from the kernel
    spare_this_machine()
    _raise_file_limit()
    limit_output()
    worker, lock = bootstrap.worker, bootstrap.lock
    # Where the run's folder is not visible, the log goes into the output, which a launcher collects.
    sees_folder = lock is not None and lock.folder_readable and Path(bootstrap.logs).is_dir()
    file = Path(bootstrap.logs, f"{worker}.jsonl") if sees_folder else None
    if worker == EVALUATOR:
        os.nice(_NICE)
    if by_hand:
        bootstrap = msgspec.structs.replace(bootstrap, lock=None)
    log_to(file, console=by_hand or file is None, run=bootstrap.run, role=bootstrap.role, worker=worker)
    try:
        anyio.run(work, bootstrap, HostProcess())
    except BaseExceptionGroup as group:
        for error in leaves(group):
            log.error("worker failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            text = "; ".join(filter(None, (str(error), *getattr(error, "__notes__", ()))))
            print(f"{worker}: {type(error).__name__}: {text}", flush=True)
        return 1
    return 0


def _raise_file_limit() -> None:
    """Raise the limit of open files, usually 1024: a worker has pipes to hundreds of processes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m stretto.workers", description="Run one worker process.")
    # For a process on another machine, the launcher sends the text: no file there then has the secrets.
    parser.add_argument(
        "bootstrap", help="file with the bus address, credentials and id; - to read its text from stdin"
    )
    parser.add_argument("--by-hand", action="store_true", help="a user has started it, perhaps elsewhere")
    parser.add_argument("--bus", help="address of nats-server as it is reached from here")
    parser.add_argument("--credentials", help="file with a login for a server of the user's own")
    options = parser.parse_args()
    if options.bootstrap == "-":
        bootstrap = Bootstrap.decode(sys.stdin.buffer.read(), "the text on standard input")
    else:
        bootstrap = Bootstrap.read(Path(options.bootstrap))
    sys.exit(main(bootstrap.reached(options.bus, options.credentials), by_hand=options.by_hand))
