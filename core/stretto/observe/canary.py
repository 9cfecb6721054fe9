"""The difference between engines and trainer at each swap, for metrics and summary."""

from typing import Any

import structlog

from stretto.bus.messages.events import WeightsServed
from stretto.rl.drift import Drift

log = structlog.get_logger()


class CanaryRecord:
    """The canary drifts of all engines. The first drift above `bound` (None: no canary) becomes a problem."""

    def __init__(self, bound: float | None, problems: list[str]) -> None:
        self._bound = bound
        self._problems = problems
        self._news: list[Drift] = []
        self._engine_kls: list[float] = []
        self._compared = 0
        self._beyond = 0
        self._worst: tuple[Drift, str, int] | None = None
        self._not_compared: dict[str, str] = {}

    def add(self, done: WeightsServed) -> None:
        """Add a swap's results for the canary and for the shared rows."""
        if done.engine_kl is not None:
            self._engine_kls.append(done.engine_kl)
        worker, version, drift = done.worker, done.version, done.drift
        if drift is None:
            if done.unscored and self._not_compared.get(worker) != done.unscored:
                self._not_compared[worker] = done.unscored
                log.info("canary not compared", worker=worker, reason=done.unscored)
            return
        self._compared += 1
        self._news.append(drift)
        if self._worst is None or drift.mean > self._worst[0].mean:
            self._worst = (drift, worker, version)
        if (bound := self._bound) is not None and not drift.within(bound):
            self._beyond += 1
            log.warning("canary drifts", worker=worker, version=version, mean=drift.mean, bound=bound)
            if self._beyond == 1:
                self._problems.append(
                    f"version {version}: the canary drifts by {drift.mean:.3g} a token between {worker} and "
                    f"the trainer; inference.canary.bound is {bound:g}"
                )

    def news(self) -> dict[str, float]:
        """Return the largest figures of the swaps since the last call, for a step's metrics."""
        drifts, self._news = self._news, []
        engine_kls, self._engine_kls = self._engine_kls, []
        figures = {"engine_kl": _short(max(engine_kls))} if engine_kls else {}
        if drifts:
            figures["canary_mean"] = _short(max(drift.mean for drift in drifts))
            figures["canary_max"] = _short(max(drift.max for drift in drifts))
        return figures

    def summary(self) -> dict[str, Any] | None:
        """Return the section of the run's summary: the largest drift, and the workers whose canary was not
        compared, with the reasons. None if the run has no canary."""
        if self._bound is None:
            return None
        figures: dict[str, Any] = {"compared": self._compared, "beyond_bound": self._beyond}
        if self._worst is not None:
            drift, worker, version = self._worst
            figures |= {"mean": _short(drift.mean), "max": _short(drift.max)}
            figures |= {"worker": worker, "version": version}
        return figures | {"not_compared": self._not_compared}


def _short(value: float) -> float:
    return float(f"{value:.3g}")
