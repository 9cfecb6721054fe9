"""What operators and viewers ask of a run: scale, stop, and its records."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stretto.bus.messages.base import Message

ProcessNumber = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
"""Number of processes of a role or of a worker group."""


class ScaleRun(Message, frozen=True):
    """Operator to kernel, answered by `RunScaled`: change numbers of processes."""

    token: str
    """Proof that the operator is the run's user (see `stretto.bus.joining`)."""
    numbers: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=200)], ProcessNumber], msgspec.Meta(max_length=64)
    ]
    """Role, or path of a worker group such as `training` -> number of processes."""


class RunScaled(Message, frozen=True):
    """The kernel has begun to change the numbers."""

    done: tuple[str, ...]
    """What the kernel does, a sentence for each number."""


class StopRun(Message, frozen=True):
    """Operator to kernel, answered by `RunStopping`: end the run."""

    token: str
    now: bool
    """End at once, without a checkpoint. Otherwise the kernel finishes the step under way and writes one."""


class RunStopping(Message, frozen=True):
    """The run ends."""

    state: str
    """What the kernel does until then, in words."""


class AskRecords(Message, frozen=True):
    """Operator to kernel, answered by `Records`: which records the run has now."""

    token: str
    copy: Annotated[str, msgspec.Meta(max_length=64)]
    """Random text that the asking process draws at its start."""
    complete: bool = False
    """It has all records of a run that is over."""


class Records(Message, frozen=True):
    """The records in the run's folder (see `stretto.records.shared`)."""

    files: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=300)], tuple[Annotated[int, msgspec.Meta(ge=0)], int]],
        msgspec.Meta(max_length=100_000),
    ]
    """Path -> size in bytes, and time of the last change in nanoseconds."""
    owner: str
    """The text in the kernel's lock file."""
    over: bool
    """The run is over, and no record changes any more."""


class AskRecord(Message, frozen=True):
    """Operator to kernel, answered by `RecordPart`: send a part of a record."""

    token: str
    name: Annotated[str, msgspec.Meta(max_length=300)]
    offset: Annotated[int, msgspec.Meta(ge=0)]


class RecordPart(Message, frozen=True):
    """Bytes of a record from an offset on, at most 1 MiB. It is empty at the end of the file."""

    data: bytes
