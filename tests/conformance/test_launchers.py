"""The local launcher keeps the promises of launchers."""

from __future__ import annotations

from stretto.testing import LauncherConformance


class TestLocal(LauncherConformance):
    use = "local"
