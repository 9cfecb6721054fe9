"""What the policy sampled in a conversation that did not end well."""

import math

import numpy as np

from stretto.workers.sampling.transcript import Transcript
from stretto.workflow import Answer


def answer(*tokens: int) -> Answer:
    ids = np.array(tokens, np.int32)
    return Answer(
        ids, np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32), "stop", "", "inference-0"
    )


def prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_turns_of_a_conversation_are_one_trajectory_and_a_rewritten_one_begins_anew() -> None:
    transcript = Transcript()
    transcript.add(prompt(1, 2), answer(7, 8), ["first"])
    transcript.add(prompt(1, 2, 7, 8, 3), answer(9), ["first", "second"])
    transcript.add(prompt(1, 5), answer(6), ["first"])
    whole, rewritten = transcript.trajectories(reads_images=True)
    assert whole.tokens.tolist() == [1, 2, 7, 8, 3, 9]
    assert whole.loss_mask.tolist() == [False, False, True, True, False, True]
    assert whole.versions.tolist() == [-1, -1, 3, 3, -1, 3]
    assert (whole.images, rewritten.images) == (["first", "second"], ["first"])
    assert rewritten.tokens.tolist() == [1, 5, 6]
    assert math.isnan(whole.score.reward)
    assert transcript.trajectories(reads_images=False)[0].images is None
