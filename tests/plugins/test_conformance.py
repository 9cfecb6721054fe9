"""The torch engine keeps every promise of the conformance suite, alone and in runs."""

from __future__ import annotations

import pytest

from stretto.testing import EngineUnderTest, InferenceConformance, RunConformance

TORCH = EngineUnderTest("torch", {"slots": 8}, seeds=True, tolerance=1e-4)


class TestTorch(InferenceConformance):
    engine = TORCH


@pytest.mark.slow
class TestTorchInRuns(RunConformance):
    engine = TORCH
