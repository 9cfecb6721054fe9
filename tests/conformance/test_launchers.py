"""The local launcher keeps the promises of launchers."""

from stretto.testing import LauncherConformance


class TestLocal(LauncherConformance):
    use = "local"
