"""Whatever happens to a worker while a run starts, the run starts all the same, or says what happened."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import anyio
import msgspec
import pytest

from patience import patience
from stretto.errors import ConfigError
from stretto.launcher import ROLES, Job, Role
from stretto.simulation import Fault, describe, run_tape
from stretto.simulation.processes import SimulatedLauncher
from stretto.simulation.universe import Outcome
from stretto.workers.context import RoleWorker, WorkerContext
from stretto.workers.worker import _WORKERS as WORKERS  # pyright: ignore[reportPrivateUsage]
from universes import small

MOMENTS = (0.1, 0.45, 0.6, 0.8)
"""Seconds after the start: no process has joined, some have, some are ready, almost all can be called."""
BEFORE_READY_S = (0.0, 0.3)


def outcome_with(*faults: Fault) -> Outcome:
    tape = small(6, 0)
    return run_tape(msgspec.structs.replace(tape, faults=faults, run={**tape.run, "steps": 2}))


def text_of(outcome: Outcome) -> str:
    return "\n".join(describe(small(6, 0), outcome))


class Refuses:
    """The worker of a role that finds out that its values are wrong."""

    def __init__(self, context: WorkerContext, work: RoleWorker, seconds: float) -> None:
        self._worker, self._work, self._seconds = context.worker, work, seconds
        self.heartbeat, self.drain = work.heartbeat, work.drain

    async def run(self, ready: Callable[[], None]) -> None:
        await anyio.sleep(self._seconds)
        raise ConfigError(f"{self._worker} finds no such thing")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("seconds", BEFORE_READY_S)
def test_a_workers_refusal_ends_a_start(role: Role, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before all others are launched: a launcher starts one after the other."""
    launch = SimulatedLauncher.launch

    async def launch_slowly(launcher: SimulatedLauncher, jobs: Sequence[Job]) -> Any:
        handles = await launch(launcher, jobs)
        await anyio.sleep(patience(2.0))
        return handles

    monkeypatch.setattr(SimulatedLauncher, "launch", launch_slowly)
    make = WORKERS[role]
    monkeypatch.setitem(WORKERS, role, lambda context: Refuses(context, make(context), seconds))
    outcome = outcome_with()
    assert outcome.status == "failed", text_of(outcome)
    assert f"{role}-0 finds no such thing" in outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize(("role", "moment"), [*product(ROLES, MOMENTS)])
def test_a_worker_that_is_killed_or_late_does_not_stop_the_start(role: Role, moment: float) -> None:
    for other in ROLES:  # at any other moment
        faults = [Fault(kind="kill", who=role, at=moment)]
        faults += [Fault(kind="stop", who=other, at=0.2 + moment / 2, seconds=5.0)]
        outcome = outcome_with(*faults)
        is_named = role == "trainer" and outcome.reason.startswith("trainer-0 was lost while the run was sta")
        assert is_named or not outcome.failed, text_of(outcome)
