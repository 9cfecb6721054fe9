"""The promises of rewards, and what this one computes."""

from __future__ import annotations

from stretto import Context
from stretto.testing import RewardConformance
from stretto_my_name import MyNameConfig, make


class TestMyName(RewardConformance):
    """stretto's own tests of a reward."""

    use = "my_name"
    row = {"prompt": "2+3+4=", "answer": "5 9"}
    right = "5 9"
    wrong = "6 8"


def test_some_of_the_words_give_a_part_of_the_reward() -> None:
    """One of two words is at its place."""
    score = make(MyNameConfig(use="my_name", partial=0.5), Context(run="test", name="test", seed=0))
    assert score("2+3+4=", "5 8", answer="5 9") == {"reward": 0.25, "accuracy": 0.0}
