"""Workflow `single_turn`: each sample is one answer to the row's prompt."""

from collections.abc import Iterator, Sequence

from stretto import Component, Context, WorkflowConfig, hookimpl
from stretto.workflow import Prompt, Session, Trajectory

__all__ = ["SingleTurn"]


class SingleTurn:
    """Sample a group of answers and score them."""

    def __init__(self, config: WorkflowConfig, context: Context) -> None:
        del config, context

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return one trajectory for each answer of the group."""
        answers = await session.generate(prompt.ids, n=session.group_size)
        scores = await session.score(prompt, answers)
        return [
            Trajectory.of(prompt.ids, answer, score) for answer, score in zip(answers, scores, strict=True)
        ]


@hookimpl
def stretto_workflow() -> Iterator[Component[WorkflowConfig]]:
    yield Component(
        "single_turn",
        SingleTurn,
        WorkflowConfig,
        "one answer to each prompt, scored by the reward",
        reward_columns=("completion_tokens",),
    )
