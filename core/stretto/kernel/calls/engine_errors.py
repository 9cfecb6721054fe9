"""The numerical error of each engine against the trainer, which is not divergence of the policy."""

import structlog

from stretto.bus.messages.inference import SwapDone

log = structlog.get_logger()

_WEIGHT = 0.25
"""Weight of an engine's newest error in its moving average."""


class EngineErrors:
    """Each engine's KL to the trainer at the same version, in nats per token: a moving average over swaps."""

    def __init__(self) -> None:
        self._kl: dict[str, float] = {}
        self._unscored: dict[str, str] = {}

    def add(self, worker: str, done: SwapDone) -> None:
        """Add what an engine measured after a swap, on rows that the trainer scored too."""
        if done.engine_kl is not None:
            average = self._kl.get(worker, done.engine_kl)
            self._kl[worker] = average + _WEIGHT * (done.engine_kl - average)
        elif done.rows_unscored and self._unscored.get(worker) != done.rows_unscored:
            self._unscored[worker] = done.rows_unscored
            log.warning(
                "engine's error unknown; it counts as divergence", worker=worker, reason=done.rows_unscored
            )

    def divergence(self, measured: float | None) -> float | None:
        """Return the measured divergence of a batch minus the engines' mean error, at least 0. If no error is
        known, subtract 0. Return None if nothing was measured or no engine has tried the comparison yet."""
        if measured is None or not (self._kl or self._unscored):
            return None
        return max(0.0, measured - sum(self._kl.values()) / max(1, len(self._kl)))
