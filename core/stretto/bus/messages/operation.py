"""Commands of the operator: scale a run, or stop it."""

from typing import Annotated

import msgspec

from stretto.bus.messages.base import Message

ProcessNumber = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


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
    """A sentence for each number."""


class StopRun(Message, frozen=True):
    """Operator to kernel, answered by `RunStopping`: end the run."""

    token: str
    now: bool
    """End at once, without a checkpoint. If false, the kernel first finishes the step and writes one."""


class RunStopping(Message, frozen=True):
    """The run ends."""

    state: str
    """What the kernel does before the end of the run, in words."""
