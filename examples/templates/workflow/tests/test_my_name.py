"""The promises of workflows."""

from __future__ import annotations

from stretto.testing import WorkflowConformance


class TestMyName(WorkflowConformance):
    """stretto's own tests of a workflow."""

    use = "my_name"
