"""The numbers of workers that follow what a run waits for: `elastic` in the run file. A class without I/O.

The policy gets an observation every second and judges windows of them. In a window it looks for the stage
that limits the run: training if batches are trained nearly all the time; else the last stage of verifiers,
engines and rollout workers whose capacity is used up while more work waits for it. That stage gets more.

Every change is a trial. More workers stay if the run finishes more groups per second with them, or if another
stage is the limit now. Fewer workers stay if it does not finish fewer. Otherwise the previous number returns,
and the policy leaves the other one alone for some time. So a cause that no figure shows, such as a machine
whose cores are all in use, cannot make it grow without end. Between two changes the new workers must be
ready, the run must settle, and a window must pass, so that the numbers do not swing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.launcher import Role

_STAGES: tuple[Role, ...] = ("verifier", "inference", "rollout")
"""The last stage of a ticket first: a stage that is full makes the stages before it look full too."""
_WINDOW_S = 10.0
"""Shortest window."""
_MOST_WINDOW_S = 60.0
_GROUPS = 48
"""A window lasts until this many groups have finished, but no longer than `_MOST_WINDOW_S`: with few groups,
the speed of a window says little."""
_SETTLE_S = 4.0
"""Seconds after a change that belong to no window: tickets in hand were begun before it."""
_MOST_START_S = 120.0
"""Seconds after which the policy continues, although workers that it has asked for are not there."""
_TRAINS = 0.9
"""Training is the limit if batches are trained for more than this share of the time."""
_FULL = 0.85
"""A stage is full if this share of its capacity is used."""
_WAITING = 0.2
"""Work must wait that fills this part of one more worker."""
_IDLE = 0.5
"""A stage may have too many workers if less than this share of its capacity is used."""
_IDLE_WINDOWS = 3
"""Number of such windows in a row before a stage gets fewer."""
_USED = 0.7
"""The share of the capacity that is used with the smaller number, if the load stays the same."""
_GAIN = 1.05
"""More workers stay if the run is faster by this factor."""
_LOSS = 0.95
"""Fewer workers stay if the run is not slower than by this factor."""
_RETRY_S = 600.0
"""Seconds after which a number that was not better is tried again."""


@dataclass(frozen=True)
class RoleLoad:
    """The load of one role's workers at one moment."""

    number: int
    """Workers that the run has started and that stay."""
    used: float
    """Share of their capacity that is in use, from 0 to 1."""
    waiting: float
    """Work that waits for them, in units of what one worker can do at a time."""
    ready: bool = True
    """Whether all of them are ready."""


@dataclass(frozen=True)
class LoadObservation:
    """What the kernel sees at one moment."""

    groups: int
    """Groups that were finished since the start of the kernel."""
    training: bool
    """Whether a batch is being trained."""
    loads: Mapping[Role, RoleLoad]


@dataclass(frozen=True)
class NumberChange:
    """Another number of workers."""

    role: Role
    number: int
    why: str


@dataclass
class _LoadWindow:
    """The observations since a moment."""

    began: float
    groups: int
    observations: list[LoadObservation] = field(default_factory=list[LoadObservation])

    def speed(self, now: float) -> float:
        """Groups per second."""
        return (self.observations[-1].groups - self.groups) / max(now - self.began, 1e-9)

    def trained(self) -> float:
        """Share of the time in which a batch was trained."""
        return sum(each.training for each in self.observations) / len(self.observations)

    def mean(self, role: Role) -> RoleLoad:
        """The mean load of a role. If training is not the limit, only while no batch is trained: a run that
        generates and trains in turns needs its workers only then."""
        chosen = [each for each in self.observations if not each.training]
        if self.trained() > _TRAINS or not chosen:
            chosen = self.observations
        loads = [each.loads[role] for each in chosen]
        used, waiting = (
            sum(values) / len(loads) for values in zip(*((e.used, e.waiting) for e in loads), strict=True)
        )
        return RoleLoad(loads[-1].number, used, waiting)


@dataclass(frozen=True)
class _NumberTrial:
    """A change whose effect is not known yet."""

    role: Role
    before: int
    after: int
    speed: float
    """Groups per second before it."""


