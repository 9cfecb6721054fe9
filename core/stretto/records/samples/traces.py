"""Trajectories in the formats of other tools, one JSON object a line: written from kept samples, and read as
rows for training.

- `training-trace`: OpenEnv's `TrainingTrace`, version 1.
- `atif`: Harbor's Agent Trajectory Interchange Format; written as version 1.7, read as any 1.x.

Both have a turn for each answer of the policy: the ids that it read, the ids that it sampled, and their
logprobs. Turns whose prompt begins with all ids of the turn before are one sequence, as in the run. ATIF has
no mask: all sampled ids of a turn are trained, except those of a turn that is marked as copied context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
import numpy as np

from stretto.dataset import Message, Row
from stretto.errors import ConfigError
from stretto.models.images import names_in
from stretto.models.prompts import tools_of

__all__ = ["TraceFormat", "has_images", "is_one_answer", "read_trace", "texts_of", "write_trace"]

TraceFormat = Literal["training-trace", "atif"]

_FACTS = (
    *("id", "purpose", "ticket", "row", "outcome", "step", "staleness"),
    *("reward", "metrics", "finish", "oldest", "newest"),
)
"""Fields of a sample that are written as they are."""


# ------------------------------------------------------------------------------------------ writing


def is_one_answer(sample: Mapping[str, Any], parts: int) -> bool:
    """Return whether a sample of `parts` trajectories is one answer to the prompt of its dataset row."""
    one_turn = parts == 1 and sample["metrics"].get("turns", 1) == 1 and not sample["messages"]
    return one_turn and bool(_columns(sample).get("prompt"))


def texts_of(sample: Mapping[str, Any], parts: int) -> tuple[Any, Any]:
    """Return prompt and completion, both text or both messages. A completion of messages goes from the first
    answer to the last. Only the last trajectory of a chat has messages; the others have texts."""
    if is_one_answer(sample, parts):
        prompt, text = _columns(sample)["prompt"], sample["text"]
        return prompt, text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    if isinstance(sample["messages"], list):
        messages = cast("list[dict[str, Any]]", sample["messages"])
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if turns and (start := turns[-len(_spans(sample)) :][0]) > 0:
            return messages[:start], messages[start : turns[-1] + 1]
    return sample["prompt_text"], sample["text"]


def has_images(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has images, which these formats cannot hold."""
    return bool(sample["images"] or names_in(_columns(sample)))


def write_trace(sample: Mapping[str, Any], parts: int, format: TraceFormat, run: str) -> dict[str, Any]:
    """Return a kept sample with tokens and texts, one of `parts` trajectories, as an object of a format."""
    facts, turns = {name: sample[name] for name in _FACTS}, list(_turns_of(sample, parts))
    tools = tools_of(_columns(sample))
    if format == "training-trace":
        return {
            "schema_version": 1,
            "turns": [
                {
                    "node_id": f"{sample['id']}/{number}",
                    "prompt_token_ids": turn.prompt_ids,
                    "completion_token_ids": turn.ids,
                    "per_token_logps": turn.logprobs,
                    "loss_mask": [0] * len(turn.prompt_ids) + turn.mask,
                    "request": {**_openai(turn.prompt, "prompt", "messages"), "tools": tools},
                    "response": {"choices": [_openai(turn.reply, "text", "message")]},
                    "metadata": facts,
                }
                for number, turn in enumerate(turns)
            ],
        }
    text = turns[0].prompt if isinstance(turns[0].prompt, str) else None
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": run,
        "trajectory_id": sample["id"],
        "agent": {"name": "stretto", "version": version("stretto"), "tool_definitions": tools},
        "steps": [{"step_id": number, **step} for number, step in enumerate(_steps_of(turns), 1)],
        "extra": {**facts, "text_prompt": text},
    }


class _Turn(NamedTuple):
    """One call of the policy."""

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    """1 for each of `ids` that is trained, else 0."""
    prompt: str | Sequence[Message] | None
    """The text or the messages before the answer; None if only the ids are known."""
    reply: str | Message | None
    logprobs: Sequence[float] = ()
    tools: Sequence[Mapping[str, Any]] = ()


