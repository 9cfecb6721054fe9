"""Where the runs of a test live: in the simulation, or as real processes."""

import pytest

REAL, SIMULATED = "real", "simulated"
_WORLDS = [SIMULATED, pytest.param(REAL, marks=pytest.mark.slow)]

in_both_worlds = pytest.mark.parametrize("start", _WORLDS, indirect=True)
"""For a test with the fixture `start`: its runs are simulated by default, and real among the slow tests."""
in_simulation = pytest.mark.parametrize("start", [SIMULATED], indirect=True)
"""For a test that says nothing of processes, signals, files or sockets: its runs are simulated."""
module_in_both_worlds = pytest.mark.parametrize("module_start", _WORLDS, indirect=True, scope="module")
"""The same for a test with the fixture `module_start`, or with one that is made of it."""
