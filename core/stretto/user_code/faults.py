"""Faults: the text of an error, where it was raised, and what is at fault."""

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
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500  # HTTP statuses


class SampleFault(msgspec.Struct, frozen=True):
    """Why user code gave no result."""

    error: str
    """Printable text."""
    kind: FaultKind = "environment"
    site: str = ""
    """The exception with its file and line; empty for a `RewardError` that has no site."""

    @property
    def likeness(self) -> str:
        """Text by which faults are compared: equal texts are the same fault."""
        return self.site or self.error

    @classmethod
    def of(cls, error: BaseException, what: str = "") -> SampleFault:
        """Make the fault of an exception. `what` is the name of the user's code that raised it: the text
        begins with `WHAT raised`, except for a RewardError or PolicyError, which is raised on purpose."""
        whole, error = error, leaves(error)[0]
        if what and not isinstance(error, (RewardError, PolicyError)):
            text = f"{what} raised {place_of(whole)}"
        elif what:
            text = str(error)
        else:
            text = f"{type(error).__name__}: {error}" if isinstance(error, StrettoError) else place_of(whole)
        site = error.site if isinstance(error, RewardError) else _site_of(error, whole)
        return cls(printable(text), kind_of(error), site)

    def raised(self) -> StrettoError:
        if self.kind == "policy":
            return PolicyError(self.error)
        return RewardError(self.error, kind=self.kind, site=self.site)


def kind_of(error: BaseException) -> FaultKind:
    """Return what is at fault, from an exception and the exceptions that led to it."""
    for cause in with_causes(error):
        if isinstance(cause, PolicyError):
            return "policy"
        if isinstance(cause, RewardError):
            return "infrastructure" if cause.kind == "infrastructure" else "environment"
        if isinstance(cause, (BusError, EngineError, TimeoutError)) or _is_of_service(cause):
            return "infrastructure"
    return "environment"


def _site_of(error: BaseException, whole: BaseException) -> str:
    """Return an error's type with file and line, or with its text if no line of the user raised it. `whole`:
    the group of errors that it is part of, or the error itself."""
    location = location_of(error) or location_of(whole)
    if not location and isinstance(error, StrettoError):
        return f"{type(error).__name__} {error}"
    return f"{type(error).__name__} {location}"


def with_causes(error: BaseException) -> Iterator[BaseException]:
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _is_of_service(error: BaseException) -> bool:
    """Return whether a connection or the operating system failed, or a server answered that it cannot serve
    now. HTTP clients have the status in one of these attributes."""
    if isinstance(error, OSError) and not isinstance(error, _OF_FILES):
        return True
    places: tuple[Any, ...] = (error, getattr(error, "response", None))
    statuses = [getattr(place, name, None) for place in places for name in ("status", "status_code")]
    return any(
        isinstance(status, int) and (status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR)
        for status in statuses
    )
