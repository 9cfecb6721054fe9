"""`python -m stretto.kernel.durable.clean RUN`: remove what killed processes of a run left behind. The guard
of the run's nats-server starts this command when the kernel has been gone for the grace time. A killed
trainer leaves weights in shared memory; the run's weight transport removes them."""

import sys
from pathlib import Path

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.bus.server import Bootstrap, lock_run
from stretto.errors import ConfigError
from stretto.weights import WeightsTransport


def cleaner_of(folder: Path) -> tuple[str, ...]:
    """Return the command that cleans up after the run in `folder`."""
    return (sys.executable, "-m", "stretto.kernel.durable.clean", str(folder))


def _clean(folder: Path) -> None:
    composed = compose(folder / "config.yaml")
    run = Bootstrap.read(folder / "bus" / "kernel.json").run
    transport: WeightsTransport = Assembly(composed, folder=folder, run=run).make("weights")
    try:
        lock = lock_run(folder / "bus")
    except ConfigError:  # a new kernel has the lock, and has cleaned up
        return
    with lock:
        transport.clean()


if __name__ == "__main__":
    _clean(Path(sys.argv[1]))
