"""The requests of the run's user to the kernel: change the numbers of workers, and end the run."""

import structlog

from stretto.bus.client import Bus
from stretto.bus.joining import check_operator
from stretto.bus.messages.operation import RunScaled, RunStopping, ScaleRun, StopRun
from stretto.errors import ConfigError
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.worker_scaling import WorkerScaler
from stretto.kernel.setup import RunSetup

log = structlog.get_logger()


class Operation:
    """Carries out `stretto scale` and `stretto stop`."""

    def __init__(self, setup: RunSetup, bus: Bus, ending: Ending, scaler: WorkerScaler) -> None:
        self._setup = setup
        self._bus = bus
        self._ending = ending
        self._scaler = scaler

    async def serve(self) -> None:
        """Answer requests until the bus closes."""
        names = self._setup.names
        await self._bus.serve(names.kernel("operator", "scale"), ScaleRun, self._scale)
        await self._bus.serve(names.kernel("operator", "stop"), StopRun, self._stop)

    async def _scale(self, message: ScaleRun) -> RunScaled:
        self._check(message.token)
        if not self._setup.facts.started:
            raise ConfigError("the run has not started to train yet; repeat the command when it has")
        return RunScaled(await self._scaler.scale(message.numbers))

    async def _stop(self, message: StopRun) -> RunStopping:
        self._check(message.token)
        log.warning("asked to stop", now=message.now)
        if message.now:
            self._ending.forced = True
            self._ending.end("interrupted", "stretto stop --now")
            return RunStopping("the run ends at once, without a checkpoint")
        self._ending.drain("interrupted", "stretto stop")
        return RunStopping("the run finishes the step under way, writes a checkpoint, and ends")

    def _check(self, token: str) -> None:
        check_operator(self._setup.folder / "bus", token)
        if self._ending.over.is_set():
            raise ConfigError(f"the run is over ({self._ending.status})")
