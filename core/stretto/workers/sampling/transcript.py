"""The tokens that the policy sampled in one conversation, even in one that failed."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.agents.conversation import Segment
from stretto.workflow import Answer, Score, Trajectory


class Transcript:
    """The answers of one conversation, with the prompts that the engine got."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def add(self, prompt_ids: NDArray[np.int32], answer: Answer, images: Sequence[str]) -> None:
        """Add an answer. It continues the newest segment if the prompt begins with this whole segment."""
        if not len(answer.tokens):
            return
        segment = self._segments[-1] if self._segments else None
        if segment is None or not np.array_equal(prompt_ids[: segment.length], segment.prompt()):
            segment = Segment()
            self._segments.append(segment)
        new_ids = prompt_ids[segment.length :].copy()  # a view would keep every prompt in memory
        segment.add_text(new_ids, "", images[len(segment.images()) :])
        segment.add_answer(answer, "")

    def trajectories(self, *, reads_images: bool) -> list[Trajectory]:
        """Return a trajectory of each segment, with the reward NaN."""
        return [segment.trajectory(Score(math.nan), reads_images=reads_images) for segment in self._segments]
