"""Trajectories in the formats of other tools, one JSON object a line: written from kept samples, and read as
rows for training.

- `training-trace`: OpenEnv's `TrainingTrace`, version 1.
- `atif`: Harbor's Agent Trajectory Interchange Format; written as version 1.7, read as any 1.x. It has no
  mask: all tokens that a step sampled are trained, except where the step is marked as copied context.

Both have a turn for each answer of the policy. Turns are one sequence, as in the run, where the prompt begins
with all ids of the turn before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np

from stretto.chat.prompts import tools_of
from stretto.dataset import Message, Row
from stretto.errors import ConfigError
from stretto.models.images import names_in

__all__ = ["TraceFormat", "read_trace", "row_of", "sample_of", "write_trace"]

TraceFormat = Literal["training-trace", "atif"]

_FACTS = (
    *("id", "purpose", "ticket", "row", "outcome", "step", "staleness"),
    *("reward", "metrics", "finish", "oldest", "newest"),
)
"""Fields of a sample that are written as they are."""
_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class _Turn(msgspec.Struct):
    """One call of the policy, as in a `TrainingTrace`: request and response have the form of OpenAI's API."""

    prompt_token_ids: _Ids
    completion_token_ids: _Ids
    per_token_logps: list[float]
    loss_mask: list[Annotated[int, msgspec.Meta(ge=0, le=1)]]
    """Of prompt and completion."""
    node_id: str = ""
    request: dict[str, Any] = {}
    response: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


class _TrainingTrace(msgspec.Struct):
    turns: list[_Turn]
    schema_version: Literal[1] = 1


class _Metrics(msgspec.Struct):
    prompt_token_ids: _Ids | None = None
    completion_token_ids: _Ids | None = None
    logprobs: list[float] | None = None


class _Step(msgspec.Struct):
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, Any]]
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    observation: dict[str, list[dict[str, Any]]] | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    model_name: str | None = None


class _AtifTrajectory(msgspec.Struct):
    schema_version: Annotated[str, msgspec.Meta(pattern=r"^ATIF-v1\.")]
    agent: dict[str, Any]
    steps: list[_Step]
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[_AtifTrajectory] | None = None


# ------------------------------------------------------------------------------------------ writing


