"""The contract of rewards as tests."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from stretto.component import Kind
from stretto.testing.component import ComponentConformance, ComponentUnderTest
from stretto.user_code.protocol import try_to_ask
from stretto.user_code.reward import COMMAND, ScoringResult, Task, setup_frame
from stretto.user_code.scoring import score_group, scores_groups

__all__ = ["RewardConformance"]

_Scores = list[tuple[float, dict[str, float]]]
_START_S = 120.0
"""Maximum duration of the start of a scoring process, in seconds."""


class RewardConformance(ComponentConformance):
    """The contract of `stretto.reward`: every answer gets a finite number. The same answer always gets the
    same number, whichever other answers are scored, here and in a scoring process."""

    kind: ClassVar[Kind] = "reward"
    row: ClassVar[Mapping[str, Any]] = {"prompt": "1+1=", "answer": "2"}
    """A row, with the columns that the reward needs."""
    right: ClassVar[str | None] = None
    """An answer that scores higher than `wrong`."""
    wrong: ClassVar[str | None] = None
    """An answer that scores lower than `right`."""
    answers: ClassVar[Sequence[str]] = (
        *("", " ", "2", "no\nidea", "0" * 3000),
        *("½ 🙂 \u202e \x1b[2J\x00", "\\boxed{"),
    )
    """Answers as a policy may give them: empty, long, and with odd characters."""

    @pytest.fixture(scope="class")
    @classmethod
    def scores(cls, under_test: ComponentUnderTest) -> _Scores:
        """Reward and metrics of each of the answers."""
        return _scores(under_test.make(), cls.row, cls._all())

    def test_every_answer_gets_a_finite_number(self, scores: _Scores) -> None:
        """Some answers are empty, long or odd. In a run, an answer without a finite number fails."""
        assert len(scores) == len(self._all())

    def test_the_same_answers_get_the_same_scores(
        self, under_test: ComponentUnderTest, scores: _Scores
    ) -> None:
        """Each scoring process makes the reward, and any of them may score."""
        again = _scores(under_test.make(), self.row, self._all())
        differing = [text for text, a, b in zip(self._all(), scores, again, strict=True) if a != b]
        assert not differing, f"{differing[0][:60]!r} gets another score when the reward is made again"

    def test_an_answers_score_is_its_own(self, under_test: ComponentUnderTest, scores: _Scores) -> None:
        """A reward that scores one answer per call keeps nothing from one answer to the next."""
        reward = under_test.make()
        if scores_groups(reward):
            pytest.skip("it scores all answers of a group in one call")
        backwards = _scores(reward, self.row, self._all()[::-1])[::-1]
        for text, first, second in zip(self._all(), scores, backwards, strict=True):
            assert first == second, f"{text[:60]!r} scores {first}, and {second} after other answers"

    def test_the_right_answer_scores_higher_than_the_wrong_one(self, scores: _Scores) -> None:
        """Skipped unless the class names both answers."""
        if self.right is None or self.wrong is None:
            pytest.skip("it names no `right` and `wrong` answer")
        by_text = dict(zip(self._all(), scores, strict=True))
        right, wrong = by_text[self.right][0], by_text[self.wrong][0]
        assert right > wrong, f"{self.right!r} scores {right}, and {self.wrong!r} scores {wrong}"

    def test_its_check_of_rows_accepts_the_row(self, under_test: ComponentUnderTest) -> None:
        """The test calls `Component.check_row`, if the component has one."""
        if (check_row := under_test.component.check_row) is not None:
            fault = check_row(under_test.config, {k: v for k, v in self.row.items() if k != "prompt"})
            assert not fault, f"its check_row refuses the row: {fault}"

    def test_a_scoring_process_gives_the_same_rewards(
        self, under_test: ComponentUnderTest, scores: _Scores
    ) -> None:
        """The process has the limits of the section, and gets the row as it comes over the bus."""
        encode = msgspec.msgpack.encode
        task = Task(encode(dict(self.row)), tuple(self._all()), encode(_columns(self._all())))
        setup = setup_frame(under_test.composed.document, under_test.context(worker="verifier-0"))
        started, frames = try_to_ask(COMMAND, setup, [task], _START_S)
        assert not started.error, f"the scoring process cannot make it: {started.error}"
        result = msgspec.msgpack.decode(frames[0], type=ScoringResult)
        assert result.fault is None, f"the scoring process cannot score: {result.fault.error}"
        assert not result.over, f"an answer exceeds a limit: {next(iter(result.over.values()))}"
        rewards, expected = [reward for reward, _ in result.scores], [reward for reward, _ in scores]
        assert rewards == pytest.approx(expected), f"rewards {rewards} in a scoring process, {expected} here"

    @classmethod
    def _all(cls) -> list[str]:
        return [*cls.answers, *(text for text in (cls.right, cls.wrong) if text is not None)]


def _columns(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns that a workflow adds, for a tokenizer of bytes."""
    return {"completion_tokens": [max(1, len(text.encode())) for text in texts]}


def _scores(reward: Any, row: Mapping[str, Any], texts: Sequence[str]) -> _Scores:
    """Score answers as a scoring process does, which refuses anything but a finite number for each."""
    try:
        return score_group(reward, row, tuple(texts), _columns(texts))
    except Exception as error:
        raise AssertionError(f"it cannot score the answers: {type(error).__name__}: {error}") from error
