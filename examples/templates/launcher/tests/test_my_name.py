"""The promises of launchers."""

from __future__ import annotations

from stretto.testing import LauncherConformance


class TestMyName(LauncherConformance):
    """stretto's own tests of a launcher."""

    use = "my_name"
