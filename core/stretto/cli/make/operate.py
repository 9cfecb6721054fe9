"""Commands to a living run, sent to its kernel over the bus: `stretto scale` and `stretto stop`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from stretto.assembly.placement import sections
from stretto.assembly.worker_numbers import NUMBER_KEYS
from stretto.bus.client import connect
from stretto.bus.guard import is_locked
from stretto.bus.joining import operator_bootstrap
from stretto.bus.messages.base import Message
from stretto.bus.messages.operation import RunScaled, RunStopping, ScaleRun, StopRun
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.errors import ConfigError, one_error

A = TypeVar("A", bound=Message)

_MOST = 10_000  # processes of one role
_ANSWER_S = 120.0  # deadline for the kernel's answer. A launcher may need some time to start workers


def numbers_of(items: Sequence[str]) -> dict[str, int]:
    """Return role -> number, from items such as `rollout=6`."""
    numbers: dict[str, int] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not (equals and text.isdecimal() and 1 <= int(text) <= _MOST):
            raise ConfigError(f"{item!r}: expected ROLE=N with N from 1 to {_MOST:,}, such as rollout=6")
        if name in numbers:
            raise ConfigError(f"{item!r}: {name} is given twice")
        numbers[name] = int(text)
    return numbers


def answer_of(request: Callable[[], Awaitable[A]]) -> A:
    """Send a request of this module, and return the kernel's answer."""
    with one_error():
        return anyio.run(request)


def scale_request(folder: Path, numbers: Mapping[str, int]) -> Callable[[], Awaitable[RunScaled]]:
    """Check numbers of processes. Return a function that asks the kernel of a living run for them."""
    _require_kernel(folder)
    _check_groups(folder, numbers)
    bootstrap = operator_bootstrap(folder / "bus")
    return partial(_ask, bootstrap, "scale", ScaleRun(bootstrap.token, dict(numbers)), RunScaled)


def stop_request(folder: Path, *, now: bool) -> Callable[[], Awaitable[RunStopping]]:
    """Return a function that asks the kernel of a living run to end; if `now`, without a checkpoint."""
    _require_kernel(folder)
    bootstrap = operator_bootstrap(folder / "bus")
    return partial(_ask, bootstrap, "stop", StopRun(bootstrap.token, now), RunStopping)


def _require_kernel(folder: Path) -> None:
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds no run: it has no config.yaml")
    if not is_locked(folder / "bus" / "kernel.lock"):
        raise ConfigError(
            f"no kernel owns the run in {folder}; to continue it, also with other numbers: "
            f"stretto resume {folder} [KEY=VALUE]..."
        )


def _check_groups(folder: Path, numbers: Mapping[str, int]) -> None:
    """Check new numbers of trainers as if they came with a resume: the kernel cannot undo the change."""
    from stretto.cli.start.acceptance import accepted
    from stretto.kernel.durable.changes import assemble_in_force, compose_changes

    groups = {name: number for name, number in numbers.items() if name not in NUMBER_KEYS}
    if not groups:
        return
    current = assemble_in_force(folder)
    known = sections(current.config)
    for name in groups:
        if name not in known:
            names = ", ".join((*NUMBER_KEYS, *known))
            hint = "; trainers are scaled by their worker group" if name == "trainer" else ""
            raise ConfigError(f"no {name!r} to scale: expected one of {names}{hint}")
    overrides = [f"{name}.processes={number}" for name, number in groups.items()]
    accepted(compose_changes(current, overrides), starting=True, resumed=True)


async def _ask(bootstrap: Bootstrap, verb: str, command: Message, answer: type[A]) -> A:
    async with connect(bootstrap) as bus:
        subject = Subjects(bootstrap.run).kernel("operator", verb)
        return await bus.request(subject, command, answer, deadline_s=_ANSWER_S)
