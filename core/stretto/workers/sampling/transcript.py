"""What the policy sampled in one conversation, also in one that did not end well."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.array import KeptTokens
from stretto.workflow import Answer, Score, Trajectory


class Transcript:
    """The answers of one conversation.

    Args:
        images: names of the images in the prompt; None for those of the row.
    """

    def __init__(self, images: Sequence[str] | None) -> None:
        self._images = images
        self._stretches: list[_Stretch] = []

    def add(self, prompt_ids: NDArray[np.int32], answer: Answer) -> None:
        """Add an answer. If its prompt begins with all of the newest stretch, it continues that one."""
        if not self._stretches or not self._stretches[-1].is_start_of(prompt_ids):
            self._stretches.append(_Stretch())
        self._stretches[-1].add(prompt_ids, answer)

    def trajectories(self) -> list[Trajectory]:
        """Return a trajectory of each stretch, with the reward NaN."""
        return [stretch.trajectory(self._images) for stretch in self._stretches]


class _Stretch:
    """Answers of which each prompt begins with the prompt and the answer before it."""

    def __init__(self) -> None:
        self._tokens = np.zeros(0, np.int32)
        self._answers: list[tuple[int, Answer]] = []
        """(position of its first token, answer)."""

    def is_start_of(self, ids: NDArray[np.int32]) -> bool:
        return np.array_equal(ids[: len(self._tokens)], self._tokens)

    def add(self, prompt_ids: NDArray[np.int32], answer: Answer) -> None:
        self._tokens = np.concatenate([prompt_ids, answer.tokens])
        self._answers.append((len(prompt_ids), answer))

    def trajectory(self, images: Sequence[str] | None) -> Trajectory:
        loss_mask = np.zeros(len(self._tokens), np.bool_)
        logprobs = np.zeros(len(self._tokens), np.float32)
        versions = np.full(len(self._tokens), -1, np.int32)
        kept: list[KeptTokens] = []
        for start, answer in self._answers:
            place = slice(start, start + len(answer.tokens))
            loss_mask[place], logprobs[place], versions[place] = True, answer.logprobs, answer.versions
            if answer.kept is not None:
                kept += [KeptTokens.none(start - sum(map(len, kept))), answer.kept]
        last = self._answers[-1][1]
        return Trajectory(
            *(self._tokens, loss_mask, logprobs, versions),
            *(Score(math.nan), last.finish, last.engine),
            images=images,
            kept=KeptTokens.concat(kept) if last.kept is not None else None,
        )
