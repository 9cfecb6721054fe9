"""Workflow `multi_turn`: the policy and an environment take turns.

A conversation ends when the environment returns no further message, after `max_turns` answers, or when
`max_tokens` leaves no room. Its reward is the sum of the rewards from the environment; if there are none,
the run's reward scores the last answer, with `messages` (the whole conversation) and `turns` as columns.

Metrics: `turns`, `splits` (rewrites of sampled text by the chat template), and the environment's metrics,
each with its last value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto import Component, Context, Problem, hookimpl
from stretto.agents.conversation import Conversation
from stretto.component import PositiveInt
from stretto.config import RunConfig
from stretto.environment import EnvironmentConfig, Feedback
from stretto.errors import EngineError
from stretto.user_code.importable import fault_of_importable, unknown_parameter
from stretto.workflow import Prompt, Score, Session, Trajectory, group_of

__all__ = ["MultiTurn", "MultiTurnConfig"]


class MultiTurnConfig(EnvironmentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `multi_turn`."""

    max_turns: PositiveInt = 8
    """Maximum number of answers of the policy in one conversation."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a conversation, prompt included. Default: only the engine's limit."""


@dataclass
class _TurnLoop:
    conversation: Conversation
    rewards: list[float] = field(default_factory=list[float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class MultiTurn:
    """Plays the conversations of a group at once, and scores those without a reward from the environment."""

    def __init__(self, config: MultiTurnConfig, context: Context) -> None:
        del context
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return the trajectories of the group: one for each conversation, and one more for each split."""
        loops = await group_of(session, lambda: self._play(prompt, session))
        unscored = [loop for loop in loops if not loop.rewards]
        for loop, score in zip(unscored, await self._scores(prompt, session, unscored), strict=True):
            loop.rewards.append(score.reward)
            loop.metrics |= score.metrics
        return [
            trajectory
            for loop in loops
            for trajectory in loop.conversation.trajectories(Score(sum(loop.rewards), loop.metrics))
        ]

    async def _play(self, prompt: Prompt, session: Session) -> _TurnLoop:
        config = self._config
        conversation = session.conversation(prompt.row["prompt"], limit=config.max_tokens)
        loop, feedback = _TurnLoop(conversation), Feedback()
        while len(conversation.answers) < config.max_turns and await conversation.reply():
            feedback = await session.feedback(prompt, conversation, feedback.state)
            loop.metrics |= feedback.metrics
            if feedback.reward is not None:
                loop.rewards.append(feedback.reward)
            if not feedback.messages:
                break
            conversation.add(*feedback.messages, images=feedback.images)
        if not conversation.answers:
            raise EngineError(f"workflow.max_tokens={config.max_tokens} leaves no room after the prompt")
        return loop

    async def _scores(self, prompt: Prompt, session: Session, loops: Sequence[_TurnLoop]) -> list[Score]:
        if not loops:
            return []
        conversations = [loop.conversation for loop in loops]
        columns = {
            "messages": [conversation.history for conversation in conversations],
            "turns": [len(conversation.answers) for conversation in conversations],
        }
        answers = [conversation.answers[-1] for conversation in conversations]
        return await session.score(prompt, answers, columns=columns)


def check(config: MultiTurnConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that the environment exists."""
    del run
    if fault := fault_of_importable(config.environment):
        yield Problem("workflow.environment", fault)


def check_row(config: MultiTurnConfig, row: Mapping[str, Any]) -> str:
    """Return an error if the row gives no value for a parameter of the environment; else empty."""
    known = ("prompt", "completion", "messages", "turn", "state", *row)
    unknown = unknown_parameter(config.environment, known)
    return f"the environment has a parameter {unknown!r}; available: {', '.join(known)}" if unknown else ""


@hookimpl
def stretto_workflow() -> Iterator[Component[MultiTurnConfig]]:
    yield Component(
        "multi_turn",
        MultiTurn,
        MultiTurnConfig,
        "several turns: an environment answers the policy",
        check,
        check_row,
        reward_columns=("completion_tokens", "messages", "turns"),
    )
