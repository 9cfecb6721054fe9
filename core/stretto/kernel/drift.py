"""The canary, as the kernel tells of it: how far engines are from the trainer, swap by swap."""

from __future__ import annotations

from typing import Any

import structlog

from stretto.bus.messages import Drift, SwapDone
from stretto.engine import CanaryConfig

__all__ = ["Drifts"]

log = structlog.get_logger()


class Drifts:
    """The drifts of all engines.

    Args:
        problems: of the run's summary; told of the first drift beyond the bound.
    """

    def __init__(self, config: CanaryConfig | None, problems: list[str]) -> None:
        self._config = config
        self._problems = problems
        self._news: list[Drift] = []
        self._compared = 0
        self._beyond = 0
        self._worst: tuple[Drift, str, int] | None = None
        self._not_compared: dict[str, str] = {}

    def add(self, worker: str, done: SwapDone) -> None:
        """What came of the canary at a swap."""
        if done.drift is not None:
            self._take(worker, done.report.version, done.drift)
        elif done.unscored and self._not_compared.get(worker) != done.unscored:
            self._not_compared[worker] = done.unscored
            log.info("canary not compared", worker=worker, reason=done.unscored)

    def news(self) -> dict[str, float]:
        """For the metrics of a step: the worst of the swaps since it was last asked; nothing without one."""
        drifts, self._news = self._news, []
        if not drifts:
            return {}
        return {
            "canary_mean": _short(max(drift.mean for drift in drifts)),
            "canary_max": _short(max(drift.max for drift in drifts)),
        }

    def summary(self) -> dict[str, Any] | None:
        """For the summary of the run: the worst, and who could not be compared, and why."""
        if self._config is None:
            return None
        figures: dict[str, Any] = {"compared": self._compared, "beyond_bound": self._beyond}
        if self._worst is not None:
            drift, worker, version = self._worst
            figures |= {"mean": _short(drift.mean), "max": _short(drift.max)}
            figures |= {"worker": worker, "version": version}
        return figures | {"not_compared": self._not_compared}

    def _take(self, worker: str, version: int, drift: Drift) -> None:
        self._compared += 1
        self._news.append(drift)
        if self._worst is None or drift.mean > self._worst[0].mean:
            self._worst = (drift, worker, version)
        if self._config is not None and not drift.within(bound := self._config.bound):
            self._beyond += 1
            log.warning("canary drifts", worker=worker, version=version, mean=drift.mean, bound=bound)
            if self._beyond == 1:
                self._problems.append(
                    f"version {version}: the canary drifts by {drift.mean:.3g} a token between {worker} and "
                    f"the trainer; inference.canary.bound is {bound:g}"
                )


def _short(value: float) -> float:
    return float(f"{value:.3g}")
