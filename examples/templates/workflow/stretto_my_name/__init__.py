"""The workflow `my_name`: one answer to each prompt. An answer that was cut off gets a fixed reward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto import Component, Context, WorkflowConfig, hookimpl
from stretto.workflow import Answer, Prompt, Score, Session, Trajectory


class MyNameConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `my_name`."""

    cut_reward: float = 0.0
    """Reward of an answer that reached `sampling.max_tokens`, whatever the run's reward says."""


class MyName:
    """Sample a group of answers and score them."""

    def __init__(self, config: MyNameConfig, context: Context) -> None:
        del context
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return one trajectory for each answer of the group."""
        answers = await session.generate(prompt.ids, n=session.group_size)
        scores = await session.score(prompt, answers)
        return [
            Trajectory.of(prompt.ids, answer, self._judge(answer, score))
            for answer, score in zip(answers, scores, strict=True)
        ]

    def _judge(self, answer: Answer, score: Score) -> Score:
        if answer.finish != "length":
            return score
        return Score(self._config.cut_reward, score.metrics)


@hookimpl
def stretto_workflow() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component(
        "my_name",
        MyName,
        MyNameConfig,
        "one answer to each prompt; a fixed reward for answers that were cut off",
        reward_columns=("completion_tokens",),
    )
