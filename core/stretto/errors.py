"""Every exception that stretto raises on purpose, and what each one carries.

    StrettoError
    ├── ConfigError       a run file or an override that is refused: `path`, `value`
    ├── PluginError       a component that is unknown, ambiguous or broken: `kind`, `name`
    │   └── ContractError a component that lacks what the contract of its kind promises
    ├── BusError
    │   ├── NoAnswer      another process did not answer in time: `who`, `subject`, `waited_s`
    │   ├── Refused       another process answered with a refusal: `who`, `reason`
    │   └── Malformed     bytes that are not the message they should be: `subject`, `expected`
    ├── EngineError       an engine that cannot do what it was asked
    ├── RewardError       a reward, or an environment, that raised, took too long, or gave no number
    ├── WeightsError      weights that are missing, damaged or not the announced ones: `version`
    ├── LaunchError       a worker that could not be started: `worker`
    └── RunError          a run that cannot go on: `reason`

Whatever a user or another process can cause is one of these; a bug in stretto is an
`AssertionError`. Exit status of the command line: 2 for `ConfigError` and `PluginError` (nothing was
started), 1 for the others.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BusError",
    "ConfigError",
    "ContractError",
    "EngineError",
    "LaunchError",
    "Malformed",
    "NoAnswer",
    "PluginError",
    "Refused",
    "RequestError",
    "RewardError",
    "RunError",
    "StrettoError",
    "WeightsError",
    "foreign_frames",
    "leaves",
    "nearest",
    "offer",
    "place_of",
]


class StrettoError(Exception):
    """The root of all exceptions raised on purpose."""


class ConfigError(StrettoError):
    """A run file or an override is refused; nothing was started.

    Args:
        path: dotted path of the key at fault, such as `training.lr`.
        value: what stands there.
    """

    def __init__(self, message: str, *, path: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.path = path
        self.value = value


class PluginError(StrettoError):
    """A component cannot be had: unknown, ambiguous, or its plugin does not load or raised."""

    def __init__(self, message: str, *, kind: str = "", name: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class ContractError(PluginError):
    """A component lacks what the contract of its kind promises. Starting it again cannot help."""


class BusError(StrettoError):
    """Something went wrong between processes."""


class NoAnswer(BusError):
    """A peer did not answer before the deadline."""

    def __init__(self, who: str, subject: str, waited_s: float) -> None:
        super().__init__(f"{who} did not answer on {subject!r} within {waited_s:.1f} s")
        self.who = who
        self.subject = subject
        self.waited_s = waited_s


class Refused(BusError):
    """A peer answered that it cannot or will not."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__(f"{who} refused: {reason}")
        self.who = who
        self.reason = reason


class Malformed(BusError):
    """Bytes on a subject are not the message that belongs there."""

    def __init__(self, subject: str, expected: str, why: str) -> None:
        super().__init__(f"malformed message on {subject!r}, expected {expected}: {why}")
        self.subject = subject
        self.expected = expected


class EngineError(StrettoError):
    """A training or inference engine cannot do what it was asked."""


class RequestError(StrettoError):
    """A request that an inference engine cannot serve; the message says why."""


class RewardError(StrettoError):
    """A reward, or an environment, raised, took too long, or gave no number."""


class WeightsError(StrettoError):
    """Published weights are missing, damaged, or not those that were announced."""

    def __init__(self, message: str, *, version: int) -> None:
        super().__init__(message)
        self.version = version


class LaunchError(StrettoError):
    """A worker could not be started, or ends again and again."""

    def __init__(self, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class RunError(StrettoError):
    """A run in progress cannot go on; `reason` goes to its summary."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'grpo'?"` for the known word nearest to `word`, or an empty string."""

    def likeness(candidate: str) -> float:
        swapped = sorted(candidate) == sorted(word)  # two letters in the wrong order: the commonest slip
        return SequenceMatcher(None, word, candidate).ratio() + 0.1 * swapped

    best = max(known, key=likeness, default="")
    return f"; did you mean {best!r}?" if best and likeness(best) >= 0.55 else ""


def offer(word: str, known: Iterable[str], label: str) -> str:
    """`"; did you mean 'lr'? accepted here: lr, betas"`, or without the guess where nothing is near."""
    known = list(known)
    return f"{nearest(word, known) or ';'} {label}: {', '.join(known) or 'none'}"


def place_of(error: BaseException, files: str = "") -> str:
    """`"ZeroDivisionError: … (rewards.py:12)"`: what was raised, and the last line of the user's own code on
    the way there, or of a library's where there is none of the user's.

    Args:
        files: a file or a folder that counts as the user's own wherever it is, such as an installed plugin's.
    """
    libraries = tuple(sysconfig.get_paths().values())
    foreign = foreign_frames(error)
    own = [
        frame
        for frame in foreign
        if (files and frame.filename.startswith(files)) or not frame.filename.startswith(libraries)
    ]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or foreign)[-1:])
    return f"{type(error).__name__}: {error}{where}"


def foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines outside stretto's core on the way to an error, outermost first."""
    core = f"{Path(__file__).parent}{os.sep}"
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((core, "<"))]


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a tree of exception groups; what only reports a cancellation is left out."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


def column_error(row: Mapping[str, Any], column: str, message: str) -> ConfigError:
    """What is wrong with a column of one row of the dataset."""
    name = f" of row {row['id']!r}" if "id" in row else ""
    return ConfigError(f"column {column!r}{name}: {message}", path="dataset", value=row.get(column))


@contextmanager
def one_error() -> Generator[None]:
    """Raise the first error of a task group in the block, rather than the group: its tasks do one thing."""
    try:
        yield
    except ExceptionGroup as group:
        raise leaves(group)[0] from group
