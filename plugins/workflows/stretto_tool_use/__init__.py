"""Workflow `tool_use`: the policy answers, and may call tools before it does.

Each sample is a conversation of its own. An answer with calls is followed by the tools' answers and another
turn, one without is the last; so is the one that reaches `max_turns`, or `max_tokens`. A call that is
malformed, names no tool, fails or takes too long is told so in the tool's place. The run's reward scores the
last answer, with `messages` (all that was said), `turns` and `tool_calls` as columns besides the row's.

Metrics: `turns`, `splits`, `tool_calls`, and `tool_errors`, those of the calls that were not answered
    properly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stretto import Component, Context, Problem, hookimpl
from stretto.agents.conversation import Conversation
from stretto.component import PositiveInt
from stretto.config import RunConfig
from stretto.errors import ConfigError, EngineError
from stretto.models.files import known_config
from stretto.models.tokenizer import Message, shows_tools
from stretto.models.vision import is_vision_language
from stretto.tools import (
    ParserName,
    ToolAnswer,
    ToolCall,
    ToolsConfig,
    assistant_message,
    parse_calls,
)
from stretto.workflow import Prompt, Session, Trajectory, group_of

__all__ = ["ToolUse", "ToolUseConfig"]


class ToolUseConfig(ToolsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `tool_use`."""

    tool_parser: ParserName = "hermes"
    """How the policy writes calls: `hermes` (`<tool_call>{…}</tool_call>`, Qwen too), `llama3` (the answer is
    the JSON), `mistral` (`[TOOL_CALLS][{…}]`)."""
    max_turns: PositiveInt = 8
    """Answers of the policy in one conversation. Calls in the last are not made."""
    max_tokens: PositiveInt | None = None
    """Tokens of a whole conversation, the prompt included; default no limit but the engine's."""


@dataclass
class _ToolLoop:
    """One conversation, and how often it called."""

    conversation: Conversation
    calls: int = 0
    errors: int = 0


class ToolUse:
    """Converse, call, answer; a group at once."""

    def __init__(self, config: ToolUseConfig, context: Context) -> None:
        del context
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """The trajectories of the group's conversations: one each, more where there were splits."""
        tools = await session.tools()
        loops = await group_of(session, lambda: self._play(prompt, session, tools))
        conversations = [loop.conversation for loop in loops]
        columns = {
            "messages": [conversation.history for conversation in conversations],
            "turns": [len(conversation.answers) for conversation in conversations],
            "tool_calls": [loop.calls for loop in loops],
        }
        last = [conversation.answers[-1] for conversation in conversations]
        scores = await session.score(prompt, last, columns=columns)
        trajectories: list[Trajectory] = []
        for loop, score in zip(loops, scores, strict=True):
            counted = {"tool_calls": float(loop.calls), "tool_errors": float(loop.errors)}
            score = replace(score, metrics={**score.metrics, **counted})
            trajectories += loop.conversation.trajectories(score)
        return trajectories

    async def _play(self, prompt: Prompt, session: Session, tools: Sequence[Mapping[str, Any]]) -> _ToolLoop:
        config = self._config
        conversation = session.conversation(_chat(prompt), tools=tools, limit=config.max_tokens)
        loop = _ToolLoop(conversation)
        while await conversation.reply() and len(conversation.answers) < config.max_turns:
            history = conversation.history
            assert isinstance(history, list)
            content = str(history[-1]["content"])
            if not (calls := parse_calls(content, config.tool_parser)):
                break
            calls = [_named(call, loop.calls + index) for index, call in enumerate(calls)]
            history[-1] = assistant_message(content, calls, config.tool_parser)
            for call in calls:
                answer = await _made(call, session)
                loop.calls += 1
                loop.errors += answer.failed
                conversation.add(
                    {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": answer.text}
                )
        if not conversation.answers:
            raise EngineError(f"workflow.max_tokens={config.max_tokens} leaves no room after the prompt")
        return loop


def _chat(prompt: Prompt) -> list[Message]:
    """The row's prompt as messages; text is a user's."""
    said = prompt.row["prompt"]
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


async def _made(call: ToolCall, session: Session) -> ToolAnswer:
    if call.fault:
        return ToolAnswer(f"error: {call.fault}", failed=True)
    return await session.call(call.name, call.arguments)


def _named(call: ToolCall, number: int) -> ToolCall:
    """With an id that every template takes: Mistral's wants nine letters and digits."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call.id):
        return call
    return msgspec.structs.replace(call, id=f"call{number:05}")


def check(config: ToolUseConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that the model's chat template shows the tools. `stretto check` itself tries to make them."""
    del config
    if is_vision_language(known_config(run.model)):
        yield Problem("workflow.use", "'tool_use' is for text alone, and the run's model is given images")
    elif run.model is not None and Path(run.model).is_dir():
        yield from _template_problems(run.model)


def _template_problems(model: str) -> Iterator[Problem]:
    try:
        if not shows_tools(model):
            yield Problem(
                "model", f"the chat template of {model!r} does not show tools to the model", "warning"
            )
    except ConfigError as error:
        yield Problem("model", str(error))


@hookimpl
def stretto_workflow() -> Iterator[Component[ToolUseConfig]]:
    """The component of this package."""
    yield Component(
        "tool_use",
        ToolUse,
        ToolUseConfig,
        "answers that may call Python functions and MCP servers",
        check,
        reward_columns=("messages", "turns", "tool_calls"),
    )
