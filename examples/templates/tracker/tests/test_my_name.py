"""The promises of trackers."""

from __future__ import annotations

from stretto.testing import TrackerConformance


class TestMyName(TrackerConformance):
    """stretto's own tests of a tracker."""

    use = "my_name"