def _columns(sample: Mapping[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", sample["dataset_row"]) if isinstance(sample["dataset_row"], dict) else {}


def _spans(sample: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (start, end) of the answers."""
    edges = np.flatnonzero(np.diff(sample["loss_mask"], prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _turns_of(sample: Mapping[str, Any], parts: int) -> Iterator[_Turn]:
    prompt, completion = texts_of(sample, parts)
    spans, texts = _spans(sample), list[tuple[Any, Any]]()
    if isinstance(completion, list):
        chat = [*prompt, *completion]
        places = [n for n in range(len(prompt), len(chat)) if chat[n]["role"] == "assistant"]
        texts = [(chat[:place], chat[place]) for place in places]
    if len(texts) != len(spans):  # there is one text for all answers
        prompts = [sample["prompt_text"], *[None] * (len(spans) - 1)]
        texts = list(zip(prompts, [*prompts[1:], sample["text"]], strict=True))
    if isinstance(prompt, str):
        texts[0] = prompt, texts[0][1]
    tokens, logprobs = sample["tokens"], sample["logprobs"]
    for (start, end), (before, reply) in zip(spans, texts, strict=True):
        # An engine may round the logprob of a certain token to a little more than 0.
        values = [min(0.0, value) for value in logprobs[start:end]]
        yield _Turn(tokens[:start], tokens[start:end], [1] * (end - start), before, reply, values)


def _openai(value: Any, of_text: str, of_chat: str) -> dict[str, Any]:
    """Return a prompt or an answer under the key that OpenAI's API has for its kind."""
    return {} if value is None else {of_text if isinstance(value, str) else of_chat: value}


def _steps_of(turns: Sequence[_Turn]) -> Iterator[dict[str, Any]]:
    prompt, seen = turns[0].prompt, 0
    steps = [{"source": "user", "message": prompt}] if isinstance(prompt, str) else list[dict[str, Any]]()
    for turn in turns:
        if not isinstance(turn.prompt, str) and turn.prompt is not None:
            for message in turn.prompt[seen:]:
                _add_step(steps, message)
            seen = len(turn.prompt) + 1  # the answer, too
        reply = turn.reply or ""
        _add_step(steps, {"role": "assistant", "content": reply} if isinstance(reply, str) else reply)
        steps[-1] |= {
            "is_copied_context": False,
            "metrics": {
                "prompt_tokens": len(turn.prompt_ids),
                "completion_tokens": len(turn.ids),
                "prompt_token_ids": turn.prompt_ids,
                "completion_token_ids": turn.ids,
                "logprobs": turn.logprobs,
            },
        }
    yield from steps


def _add_step(steps: list[dict[str, Any]], message: Message) -> None:
    """Add a message. A tool's result belongs to the step before it; an answer in the prompt is context."""
    content = message.get("content") or ""
    if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
        calls = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())]
        of_call = message.get("tool_call_id")
        result = {"source_call_id": of_call if of_call in calls else None, "content": content}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
    elif message["role"] == "assistant":
        step: dict[str, Any] = {"source": "agent", "message": content, "is_copied_context": True}
        if calls := message.get("tool_calls"):
            step["tool_calls"] = [_tool_call(number, call) for number, call in enumerate(calls)]
        if reasoning := message.get("reasoning_content"):
            step["reasoning_content"] = reasoning
        steps.append(step)
    else:
        steps.append({"source": "system" if message["role"] == "system" else "user", "message": content})


def _tool_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function: Mapping[str, Any] = call.get("function", call)
    arguments: Any = function.get("arguments") or {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    arguments = value if isinstance(value, dict) else {"arguments": value}
    return {
        "tool_call_id": call.get("id") or f"call-{number}",
        "function_name": function["name"],
        "arguments": arguments,
    }


# ------------------------------------------------------------------------------------------ reading

_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
_Objects = list[dict[str, Any]]


class _TrainingTurn(msgspec.Struct):
    prompt_token_ids: _Ids
    completion_token_ids: _Ids
    per_token_logps: list[float]
    loss_mask: list[Literal[0, 1]]
    request: dict[str, Any] = {}
    response: dict[str, Any] = {}


class _TrainingTrace(msgspec.Struct):
    turns: list[_TrainingTurn]
    schema_version: Literal[1] = 1


class _Metrics(msgspec.Struct):
    prompt_token_ids: _Ids | None = None
    completion_token_ids: _Ids | None = None
    logprobs: list[float] | None = None


class _ToolCall(msgspec.Struct):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Result(msgspec.Struct):
    source_call_id: str | None = None
    content: str | _Objects | None = None


class _Observation(msgspec.Struct):
    results: list[_Result]


class _Step(msgspec.Struct):
    source: Literal["system", "user", "agent"]
    message: str | _Objects
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class _Agent(msgspec.Struct):
    tool_definitions: _Objects | None = None


class _Trajectory(msgspec.Struct):
    schema_version: Annotated[str, msgspec.Meta(pattern=r"^ATIF-v1\.")]
    agent: _Agent
    steps: list[_Step]
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[_Trajectory] | None = None


def read_trace(line: bytes, format: TraceFormat) -> list[Row]:
    """Return the sequences of a trajectory as rows with the columns `prompt`, `tokens`, `loss_mask`, `tools`,
    and `completion` where the format has the text that was sampled.

    Raises:
        ConfigError: if the line is no such trajectory, has turns without ids, or has nothing to train on.
    """
    rows: list[Row] = []
    try:
        for turn in _READERS[format](line):
            row = rows[-1] if rows else {"tokens": [None]}
            if turn.prompt_ids[: len(row["tokens"])] != row["tokens"]:
                if turn.prompt is None:
                    raise ConfigError("a turn has no prompt in 'request', neither 'messages' nor 'prompt'")
                row = {"prompt": turn.prompt, "tokens": [], "loss_mask": [], "tools": list(turn.tools)}
                rows.append(row)
            row["loss_mask"] += [0] * (len(turn.prompt_ids) - len(row["tokens"])) + turn.mask
            row["tokens"] = turn.prompt_ids + turn.ids
            if isinstance(turn.reply, str):
                row["completion"] = turn.reply
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a trajectory in the format {format!r}: {error}") from error
    if trained := [row for row in rows if any(row["loss_mask"])]:
        return trained
    raise ConfigError(f"a trajectory in the format {format!r} without a token to train on")


def _read_training_trace(line: bytes) -> Iterator[_Turn]:
    for number, turn in enumerate(msgspec.json.decode(line, type=_TrainingTrace).turns, 1):
        start, ids, mask = len(turn.prompt_token_ids), turn.completion_token_ids, turn.loss_mask
        if len(turn.per_token_logps) != len(ids) or len(mask) != start + len(ids) or any(mask[:start]):
            raise ConfigError(
                f"turn {number}: expected a logprob for each of {len(ids)} sampled tokens, and a loss_mask "
                f"of {start} zeros for the prompt and {len(ids)} values for these"
            )
        request = turn.request
        prompt, tools = request.get("messages", request.get("prompt")), request.get("tools") or ()
        choices: Any = turn.response.get("choices") or [{}]
        reply = choices[0].get("text") or (choices[0].get("message") or {}).get("content")
        yield _Turn(turn.prompt_token_ids, ids, [*mask[start:]], prompt, reply, tools=tools)


def _read_atif(line: bytes) -> Iterator[_Turn]:
    yield from _atif_turns(msgspec.json.decode(line, type=_Trajectory))


def _atif_turns(trajectory: _Trajectory) -> Iterator[_Turn]:
    messages: list[dict[str, Any]] = []
    text_prompt = (trajectory.extra or {}).get("text_prompt")
    for number, step in enumerate(trajectory.steps, 1):
        metrics, sampled = step.metrics or _Metrics(), step.source == "agent" and step.llm_call_count != 0
        if sampled and not step.is_copied_context:
            ids, prompt_ids = metrics.completion_token_ids, metrics.prompt_token_ids
            if ids is None or prompt_ids is None or (step.llm_call_count or 1) > 1:
                raise ConfigError(
                    f"step {number}: expected one call of the model, with its prompt_token_ids and "
                    "completion_token_ids in metrics; have the agent record them"
                )
            if metrics.logprobs is not None and len(metrics.logprobs) != len(ids):
                raise ConfigError(f"step {number}: {len(metrics.logprobs)} logprobs for {len(ids)} tokens")
            prompt = text_prompt if isinstance(text_prompt, str) else [*messages]
            # No reply: an agent may write into `message` what it made of the answer.
            tools = trajectory.agent.tool_definitions or ()
            yield _Turn(prompt_ids, ids, [1] * len(ids), prompt, None, tools=tools)
        messages += _messages_of(step)
    for subagent in trajectory.subagent_trajectories or ():
        yield from _atif_turns(subagent)


def _messages_of(step: _Step) -> Iterator[dict[str, Any]]:
    role = "assistant" if step.source == "agent" else step.source
    message: dict[str, Any] = {"role": role, "content": step.message}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.function_name, "arguments": call.arguments},
            }
            for call in step.tool_calls
        ]
    yield message
    for result in step.observation.results if step.observation else ():
        of_call = {"tool_call_id": result.source_call_id} if result.source_call_id else {}
        yield {"role": "tool" if of_call else "user", "content": result.content or "", **of_call}


_READERS: dict[TraceFormat, Callable[[bytes], Iterator[_Turn]]] = {
    "training-trace": _read_training_trace,
    "atif": _read_atif,
}
