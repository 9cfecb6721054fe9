"""The plugin file that a simulated run names: its launcher."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.component import Component
from stretto.hooks import hookimpl
from stretto.testing.simulation.processes import SimulatedConfig, SimulatedLauncher


@hookimpl
def stretto_launcher() -> Iterator[Component[SimulatedConfig]]:
    """Yield the launcher."""
    yield Component("simulated", SimulatedLauncher, SimulatedConfig, "processes of a simulation")
