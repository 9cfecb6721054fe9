"""What has failed: the words of an error, where it was raised, and what is at fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from stretto.errors import (
    BusError,
    EngineError,
    PolicyError,
    RewardError,
    StrettoError,
    leaves,
    location_of,
    place_of,
    printable,
)

FaultKind = Literal["policy", "environment", "infrastructure"]
"""What is at fault. `policy`: the answer itself. `environment`: the reward, the environment, an agent or the
workflow raised. `infrastructure`: a process was lost, or a service did not answer."""

_OF_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system that concern one path, not a connection or a resource."""
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500


class SampleFault(msgspec.Struct, frozen=True):
    """Why user code gave no result."""

    error: str
    """Printable text."""
    kind: FaultKind = "environment"
    site: str = ""
    """The exception with its file and line; empty if a reward or an environment gives none on purpose."""

    @property
    def likeness(self) -> str:
        """Faults with the same text here are alike."""
        return self.site or self.error

    @classmethod
    def of(cls, error: BaseException, what: str = "") -> SampleFault:
        """Make the fault of what was raised. With `what`, the name of the user's code that raised it, the
        text begins with `WHAT raised`, unless stretto itself raised the error on purpose."""
        error = leaves(error)[0]
        if what and not isinstance(error, (RewardError, PolicyError)):
            text = f"{what} raised {place_of(error)}"
        elif what:
            text = str(error)
        else:
            text = f"{type(error).__name__}: {error}" if isinstance(error, StrettoError) else place_of(error)
        site = error.site if isinstance(error, RewardError) else _site_of(error)
        return cls(printable(text), kind_of(error), site)

    def raised(self) -> StrettoError:
        """Return the fault as an exception."""
        if self.kind == "policy":
            return PolicyError(self.error)
        return RewardError(self.error, kind=self.kind, site=self.site)


def kind_of(error: BaseException) -> FaultKind:
    """Return what is at fault, from what was raised and what led to it."""
    for each in with_causes(error):
        if isinstance(each, PolicyError):
            return "policy"
        if isinstance(each, RewardError):
            return "infrastructure" if each.kind == "infrastructure" else "environment"
        if isinstance(each, (BusError, EngineError, TimeoutError)) or _is_of_service(each):
            return "infrastructure"
    return "environment"


def _site_of(error: BaseException) -> str:
    """Return an error's type with file and line, or with its text if no line of the user raised it."""
    location = location_of(error)
    if not location and isinstance(error, StrettoError):
        return f"{type(error).__name__} {error}"
    return f"{type(error).__name__} {location}"


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and then those that led to it."""
    seen = set[int]()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)


def _is_of_service(error: BaseException) -> bool:
    """Whether a connection or the operating system failed, or a server answered that it cannot serve now. The
    clients of HTTP give the status in one of these places."""
    if isinstance(error, OSError) and not isinstance(error, _OF_FILES):
        return True
    places: tuple[Any, ...] = (error, getattr(error, "response", None))
    statuses = [getattr(place, name, None) for place in places for name in ("status", "status_code")]
    return any(
        isinstance(status, int) and (status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR)
        for status in statuses
    )
