"""The exceptions that stretto raises on purpose, and the facts that each one carries.

The tree contains every exception of core. The module is in brackets if it is not this one.

    StrettoError
    ├── ConfigError          a run file or an override that stretto refuses: `path`, `value`
    │   └── ImageError       (stretto.models.images) an image that cannot be read, or in several ways
    ├── PluginError          a component that is unknown, ambiguous or broken: `kind`, `name`
    │   └── ContractError    a component that lacks a part of the contract of its kind
    ├── BusError             a failure of communication between processes
    │   ├── NoAnswer         another process did not answer in time: `who`, `subject`, `waited_s`
    │   ├── Refused          another process answered with a refusal: `who`, `reason`
    │   ├── Superseded       a stream that another process writes now: `stream`
    │   ├── TrainersLost     (stretto.kernel.calls.trainers) a trainer was lost, and others take its place
    │   ├── MessageGone      a stored message that is no longer in its stream
    │   └── Malformed        bytes that are not the expected message: `subject`, `expected`
    ├── EngineError          an engine that cannot do what a worker asked
    │   ├── ServerRefused    (stretto.serving.server) an engine's server refused a request: `status`, `reason`
    │   └── ServerLost       (stretto.serving.server) an engine's server did not answer, or broke off
    ├── RequestError         a request that an inference engine cannot serve
    ├── RewardError          a reward or an environment that raised, took too long, or gave an invalid value
    ├── PolicyError          a sample that failed because of its own answer
    ├── MembersError         a group of which too few samples are left
    ├── WeightsError         weights that are missing, damaged or not the announced ones: `version`
    ├── LaunchError          a worker that could not be started, or ends again and again: `worker`
    ├── RunError             a run that cannot continue: `reason`
    │   └── CalmRunFails     (stretto.simulation.search) a simulated run that fails by itself: `tape`
    ├── ToolServerError      (stretto.user_code.mcp_server) an MCP server reported an error, or was lost
    ├── ApiError             (stretto.agents.api_call) a refused HTTP request of an agent: `status`, `code`
    └── OverLimit            (stretto.agents.recorder) an agent's call beyond the limits of its run: `code`

An error that a user or another process can cause is one of these, or a subclass that a plugin defines. A bug
in stretto is an `AssertionError`. The command line exits with status 2 for `ConfigError` and `PluginError`
(no process of a run was started), and with status 1 for the others.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sysconfig
import traceback
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from anyio.abc import TaskGroup

__all__ = [
    "BusError",
    "ConfigError",
    "ContractError",
    "EngineError",
    "LaunchError",
    "Malformed",
    "MembersError",
    "MessageGone",
    "NoAnswer",
    "PluginError",
    "PolicyError",
    "Refused",
    "RequestError",
    "RewardError",
    "RunError",
    "StrettoError",
    "Superseded",
    "WeightsError",
    "foreign_frames",
    "leaves",
    "location_of",
    "nearest",
    "offer",
    "place_of",
    "printable",
]

A = TypeVar("A")
T = TypeVar("T")

_MOST_PARTS = 3
"""Errors of a group that a message shows."""
# Control characters except tab and newline, line separators, marks that change the direction of text, and
# surrogates, which no file or terminal can encode.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class StrettoError(Exception):
    """The root of all exceptions raised on purpose."""


class ConfigError(StrettoError):
    """stretto refuses a run file or an override; no process of the run was started.

    Args:
        path: dotted path of the key with the error, such as `training.lr`.
        value: the value of that key.
    """

    def __init__(self, message: str, *, path: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.path = path
        self.value = value


class PluginError(StrettoError):
    """A component is unknown or ambiguous, or its plugin does not load or raised an exception."""

    def __init__(self, message: str, *, kind: str = "", name: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class ContractError(PluginError):
    """A component lacks a part of the contract of its kind. Starting it again does not help."""


class BusError(StrettoError):
    """Communication between processes failed."""


class NoAnswer(BusError):
    """Another process did not answer before the deadline."""

    def __init__(self, who: str, subject: str, waited_s: float) -> None:
        super().__init__(f"{who} did not answer on {subject!r} within {waited_s:.1f} s")
        self.who = who
        self.subject = subject
        self.waited_s = waited_s


class Refused(BusError):
    """Another process answered with a refusal."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__(f"{who} refused: {reason}")
        self.who = who
        self.reason = reason