def sample_of(row: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """Return what the trajectories of one sample have in common."""
    return row["purpose"], row["ticket"], row["attempt"], row["sample"]


def row_of(sample: Mapping[str, Any], parts: int) -> dict[str, Any] | None:
    """Return a sample of `parts` trajectories as a row with `prompt` and `completion`, both text or both
    messages; None if images are in the dataset or in a chat."""
    columns = cast("dict[str, Any]", sample["dataset_row"]) if isinstance(sample["dataset_row"], dict) else {}
    images = names_in(columns)
    prompt: Any = columns.get("prompt")
    completion: Any = None
    if prompt and parts == 1 and sample["metrics"].get("turns", 1) == 1 and not sample["messages"]:
        if not all(isinstance(name, str) for name in images):
            return None
        text = sample["text"]
        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    elif images or sample["images"] is not None:
        return None
    else:
        prompt, completion = _conversation_of(sample)
    row = {"id": sample["id"], "prompt": prompt, "completion": completion, "reward": sample["reward"]}
    return {**row, "images": images} if images else row


def _conversation_of(sample: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a trajectory's messages before its first answer, and those from that to its last answer. Without
    messages, return its texts: only the last trajectory of a chat has the messages."""
    if isinstance(sample["messages"], list):
        messages = cast("list[dict[str, Any]]", sample["messages"])
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if turns and (start := turns[-len(_spans(sample)) :][0]) > 0:
            return messages[:start], messages[start : turns[-1] + 1]
    return sample["prompt_text"], sample["text"]


def _spans(sample: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (start, end) of the answers."""
    edges = np.flatnonzero(np.diff(sample["loss_mask"], prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def write_trace(
    sample: Mapping[str, Any], parts: int, format: TraceFormat, run: str
) -> dict[str, Any] | None:
    """Return a sample of `parts` trajectories as an object; None without tokens or with images."""
    row, spans = row_of(sample, parts), _spans(sample)
    if not spans or row is None or "images" in row:
        return None
    facts, columns = {name: sample[name] for name in _FACTS}, sample["dataset_row"]
    tools = tools_of(columns) if isinstance(columns, dict) else ()
    turns = [
        _Turn(
            sample["tokens"][:start],
            sample["tokens"][start:end],
            # An engine may round the logprob of a certain token to a little more than 0.
            [min(0.0, value) for value in sample["logprobs"][start:end]],
            [0] * start + [1] * (end - start),
            f"{sample['id']}/{number}",
            {**request, "tools": list(tools)},
            {"choices": [choice]},
            facts,
        )
        for number, ((start, end), (request, choice)) in enumerate(
            zip(spans, _texts(sample, row, len(spans)), strict=True)
        )
    ]
    if format == "training-trace":
        return msgspec.to_builtins(_TrainingTrace(turns))
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": run,
        "trajectory_id": sample["id"],
        "agent": {"name": "stretto", "version": version("stretto"), "tool_definitions": list(tools)},
        "steps": [{"step_id": number, **step} for number, step in enumerate(_steps_of(turns), 1)],
        "extra": {**facts, "text_prompt": turns[0].request.get("prompt")},
    }


def _texts(sample: Mapping[str, Any], row: Row, count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what is known of the texts of `count` answers: (request, choice) of each."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(completion, list):
        chat: list[Any] = [*prompt, *completion]
        places = [n for n in range(len(prompt), len(chat)) if chat[n]["role"] == "assistant"]
        if len(places) == count:
            return [({"messages": chat[:place]}, {"message": chat[place]}) for place in places]
        prompt, completion = sample["prompt_text"], sample["text"]
    # There is one text for all answers.
    empty: list[dict[str, Any]] = [{}] * (count - 1)
    return list(zip([{"prompt": prompt}, *empty], [*empty, {"text": completion}], strict=True))


def _steps_of(turns: list[_Turn]) -> list[dict[str, Any]]:
    prompt, seen = turns[0].request.get("prompt"), 0
    steps: list[dict[str, Any]] = [] if prompt is None else [{"source": "user", "message": prompt}]
    for turn in turns:
        messages: list[Message] = turn.request.get("messages", [])
        for message in messages[seen:]:
            _add_step(steps, message)
        seen = len(messages) + 1  # the answer, too
        [choice] = turn.response["choices"]
        _add_step(steps, choice.get("message") or {"role": "assistant", "content": choice.get("text")})
        steps[-1] |= {
            "is_copied_context": False,
            "metrics": {
                "prompt_token_ids": turn.prompt_token_ids,
                "completion_token_ids": turn.completion_token_ids,
                "logprobs": turn.per_token_logps,
            },
        }
    return steps


def _add_step(steps: list[dict[str, Any]], message: Message) -> None:
    """Add a message. A tool's result belongs to the step before it; an answer in the prompt is context."""
    content, role = message.get("content") or "", message["role"]
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        calls = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())]
        of_call = message.get("tool_call_id")
        result = {"source_call_id": of_call if of_call in calls else None, "content": content}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
    elif role == "assistant":
        calls = [_tool_call(*numbered) for numbered in enumerate(message.get("tool_calls") or ())]
        step: dict[str, Any] = {"source": "agent", "message": content, "is_copied_context": True}
        step |= {"tool_calls": calls} if calls else {}
        steps.append(step | {key: message[key] for key in ("reasoning_content",) if message.get(key)})
    else:
        steps.append({"source": "system" if role == "system" else "user", "message": content})


def _tool_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function: Mapping[str, Any] = call.get("function", call)
    arguments: Any = function.get("arguments") or {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    return {
        "tool_call_id": call.get("id") or f"call-{number}",
        "function_name": function["name"],
        "arguments": value if isinstance(value, dict) else {"arguments": value},
    }


# ------------------------------------------------------------------------------------------ reading


def read_trace(trajectory: Mapping[str, Any], format: TraceFormat) -> list[Row]:
    """Return the sequences of a trajectory as rows with the columns `prompt`, `tools`, `tokens`, `loss_mask`,
    and `completion` where the format has the text that was sampled.

    Raises:
        ConfigError: if it is no such trajectory, a turn lacks ids or logprobs, or none is trained.
    """
    rows: list[Row] = []
    try:
        if format == "atif":
            turns = list(_turns_of(msgspec.convert(trajectory, _AtifTrajectory)))
        else:
            turns = msgspec.convert(trajectory, _TrainingTrace).turns
        for number, turn in enumerate(turns, 1):
            _check(turn, f"turn {number}")
            row: Row = rows[-1] if rows else {"tokens": [None]}
            if turn.prompt_token_ids[: len(row["tokens"])] != row["tokens"]:
                row = {"prompt": _prompt_of(turn), "tools": turn.request.get("tools") or [], "tokens": []}
                rows.append(row | {"loss_mask": []})
                row = rows[-1]
            start = len(turn.prompt_token_ids)
            row["loss_mask"] += [0] * (start - len(row["tokens"])) + turn.loss_mask[start:]
            row["tokens"] = turn.prompt_token_ids + turn.completion_token_ids
            choice: Any = (turn.response.get("choices") or [{}])[0]
            text = choice.get("text") or (choice.get("message") or {}).get("content")
            if isinstance(text, str) and text:
                row["completion"] = text
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not a trajectory in the format {format!r}: {error}") from error
    if trained := [row for row in rows if any(row["loss_mask"])]:
        return trained
    raise ConfigError(f"a trajectory in the format {format!r} without a token to train on")


def _check(turn: _Turn, place: str) -> None:
    start, count = len(turn.prompt_token_ids), len(turn.completion_token_ids)
    if not start:
        raise ConfigError(f"{place}: no prompt_token_ids, so its answer would be trained without a prompt")
    if len(turn.per_token_logps) != count:
        raise ConfigError(f"{place}: {len(turn.per_token_logps)} logprobs for {count} sampled tokens")
    if len(turn.loss_mask) != start + count or any(turn.loss_mask[:start]):
        raise ConfigError(
            f"{place}: expected a loss_mask of {start} zeros for the prompt and {count} values for the "
            f"sampled tokens, found {len(turn.loss_mask)} values"
        )


def _prompt_of(turn: _Turn) -> Any:
    for key in ("messages", "prompt"):
        if key in turn.request:
            return turn.request[key]
    raise ConfigError(f"turn {turn.node_id!r} has no prompt in 'request', neither 'messages' nor 'prompt'")


def _turns_of(trajectory: _AtifTrajectory) -> Iterator[_Turn]:
    """Yield the trained calls of an ATIF trajectory and its subagents. They have no response: an agent may
    write into `message` what it made of the answer."""
    messages: list[dict[str, Any]] = []
    text, tools = (trajectory.extra or {}).get("text_prompt"), trajectory.agent.get("tool_definitions")
    own_name = trajectory.agent.get("model_name")
    for number, step in enumerate(trajectory.steps, 1):
        if step.source == "agent" and not step.is_copied_context and step.llm_call_count != 0:
            metrics = step.metrics or _Metrics()
            prompt, ids, logprobs = metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs
            if ids is None or prompt is None or logprobs is None or (step.llm_call_count or 1) > 1:
                raise ConfigError(
                    f"step {number}: expected one call of the model, with prompt_token_ids, "
                    "completion_token_ids and logprobs in its metrics; have the agent record them, or mark a "
                    "step without a call by llm_call_count: 0"
                )
            if (name := step.model_name or own_name) not in (None, own_name):
                raise ConfigError(f"step {number} is of the model {name!r}, and the agent's is {own_name!r}")
            request = {"prompt": text} if text is not None else {"messages": [*messages]}
            mask = [0] * len(prompt) + [1] * len(ids)
            yield _Turn(prompt, ids, logprobs, mask, request={**request, "tools": tools})
        messages += _messages_of(step)
    for subagent in trajectory.subagent_trajectories or ():
        yield from _turns_of(subagent)


def _messages_of(step: _Step) -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant" if step.source == "agent" else step.source}
    message["content"] = step.message
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {"name": call["function_name"], "arguments": call["arguments"]},
            }
            for call in step.tool_calls
        ]
    yield message
    for result in (step.observation or {}).get("results", ()):
        of_call = {"tool_call_id": result["source_call_id"]} if result.get("source_call_id") else {}
        yield {"role": "tool" if of_call else "user", "content": result.get("content") or "", **of_call}
