"""The plugin file that a simulated run names: its launcher. And an environment for runs of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.component import Component
from stretto.hooks import hookimpl
from stretto.simulation.processes import SimulatedConfig, SimulatedLauncher


@hookimpl
def stretto_launcher() -> Iterator[Component[SimulatedConfig]]:
    """Yield the launcher."""
    yield Component("simulated", SimulatedLauncher, SimulatedConfig, "processes of a simulation")


def guessing(completion: str, turn: int) -> dict[str, Any]:
    """Judge an answer by its length, and let some answers have another turn. An environment."""
    if len(completion) % 3 and turn < 3:
        return {"feedback": "again"}
    return {"reward": float(len(completion) % 2)}
