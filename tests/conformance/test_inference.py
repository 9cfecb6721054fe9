"""The engine `mock` keeps the promises of inference engines that need no model."""

from __future__ import annotations

from stretto.testing import InferenceConformance


class TestMock(InferenceConformance):
    use = "mock"
    options = {"tokens_per_s": 30_000, "mean_tokens": 100}