class Superseded(BusError):
    """Another process has become the writer of a stream."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"another process writes to {stream}: another kernel has resumed this run, perhaps "
            "on another machine"
        )
        self.stream = stream


class MessageGone(BusError):
    """A stored message is no longer in its stream."""


class Malformed(BusError):
    """The bytes on a subject are not the expected message."""

    def __init__(self, subject: str, expected: str, why: str) -> None:
        super().__init__(
            f"malformed message on {subject!r}, expected {expected}: {why}; is the sender "
            "another version of stretto?"
        )
        self.subject = subject
        self.expected = expected


class EngineError(StrettoError):
    """A training or inference engine cannot do what a worker asked."""


class RequestError(StrettoError):
    """An inference engine cannot serve a request; the message says why."""


class RewardError(StrettoError):
    """A reward or an environment raised an exception, took too long, or gave an invalid value.

    Args:
        kind: `environment`, or `infrastructure` if its process was lost or a service did not answer: then the
            user's code may be correct.
        site: the exception that user code raised, with its file and line; empty if there was none.
    """

    def __init__(
        self, message: str, *, kind: Literal["environment", "infrastructure"] = "environment", site: str = ""
    ) -> None:
        super().__init__(message)
        self.kind: Literal["environment", "infrastructure"] = kind
        self.site = site


class PolicyError(StrettoError):
    """The answer of the policy is at fault, and the sample ends. Rewards, environments and workflows raise
    this error. The sample is not tried again, and its reward is `workflow.failure_reward`."""


class MembersError(StrettoError):
    """Too many samples of a group have failed: fewer than `queue.min_members` are left."""


class WeightsError(StrettoError):
    """Weights are missing, damaged, or not the announced ones.

    Args:
        version: the published version; None for a file that belongs to no version.
    """

    def __init__(self, message: str, *, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class LaunchError(StrettoError):
    """A worker could not be started, or ends again and again."""

    def __init__(self, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class RunError(StrettoError):
    """A run in progress cannot continue; `reason` goes to its summary."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'grpo'?"` with the known word nearest to `word`, or an empty string. Upper
    case and `-` in place of `_` make no difference."""
    word = word.lower().replace("-", "_")

    def likeness(candidate: str) -> float:
        candidate = candidate.lower().replace("-", "_")
        # Two letters in the wrong order are the most common typing error.
        swapped = sorted(candidate) == sorted(word)
        return SequenceMatcher(None, word, candidate).ratio() + 0.1 * swapped

    best = max(known, key=likeness, default="")
    return f"; did you mean {best!r}?" if best and likeness(best) >= 0.55 else ""


def offer(word: str, known: Iterable[str], label: str) -> str:
    """Return `"; did you mean 'lr'? accepted here: lr, betas"`, without the guess when no known word is
    near."""
    known = list(known)
    return f"{nearest(word, known) or ';'} {label}: {', '.join(known) or 'none'}"


def place_of(error: BaseException, files: str = "") -> str:
    """Return the error and its place, such as `"ZeroDivisionError: … (rewards.py:12)"`.

    The place is the last line of the user's own code in the traceback, or of a library if the traceback has
    no code of the user. A group of errors gives its first `_MOST_PARTS` parts, an error raised `from` another
    also that, and a command that failed the last line of its standard error. The text is `printable`.

    Args:
        files: a file or a folder that counts as the user's own code, such as that of an installed plugin.
    """

    def text_and_place(part: BaseException) -> str:
        where = location_of(part, files) or location_of(error, files)  # the parts may never have been raised
        text, cause = _text_of_part(part), part.__cause__
        reason = error_text(cause) if cause is not None else ""
        by = f", caused by {reason}" if reason.partition(": ")[2] not in text else ""
        return printable(f"{text}{f' ({where})' if where else ''}{by}")

    return _of_parts(error, text_and_place)


def error_text(error: BaseException) -> str:
    """Return what `place_of` does, without the place, and with the characters of the error."""
    return _of_parts(error, _text_of_part)


def _of_parts(error: BaseException, text: Callable[[BaseException], str]) -> str:
    parts = leaves(error)
    more = [f"and {len(parts) - _MOST_PARTS} more"] if len(parts) > _MOST_PARTS else []
    return "; ".join([*map(text, parts[:_MOST_PARTS]), *more])


def _text_of_part(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as fault:  # noqa: BLE001 - user code may raise anything, also while it writes the text
        text = f"{type(error).__name__}, whose text cannot be made ({type(fault).__name__} in __str__)"
    if isinstance(error, (subprocess.CalledProcessError, subprocess.TimeoutExpired)):
        output: str | bytes = error.stderr or error.output or ""
        last = (output.decode(errors="replace") if isinstance(output, bytes) else output).strip()
        text += f"; its last line: {last.splitlines()[-1]}" if last else ""
    return text


def location_of(error: BaseException, files: str = "") -> str:
    """Return `FILE:LINE` of an error, as `place_of` does; empty if all of its traceback is stretto's core."""
    libraries = tuple(sysconfig.get_paths().values())
    foreign = foreign_frames(error)
    user_frames = [
        frame
        for frame in foreign
        if (files and frame.filename.startswith(files)) or not frame.filename.startswith(libraries)
    ]
    return "".join(f"{frame.filename}:{frame.lineno}" for frame in (user_frames or foreign)[-1:])


def printable(text: str) -> str:
    r"""Return text with control characters written as escapes, such as `\x1b`. Models, rewards and agents
    write texts that people later read in a terminal."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are outside stretto's core, outermost first."""
    core = f"{Path(__file__).parent}{os.sep}"
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((core, "<"))]


def leaves(error: BaseException) -> list[BaseException]:
    """Return all exceptions in a tree of exception groups, cancellations included, in their order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


def column_error(row: Mapping[str, Any], column: str, message: str) -> ConfigError:
    """Make the error for a column of one row of the dataset."""
    name = f" of row {row['id']!r}" if "id" in row else ""
    return ConfigError(f"column {column!r}{name}: {message}", path="dataset", value=row.get(column))


@contextmanager
def one_error() -> Generator[None]:
    """Raise the first error of a task group in the block instead of the exception group. For tasks that are
    parts of one job."""
    try:
        yield
    except ExceptionGroup as group:
        raise leaves(group)[0] from group


@asynccontextmanager
async def one_job() -> AsyncGenerator[TaskGroup]:
    """Yield a task group for the parts of one job. Raise the first error, not a group of errors. Also raise a
    cancellation that came when the block had just ended: anyio alone ends the group as if all were done."""
    with one_error():
        async with anyio.create_task_group() as tasks:
            yield tasks
    await anyio.lowlevel.checkpoint_if_cancelled()


async def together(
    part: Callable[[A], Awaitable[T]], arguments: Iterable[A], at_once: float = math.inf
) -> list[T]:
    """Call a function for each argument, for at most `at_once` of them at a time. Return the results in the
    order of the arguments, or raise the first error."""
    results: dict[int, T] = {}
    limit = anyio.CapacityLimiter(at_once)

    async def run_one(number: int, argument: A) -> None:
        async with limit:
            results[number] = await part(argument)

    async with one_job() as tasks:
        for number, argument in enumerate(arguments):
            tasks.start_soon(run_one, number, argument)
    return [results[number] for number in sorted(results)]
