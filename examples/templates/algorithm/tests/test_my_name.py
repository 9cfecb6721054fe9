"""The promises of algorithms."""

from __future__ import annotations

from stretto.testing import AlgorithmConformance


class TestMyName(AlgorithmConformance):
    """stretto's own tests of an algorithm."""

    use = "my_name"
