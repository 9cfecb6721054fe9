"""The promises of weight transports."""

from __future__ import annotations

from stretto.testing import WeightsConformance


class TestMyName(WeightsConformance):
    """stretto's own tests of a weight transport."""

    use = "my_name"
