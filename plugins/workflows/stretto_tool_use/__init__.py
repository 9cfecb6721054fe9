"""Workflow `tool_use`: the policy may call tools before it gives its last answer.

After an answer with calls, the policy gets the tools' results and answers again. The last answer is one
without calls, or the one that reaches `max_turns` or `max_tokens`. For a call that is malformed, names an
unknown tool, fails or takes too long, the result is an error message. A call of a tool that only the row
names ends the conversation, for the reward to judge. The reward scores the last answer, with `messages` (the
whole conversation), `turns` and `tool_calls` as columns.

Metrics: `turns`, `splits`, `tool_calls`, and `tool_errors`, the number of calls that failed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from stretto import Component, Context, Problem, hookimpl
from stretto.agents.conversation import Conversation
from stretto.chat.calls import ParserName, ToolCall
from stretto.chat.prompts import format_named, name_of_tool
from stretto.component import PositiveInt
from stretto.config import RunConfig
from stretto.dataset import Message
from stretto.errors import ConfigError, EngineError
from stretto.models.files import known_config
from stretto.models.tokenizer import load_tokenizer
from stretto.models.vision import is_vision_language
from stretto.tools import ToolAnswer, ToolsConfig
from stretto.workflow import Prompt, Session, Trajectory, group_of

__all__ = ["ToolUse", "ToolUseConfig"]


class ToolUseConfig(ToolsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `tool_use`."""

    tool_parser: ParserName = "auto"
    """Format in which the policy writes tool calls: `hermes` (`<tool_call>{…}</tool_call>`, also Qwen),
    `llama3` (the answer is the JSON), `mistral` (`[TOOL_CALLS][{…}]`), or `auto`: the one that the chat
    template writes."""
    max_turns: PositiveInt = 8
    """Maximum number of answers of the policy in one conversation. Calls in the last answer are not run."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a conversation, prompt included. Default: only the engine's limit."""


@dataclass
class _ToolLoop:
    conversation: Conversation
    calls: int = 0
    errors: int = 0


class ToolUse:
    """Plays the conversations of a group at once: samples an answer, runs its tool calls, and repeats."""

    def __init__(self, config: ToolUseConfig, context: Context) -> None:
        del context
        self._config = config

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return the trajectories of the group: one for each conversation, and one more for each split."""
        tools = await session.tools()
        loops = await group_of(session, lambda: self._play(prompt, session, tools))
        conversations = [loop.conversation for loop in loops]
        columns = {
            "messages": [conversation.history for conversation in conversations],
            "turns": [len(conversation.answers) for conversation in conversations],
            "tool_calls": [loop.calls for loop in loops],
        }
        answers = [conversation.answers[-1] for conversation in conversations]
        scores = await session.score(prompt, answers, columns=columns)
        trajectories: list[Trajectory] = []
        for loop, score in zip(loops, scores, strict=True):
            metrics = {"tool_calls": float(loop.calls), "tool_errors": float(loop.errors)}
            score = replace(score, metrics={**score.metrics, **metrics})
            trajectories += loop.conversation.trajectories(score)
        return trajectories

    async def _play(self, prompt: Prompt, session: Session, tools: Sequence[Mapping[str, Any]]) -> _ToolLoop:
        config, form = self._config, session.tokenizer.form
        format = format_named(config.tool_parser, form)
        row_tools = set(map(name_of_tool, session.row_tools))
        conversation = session.conversation(_chat(prompt), tools=tools, limit=config.max_tokens)
        loop = _ToolLoop(conversation)
        while await conversation.reply() and len(conversation.answers) < config.max_turns:
            end = form.stored.leading_end(conversation.said, conversation.answers[-1].opened)
            before, calls = format.split(conversation.said, end, tools)
            if not calls or any(call.name in row_tools for call in calls):
                break
            any_id = format.name != "mistral"
            calls = [_with_id(call, loop.calls + index, any_id) for index, call in enumerate(calls)]
            conversation.store_calls(before, calls)
            for call in calls:
                result = await _run_call(call, session)
                loop.calls += 1
                loop.errors += result.failed
                conversation.add(
                    {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.content},
                    images=result.images,
                )
        if not conversation.answers:
            raise EngineError(f"workflow.max_tokens={config.max_tokens} leaves no room after the prompt")
        return loop


def _chat(prompt: Prompt) -> list[Message]:
    content = prompt.row["prompt"]
    return [{"role": "user", "content": content}] if isinstance(content, str) else list(content)


async def _run_call(call: ToolCall, session: Session) -> ToolAnswer:
    if call.fault:
        return ToolAnswer(f"error: {call.fault}", failed=True)
    return await session.call(call.name, call.arguments)


def _with_id(call: ToolCall, number: int, any_id: bool) -> ToolCall:
    """Return the call with an id, the policy's if it wrote one. Mistral's templates want nine letters and
    digits."""
    if call.id and (any_id or re.fullmatch(r"[A-Za-z0-9]{9}", call.id)):
        return call
    return msgspec.structs.replace(call, id=f"call{number:05}")


def check(config: ToolUseConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that the model has a chat template. `stretto check` itself tries the tools and looks for them in
    prompts. The template of a model that reads images is in its processor, which is not loaded here."""
    del config
    model = run.model
    if is_vision_language(known_config(model)) or model is None or not Path(model).is_dir():
        return
    try:
        form = load_tokenizer(model).form
    except ConfigError as error:
        yield Problem("model", str(error))
    else:
        if not form.has_template:
            yield Problem(
                "model",
                f"{model!r} has no chat template, which tools need; use another model, or write "
                "chat_template.jinja into its folder",
            )


@hookimpl
def stretto_workflow() -> Iterator[Component[ToolUseConfig]]:
    yield Component(
        "tool_use",
        ToolUse,
        ToolUseConfig,
        "several turns: the policy may call Python functions and MCP servers",
        check,
        reward_columns=("completion_tokens", "messages", "turns", "tool_calls"),
    )
