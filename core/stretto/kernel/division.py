"""How many threads and processes a run's engines get where the run file says `auto`: measured, not guessed.

The run begins with 1 everywhere. After some steps the division knows how fast they are, which part of the run
the others wait for, and how many cores are idle. It then tries more threads for that part, and keeps them if
steps become faster. At last it tries the same cores as more processes. It ends when no core is idle, or when
nothing that is left to try makes steps faster.

Pure: it gets the figures of steps and returns numbers. The kernel carries them out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.assembly.compose import Composed
from stretto.cores import available_cores

__all__ = ["CoreDivision", "StepLoad", "division_of"]

_STEPS = 6
"""Number of steps whose median speed is compared."""
_SETTLING = 2
"""Number of steps to leave out after a start and after each change."""
_GAIN = 1.05
"""A change is kept if steps are faster by this factor: less can be noise."""
_HOPELESS = 0.6
"""A trial ends early when each of its first two steps is slower by this factor."""
_BUSY = 0.2
"""A core that is idle for at most this share of the time is not worth a trial."""


@dataclass(frozen=True)
class StepLoad:
    """The figures of one step."""

    tokens: int
    """Trained tokens."""
    step_s: float
    train_s: float
    """Seconds in which training worked."""
    generate_s: float
    """Seconds in which the engines worked: mean over engines."""
    cores_used: float
    """Share of the cores that was busy."""

    @property
    def speed(self) -> float:
        """Trained tokens a second."""
        return self.tokens / max(self.step_s, 1e-9)


class CoreDivision:
    """The numbers of one run where its run file says `auto`.

    Args:
        keys: dotted keys of the numbers, such as `training.threads`.
        members: for each key of threads the number of processes that have this many threads.
        cores: number of cores that the run may use.
        most: maximum number of processes of a worker group.
        file: keeps the numbers for a resumed run; None for a division that is not kept.
    """

    def __init__(
        self,
        keys: Iterable[str],
        members: Mapping[str, int],
        cores: float,
        most: int,
        file: Path | None = None,
    ) -> None:
        self.numbers = dict.fromkeys(keys, 1)
        """The present number of each key."""
        self.settled = not self.numbers
        """Whether the division tries nothing more."""
        self._members = members
        self._cores = cores
        self._most = most
        self._file = file
        self._loads: list[StepLoad] = []
        self._settling = _SETTLING
        self._best: list[StepLoad] = []
        """Steps with the best numbers so far; empty before the first measurement."""
        self._former: dict[str, int] | None = None
        """During a trial: the best numbers so far."""
        self._tried = ""
        """During a trial: the key that it is about."""
        self._closed = set[str]()
        """Keys of which a larger number was not faster."""
        if file is not None and file.exists():
            kept = json.loads(file.read_bytes())
            self.numbers |= {key: number for key, number in kept["numbers"].items() if key in self.numbers}
            self.settled = self.settled or (kept["settled"] and kept["numbers"].keys() == self.numbers.keys())

    def step(self, load: StepLoad) -> bool:
        """Take in the figures of a step. Return whether the numbers have changed: the next step has to use
        the new ones."""
        if self.settled:
            return False
        if self._settling:
            self._settling -= 1
            return False
        self._loads.append(load)
        if len(self._loads) < _STEPS and not self._is_hopeless():
            return False
        before = dict(self.numbers)
        self._judge()
        self._try_next()
        self._loads, self._settling = [], _SETTLING
        self._keep()
        return self.numbers != before

    def _is_hopeless(self) -> bool:
        bound = _HOPELESS * _speed(self._best) if self._best else 0.0
        return len(self._loads) > 1 and all(load.speed < bound for load in self._loads)

    def _judge(self) -> None:
        """Keep the numbers that were measured last, or return to the best ones."""
        if self._former is None or _speed(self._loads) > _GAIN * _speed(self._best):
            self._best = self._loads
        else:
            self.numbers = self._former
            self._closed.add(self._tried)
        self._former = None

    def _try_next(self) -> None:
        """Begin the next trial; settle if nothing is left to try."""
        for key in self._candidates():
            if numbers := self._more(key):
                self._former, self._tried = self.numbers, key
                self.numbers = self.numbers | numbers
                return
        self.settled = True

    def _candidates(self) -> list[str]:
        """Return the keys of the parts that work for at least half of the time, the busiest part first, and
        threads before processes."""
        total = sum(load.step_s for load in self._best)
        shares = {
            True: sum(load.train_s for load in self._best) / total,
            False: sum(load.generate_s for load in self._best) / total,
        }
        keys = [key for key in self.numbers if key not in self._closed and shares[_trains(key)] >= 0.5]
        return sorted(keys, key=lambda key: (-shares[_trains(key)], key.endswith(".processes")))

    def _more(self, key: str) -> dict[str, int]:
        """Return the larger number to try for a key, with the numbers that follow from it; empty if there are
        no cores for more. Ranks may also take the place of threads."""
        used = sum(load.cores_used for load in self._best) / len(self._best)
        idle = (1 - used) * self._cores
        if key.endswith(".threads"):
            number = self.numbers[key]
            more = math.ceil(idle / self._processes(key) - _BUSY)
            return {key: min(2 * number, number + more)} if more else {}
        threads = key.removesuffix("processes") + "threads"
        cores = self.numbers[key] * self.numbers.get(threads, 1) + round(idle)
        ranks = 2 ** (min(cores, self._most).bit_length() - 1)  # parts of a batch are then equal
        if ranks <= self.numbers[key]:
            return {}
        return {key: ranks, **({threads: 1} if threads in self.numbers else {})}

    def _processes(self, key: str) -> int:
        """Return the number of processes that have the threads of a key."""
        return self.numbers.get(key.removesuffix("threads") + "processes", self._members.get(key, 1))

    def _keep(self) -> None:
        """Write the best numbers so far to the file."""
        if self._file is not None:
            kept = {"numbers": self._former or self.numbers, "settled": self.settled}
            aside = self._file.with_name(f".{self._file.name}")
            aside.write_text(json.dumps(kept, indent=1) + "\n")
            aside.rename(self._file)


def division_of(composed: Composed, folder: Path) -> CoreDivision:
    """Return the division of a run. A resumed run begins with the numbers that were best so far."""
    config, members = composed.config, dict[str, int]()
    for key in composed.measured:
        owner, _, name = key.rpartition(".")
        if name == "threads":
            section = composed.section(owner)
            members[key] = section.replicas if owner == "inference" else section.processes
    file = folder / "division.json"
    return CoreDivision(composed.measured, members, available_cores(), config.queue.batch_size, file)


def _speed(loads: Iterable[StepLoad]) -> float:
    return statistics.median(load.speed for load in loads)


def _trains(key: str) -> bool:
    return not key.startswith("inference.")
