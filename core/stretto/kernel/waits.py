"""The causes for which training waits between two steps, and how long. The scheduler reports what the next
batch lacks. If it lacks groups and no engine samples for training, the cause is what keeps the engines from
sampling: an evaluation or a swap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import itemgetter

from stretto.bus.messages.events import Cause
from stretto.machine import clock


class Waits:
    """The waits of one kernel. `sampled` says whether groups come from inference engines."""

    def __init__(self, *, sampled: bool, clock: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._now, self._taken = _State(sampled=sampled), _State(sampled=sampled)
        """The state at this moment, and at the last call of `take`."""
        self._changes: list[tuple[float, Callable[[_State], None]]] = []
        """(time, change) since the last call of `take`."""
        self._began = clock()

    @property
    def cause(self) -> Cause | None:
        """What training waits for now; None if it does not wait."""
        return self._now.cause()

    def lacks(self, cause: Cause | None) -> None:
        """Set what the next step waits for according to the scheduler."""
        if cause != self._now.lacks:
            self._change(lambda state: setattr(state, "lacks", cause))

    def away(self, engine: str, cause: Cause) -> None:
        """Record that an engine stops sampling for training now, and why."""
        self._change(lambda state: state.put(engine, cause))

    def serves(self, engine: str, version: int, pause_s: float) -> None:
        """Record that an engine samples for training again, after a swap that stopped it for `pause_s`."""
        if engine in self._now.engines and self._now.engines[engine] is None:
            swap = Cause("swap", version)
            self._changes.append((self._clock() - pause_s, lambda state: state.put(engine, swap)))
        self._change(lambda state: state.put(engine, None))

    def gone(self, engine: str) -> None:
        """Record that an engine is lost or has left."""
        self._change(lambda state: state.remove(engine))

    def begin(self) -> None:
        """Start to measure waits: a step has ended, or the run issues its first tickets."""
        self._began = self._clock()

    def end(self) -> tuple[tuple[Cause, float], ...]:
        """Return the causes of waits since `begin`, in order, with seconds. Called when a step begins."""
        parts: list[tuple[Cause, float]] = []
        moment, now, state = self._began, self._clock(), self._taken
        for at, change in sorted(self._changes, key=itemgetter(0)):
            _append(parts, state.cause(), at - moment)
            moment = max(moment, at)
            change(state)
        _append(parts, state.cause(), now - moment)
        self._changes.clear()
        return tuple(parts)

    def _change(self, change: Callable[[_State], None]) -> None:
        change(self._now)
        self._changes.append((self._clock(), change))


class _State:
    def __init__(self, *, sampled: bool) -> None:
        self._sampled = sampled
        self.lacks: Cause | None = None
        self.engines: dict[str, Cause | None] = {}
        """What keeps each engine from sampling for training; None if nothing does."""
        self._counts: Counter[Cause | None] = Counter()

    def put(self, engine: str, cause: Cause | None) -> None:
        self.remove(engine)
        self.engines[engine] = cause
        self._counts[cause] += 1

    def remove(self, engine: str) -> None:
        if engine in self.engines:
            self._counts -= Counter([self.engines.pop(engine)])

    def cause(self) -> Cause | None:
        if self.lacks is None or self.lacks.kind not in ("groups", "late_ticket"):
            return self.lacks
        if not self._sampled or self._counts[None]:  # some engine samples for training
            return self.lacks
        reasons = [cause for cause, count in self._counts.items() if cause is not None and count]
        return max(
            reasons, key=lambda cause: (cause.kind == "evaluation", cause.number), default=Cause("engines")
        )


def _append(parts: list[tuple[Cause, float]], cause: Cause | None, seconds: float) -> None:
    """Append a part of a wait. Join it to the last part if that has the same cause."""
    if seconds <= 0:
        return
    cause = cause or Cause("overhead")
    if parts and parts[-1][0] == cause:
        seconds += parts.pop()[1]
    parts.append((cause, seconds))
