"""A sample of this engine: the fields that every engine has, and its row among the running samples."""

from dataclasses import dataclass

from stretto.serving.intake import OpenSample
from stretto.serving.stop_strings import StopStrings
from stretto_torch.images import PromptImages


@dataclass(eq=False)
class SlotSample(OpenSample):
    """One answer that is being generated. If the cache is full, the samples that arrived last leave first."""

    stops: StopStrings | None = None  # the detector of the request's stop strings, if it has any
    images: PromptImages | None = None  # images of the prompt, if any
    row: int = -1  # row among the running samples; -1 while the sample is not running
    pure: bool = True  # everything in the sample's slot was computed with the current weights
