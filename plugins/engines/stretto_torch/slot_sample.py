"""A sample of the engine: what every engine knows of it, and its place among the running samples."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.serving.intake import OpenSample
from stretto.serving.stop_strings import StopStrings
from stretto_torch.images import PromptImages


@dataclass(eq=False)
class SlotSample(OpenSample):
    """One answer that is being generated. If the cache is full, those that arrived last leave first."""

    stops: StopStrings | None = None  # the detector of the request's stop strings, if it has any
    images: PromptImages | None = None  # of the prompt; None if it has none
    row: int = -1  # row among the running samples; -1 while the sample is not running
    pure: bool = True  # whether everything in the sample's slot was computed with the current weights
