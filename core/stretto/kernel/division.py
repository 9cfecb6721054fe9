"""How many threads and processes a run's engines get where the run file says `auto`: measured, not guessed.

The run begins with 1 everywhere. After some steps the division knows how fast they are, which part of the run
the others wait for, and how many cores are idle. It then tries more threads for that part, and keeps them if
steps become faster. At last it tries the same cores as more processes. It ends when no core is idle, or when
nothing that is left to try makes steps faster.

It gets the figures of steps and returns numbers, and keeps them in a file. The kernel carries them out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from stretto.assembly.compose import Composed
from stretto.cores import available_cores

__all__ = ["CoreDivision", "StepLoad", "division_of"]

log = structlog.get_logger()

_STEPS = 6
"""Number of steps that are measured before the first trial, and the fewest of a trial."""
_MOST_STEPS = 16
"""Number of steps after which a trial is decided, however uncertain the difference is."""
_SETTLING = 2
"""Number of steps to leave out after a start of processes."""
_GAIN = 1.03
"""A change is kept if steps are faster by this factor."""
_HOPELESS = 0.6
"""A trial ends early when each of its first two steps is slower by this factor."""
_BUSY = 0.75
"""A part that works for less than this share of the time gets nothing more."""
_WORTHLESS = 0.3
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
    """Share of the cores that the run used."""

    @property
    def speed(self) -> float:
        """Trained tokens a second."""
        return max(self.tokens, 1) / max(self.step_s, 1e-9)


@dataclass
class _Trial:
    """Steps with more of something, to compare with the best numbers so far."""

    key: str
    numbers: Mapping[str, int]
    loads: list[StepLoad] = field(default_factory=list[StepLoad])

    @property
    def alternates(self) -> bool:
        """Whether every other step has the best numbers, so that a machine whose speed drifts cannot decide.
        Threads can change with every step, processes cannot."""
        return self.key.endswith(".threads")


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
        members: dict[str, int],
        cores: float,
        most: int,
        file: Path | None = None,
    ) -> None:
        self.numbers: Mapping[str, int] = dict.fromkeys(keys, 1)
        """The number of each key for the next step."""
        self.settled = not self.numbers
        """Whether the division tries nothing more."""
        self._members = members
        self._cores = cores
        self._most = most
        self._file = file
        self._settling = _SETTLING
        """Number of steps still to leave out."""
        self._loads: list[StepLoad] = []
        """Steps with the best numbers: those since the present trial began, or since the start."""
        self._trial: _Trial | None = None
        self._closed = set[str]()
        """Keys of which a larger number was not faster."""
        if file is not None and file.exists():
            kept = json.loads(file.read_bytes())
            self.numbers |= {key: number for key, number in kept["numbers"].items() if key in self.numbers}
            self.settled = self.settled or (kept["settled"] and kept["numbers"].keys() == self.numbers.keys())
        self._best = self.numbers

    def set_members(self, key: str, number: int) -> None:
        """Take in that another number of processes has the threads of a key."""
        if key in self._members:
            self._members[key] = number

    def step(self, load: StepLoad) -> bool:
        """Take in the figures of a step. Return whether the numbers have changed: the next step has to use
        the new ones."""
        if self.settled:
            return False
        if self._settling:
            self._settling -= 1
            return False
        before, trial = self.numbers, self._trial
        loads = self._loads if trial is None or before is self._best else trial.loads
        loads.append(load)
        if trial is None:
            if len(loads) == _STEPS:
                self._try_next()
        elif (faster := _is_faster(trial.loads, self._loads)) is not None:
            self._judge(trial, faster=faster)
            self._try_next()
        elif trial.alternates:
            self.numbers = trial.numbers if before is self._best else self._best
        return self.numbers != before

    def _judge(self, trial: _Trial, *, faster: bool) -> None:
        """Keep the numbers of a trial, or return to the best ones."""
        if faster:
            self._best, self._loads = trial.numbers, trial.loads
        else:
            self._closed.add(trial.key)
        self._trial = None

    def _try_next(self) -> None:
        """Begin the next trial; settle if nothing is left to try."""
        moves = ((key, self._more(key)) for key in self._candidates())
        key, more = next((move for move in moves if move[1]), ("", {}))
        self.settled = not more
        self.numbers = self._best
        log.info("cores divided", **self._best, next=more)
        if more:
            self._trial = _Trial(key, {**self._best, **more})
            self.numbers = self._trial.numbers
            if self._trial.alternates:
                self._loads = []
            else:
                self._settling = _SETTLING
        self._keep()

    def _candidates(self) -> list[str]:
        """Return the keys of the parts that work most of the time, the busiest part first, and threads before
        processes."""
        total = sum(load.step_s for load in self._loads)
        shares = {
            True: sum(load.train_s for load in self._loads) / total,
            False: sum(load.generate_s for load in self._loads) / total,
        }
        keys = [key for key in self._best if key not in self._closed and shares[_trains(key)] >= _BUSY]
        return sorted(keys, key=lambda key: (-shares[_trains(key)], key.endswith(".processes")))

    def _more(self, key: str) -> dict[str, int]:
        """Return the larger number to try for a key, with the numbers that follow from it; empty if there are
        no cores for more. Ranks may also take the place of threads."""
        used = sum(load.cores_used for load in self._loads) / len(self._loads)
        idle = (1 - used) * self._cores
        if key.endswith(".threads"):
            number = self._best[key]
            more = math.ceil(idle / self._processes(key) - _WORTHLESS)
            return {key: min(2 * number, number + more)} if more else {}
        threads = key.removesuffix("processes") + "threads"
        cores = self._best[key] * self._best.get(threads, 1) + math.ceil(idle - _WORTHLESS)
        ranks = 2 ** (min(cores, self._most).bit_length() - 1)  # parts of a batch are then equal
        if ranks <= self._best[key]:
            return {}
        return {key: ranks, **({threads: 1} if threads in self._best else {})}

    def _processes(self, key: str) -> int:
        """Return the number of processes that have the threads of a key."""
        return self._best.get(key.removesuffix("threads") + "processes", self._members.get(key, 1))

    def _keep(self) -> None:
        """Write the best numbers so far to the file."""
        if self._file is not None:
            aside = self._file.with_name(f".{self._file.name}")
            aside.write_text(json.dumps({"numbers": self._best, "settled": self.settled}, indent=1) + "\n")
            aside.rename(self._file)


def division_of(composed: Composed, folder: Path) -> CoreDivision:
    """Return the division of a run. A resumed run begins with the numbers that were best so far. An engine
    that is to give the same bits whatever happens keeps its one thread."""
    config, members = composed.config, dict[str, int]()
    fixed = {"inference.threads"} if config.inference.deterministic else set[str]()
    keys = [key for key in composed.measured if key not in fixed]
    for key in keys:
        owner, _, name = key.rpartition(".")
        if name == "threads":
            section = composed.section(owner)
            members[key] = section.replicas if owner == "inference" else section.processes
    file = folder / "division.json"
    return CoreDivision(keys, members, available_cores(), config.queue.batch_size, file)


def _is_faster(loads: Sequence[StepLoad], former: Sequence[StepLoad]) -> bool | None:
    """Return whether steps are faster than the former ones; None if only more steps can tell."""
    if len(loads) < 2 or len(former) < 2:
        return None
    new, old = ([math.log(load.speed) for load in each] for each in (loads, former))
    if max(new) < statistics.mean(old) + math.log(_HOPELESS):
        return False
    gain = statistics.mean(new) - statistics.mean(old) - math.log(_GAIN)
    error = math.hypot(*(statistics.stdev(each) / math.sqrt(len(each)) for each in (new, old)))
    sure = len(new) >= _STEPS and abs(gain) > 2 * error
    return gain > 0 if sure or len(new) == _MOST_STEPS else None


def _trains(key: str) -> bool:
    return not key.startswith("inference.")