class ElasticPolicy:
    """The numbers of one run's workers.

    Args:
        bounds: role -> fewest and most workers.
    """

    def __init__(self, bounds: Mapping[Role, tuple[int, int]]) -> None:
        self._bounds = bounds
        self._window: _LoadWindow | None = None
        self._quiet_until = -math.inf
        """No window begins before."""
        self._give_up_at = math.inf
        """The policy no longer waits for missing workers then."""
        self._trial: _NumberTrial | None = None
        self._closed: dict[tuple[Role, int], float] = {}
        """(role, number) that was not better than the number before it -> until when it is not tried."""
        self._idle: dict[Role, int] = {}
        """Number of windows in a row in which a role had too many workers."""

    def observe(self, now: float, observation: LoadObservation) -> NumberChange | None:
        """Take in an observation, and return the change to make now; None for none.

        Args:
            now: seconds, of any clock that does not go back.
        """
        if self._must_wait(now, observation):
            self._window = None
            return None
        if self._window is None:
            self._window = _LoadWindow(now, observation.groups)
        window = self._window
        window.observations.append(observation)
        if not self._is_over(window, now):
            return None
        self._window = None
        change = self._judge(window, now) if self._trial is not None else self._next(window, now)
        if change is not None:
            self._idle.clear()
            self._quiet_until, self._give_up_at = now + _SETTLE_S, now + _MOST_START_S
        return change

    def disturb(self) -> None:
        """Drop the current window: something else than the numbers of workers decides on its speed."""
        self._window = None

    def refuse(self, change: NumberChange, now: float) -> None:
        """Take in that a change could not be made. The policy does not try that number for some time."""
        self._closed[change.role, change.number] = now + _RETRY_S
        self._trial = None

    # ------------------------------------------------------------------------------------ private

    def _must_wait(self, now: float, observation: LoadObservation) -> bool:
        """Return whether a change is still taking effect."""
        if now < self._quiet_until:
            return True
        if all(load.ready for load in observation.loads.values()) or now >= self._give_up_at:
            self._give_up_at = math.inf
            return False
        if self._give_up_at == math.inf:  # a worker was lost, and starts again
            self._give_up_at = now + _MOST_START_S
        self._quiet_until = now + _SETTLE_S
        return True

    def _is_over(self, window: _LoadWindow, now: float) -> bool:
        lasted = now - window.began
        enough = window.observations[-1].groups - window.groups >= _GROUPS
        return lasted >= _MOST_WINDOW_S or (lasted >= _WINDOW_S and enough)

    def _judge(self, window: _LoadWindow, now: float) -> NumberChange | None:
        """Keep the numbers of the trial, or return to the previous ones."""
        trial, self._trial = self._trial, None
        assert trial is not None
        speed = window.speed(now)
        grown = trial.after > trial.before
        if speed >= trial.speed * (_GAIN if grown else _LOSS):
            return self._next(window, now)
        moved = self._growth(window, now) if grown else None
        if moved is not None and moved.role != trial.role:  # both stages were the limit
            return self._try(moved, window, trial.speed)
        self._closed[trial.role, trial.after] = now + _RETRY_S
        if window.observations[-1].loads[trial.role].number != trial.after:  # the user has changed it
            return None
        why = f"{trial.after} were not better: {speed:.2f} groups/s, before {trial.speed:.2f}"
        return NumberChange(trial.role, trial.before, why)

    def _next(self, window: _LoadWindow, now: float) -> NumberChange | None:
        """Return the next change to try; None if nothing is worth it."""
        change = self._growth(window, now) or self._decline(window, now)
        return None if change is None else self._try(change, window, window.speed(now))

    def _try(self, change: NumberChange, window: _LoadWindow, speed: float) -> NumberChange:
        """Begin the trial of a change.

        Args:
            speed: groups per second, which the change has to improve on.
        """
        before = window.observations[-1].loads[change.role].number
        self._trial = _NumberTrial(change.role, before, change.number, speed)
        return change

    def _growth(self, window: _LoadWindow, now: float) -> NumberChange | None:
        """Return more workers for the stage that limits the run."""
        if window.trained() > _TRAINS:
            return None
        for role in _STAGES:
            if role not in window.observations[-1].loads:
                continue
            load = window.mean(role)
            if load.used < _FULL or load.waiting < _WAITING:
                continue
            if role not in self._bounds:
                return None  # more of the others would wait for this one
            wanted = min(2 * load.number, load.number + math.ceil(load.waiting), self._bounds[role][1])
            number = self._open_number(role, load.number, wanted, now)
            if number == load.number:
                return None
            why = f"{load.used:.0%} of their capacity is used, and work for {load.waiting:.1f} more waits"
            return NumberChange(role, number, why)
        return None

    def _decline(self, window: _LoadWindow, now: float) -> NumberChange | None:
        """Return fewer workers for a stage that has had too many for some time."""
        for role, (fewest, _) in self._bounds.items():
            load = window.mean(role)
            idle = load.used < _IDLE and load.number > fewest
            self._idle[role] = self._idle.get(role, 0) + 1 if idle else 0
            if self._idle[role] < _IDLE_WINDOWS:
                continue
            wanted = max(fewest, math.ceil(load.number / 2), math.ceil(load.number * load.used / _USED))
            number = self._open_number(role, load.number, wanted, now)
            if number != load.number:
                return NumberChange(role, number, f"{load.used:.0%} of their capacity is used")
        return None

    def _open_number(self, role: Role, present: int, wanted: int, now: float) -> int:
        """Return the number nearest to `wanted`, between it and the current one, that may be tried."""
        step = 1 if wanted > present else -1
        numbers = range(wanted, present, -step)
        return next((each for each in numbers if self._closed.get((role, each), -math.inf) <= now), present)
