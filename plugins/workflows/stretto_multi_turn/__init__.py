"""Workflow `multi_turn`: the policy and an environment speak in turn.

Each sample is a conversation of its own. It ends when the environment has nothing more to say, after
`max_turns` answers, or when `max_tokens` leaves no room. Its reward is the sum of those that the environment
gave; where it gave none, the run's reward scores the last answer, with `messages` (all that was said) and
`turns` as columns besides the row's.

Metrics: `turns`, `splits` (how often the chat template rewrote what was sampled), and the environment's own,
    of each the last value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stretto import Component, Context, Problem, hookimpl
from stretto.agents.conversation import Conversation
from stretto.component import PositiveInt
from stretto.config import RunConfig
from stretto.environment import EnvironmentConfig, Feedback
from stretto.errors import EngineError
from stretto.models.files import known_config
from stretto.models.vision import is_vision_language
from stretto.user_code.importable import fault_of_importable
from stretto.workflow import Prompt, Score, Session, Trajectory, group_of

__all__ = ["MultiTurn", "MultiTurnConfig"]


class MultiTurnConfig(EnvironmentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `multi_turn`."""

    max_turns: PositiveInt = 8
    """Answers of the policy in one conversation."""
    max_tokens: PositiveInt | None = None
    """Tokens of a whole conversation, the prompt included; default no limit but the engine's."""


@dataclass
class _TurnLoop:
    """One conversation, and what the environment made of it."""

    conversation: Conversation
    rewards: list[float] = field(default_factory=list[float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class MultiTurn:
    """Converse with the environment, a group at once; score what it did not."""

    def __init__(self, config: MultiTurnConfig, context: Context) -> None:
        del context
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """The trajectories of the group's conversations: one each, more where there were splits."""
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
            if not feedback.said:
                break
            chat = not isinstance(conversation.history, str)
            for turn in feedback.said:
                conversation.add(
                    {"role": "user", "content": turn} if chat and isinstance(turn, str) else turn
                )
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
        last = [conversation.answers[-1] for conversation in conversations]
        return await session.score(prompt, last, columns=columns)


def check(config: MultiTurnConfig, run: RunConfig) -> Iterator[Problem]:
    """Whether there is such an environment, and nothing to look at."""
    if fault := fault_of_importable(config.environment):
        yield Problem("workflow.environment", fault)
    if is_vision_language(known_config(run.model)):
        yield Problem("workflow.use", "'multi_turn' is for text alone, and the run's model is given images")


@hookimpl
def stretto_workflow() -> Iterator[Component[MultiTurnConfig]]:
    """The component of this package."""
    yield Component(
        "multi_turn",
        MultiTurn,
        MultiTurnConfig,
        "an environment answers the policy between its turns",
        check,
        reward_columns=("messages", "turns"),
    )
