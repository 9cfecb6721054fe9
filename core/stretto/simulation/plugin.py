"""The plugin file of every simulated run: its launcher, and an environment for runs of several turns."""

from collections.abc import Iterator
from typing import Any

from stretto.component import Component
from stretto.hooks import hookimpl
from stretto.simulation.processes import SimulatedConfig, SimulatedLauncher


@hookimpl
def stretto_launcher() -> Iterator[Component[SimulatedConfig]]:
    """Yield the launcher `simulated`."""
    yield Component("simulated", SimulatedLauncher, SimulatedConfig, "processes of a simulation")


def guessing(completion: str, turn: int) -> dict[str, Any]:
    """An environment: reward an answer by its length, and ask for another turn after some answers."""
    if len(completion) % 3 and turn < 3:
        return {"feedback": "again"}
    return {"reward": float(len(completion) % 2)}
