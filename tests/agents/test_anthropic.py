"""Anthropic's own client library against the endpoint, and as an unmodified agent."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import anyio
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from agent_session import CALL, TEMPLATE, FakeSession, check_exact, recorded_agent, tokenizer_with
from commands import output_of
from stretto.agents.recorder import CallLimits, CallRecorder
from stretto.tokenizer import Tokenizer
from stretto.user_code.sandbox import sandbox_problem
from stretto.workflow import Score

ADD: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USER: Any = {"role": "user", "content": "abc ok?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(TEMPLATE, tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def agent_of(
    session: FakeSession, limits: CallLimits | None = None
) -> AsyncGenerator[tuple[AsyncAnthropic, CallRecorder]]:
    async with recorded_agent(session, limits) as (url, key, recorder):
        async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as client:
            yield client, recorder


async def test_a_chat_goes_on_token_by_token(tokenizer: Tokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok", "abc", "ok")
    async with agent_of(session) as (client, recorder):
        create = client.messages.create
        first = await create(model="claude-9", max_tokens=40, messages=[USER], system="Be brief.")
        [block] = first.content
        assert block.type == "text"
        assert (block.text, first.stop_reason, first.model) == ("thin ok", "end_turn", "claude-9")
        prompt, answer = session.asked[0]
        assert (first.usage.input_tokens, first.usage.output_tokens) == (len(prompt), len(answer))
        count = await client.messages.count_tokens(model="", messages=[USER], system="Be brief.")
        assert count.input_tokens == len(prompt)
        both = [{"type": "text", "text": "and"}, {"type": "text", "text": "?"}]
        messages: Any = [USER, {"role": "assistant", "content": first.content}, {**USER, "content": both}]
        system: Any = [{"type": "text", "text": "Be brief."}]
        second = await create(model="", max_tokens=400, messages=messages, system=system)
        assert second.content[0].type == "text"
        # The same chat may continue in OpenAI's API.
        messages = [{"role": "system", "content": "Be brief."}, USER]
        messages += [{"role": "assistant", "content": "thin ok"}, {"role": "user", "content": "and?"}]
        messages += [{"role": "assistant", "content": second.content[0].text}, USER]
        async with AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key=client.api_key) as openai:
            await openai.chat.completions.create(model="", messages=messages)
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1"] * 3
    assert [sampling.max_tokens for sampling in session.samplings] == [40, 400, 400]


async def test_calls_of_tools_make_the_round(tokenizer: Tokenizer) -> None:
    session = FakeSession(tokenizer, f"ok {CALL}{CALL}", "abc", CALL)
    async with agent_of(session) as (client, recorder):
        messages: list[Any] = [USER]
        first = await client.messages.create(model="", max_tokens=400, messages=messages, tools=[ADD])
        assert first.stop_reason == "tool_use"
        text, call, other = first.content
        assert text.type == "text"
        assert text.text == "ok "
        assert call.type == "tool_use"
        assert other.type == "tool_use"
        assert (call.name, call.input) == ("add", {"a": 1, "b": [2, 3]})
        assert call.id != other.id
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "6"},
            {"type": "tool_result", "tool_use_id": other.id, "content": [{"type": "text", "text": "7"}]},
            {"type": "text", "text": "now?"},
        ]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        none: Any = {"type": "none"}
        second = await client.messages.create(
            model="", max_tokens=400, messages=messages, tools=[ADD], tool_choice=none
        )
        assert [block.type for block in second.content] == ["text"]
        third = await client.messages.create(model="", max_tokens=400, messages=[USER])
        assert third.content[0].type == "text"
        assert third.content[0].text == CALL  # nothing looked for a call
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1", "a0c1", "a0c2"]
    chat = tokenizer.decode(recorder.trajectories(Score(0.0))[0].tokens, special=True)
    expected = ("tool\n6", "tool\n7", "user\nnow?")
    assert "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in expected) in chat


async def test_a_stream_begins_with_the_first_token(tokenizer: Tokenizer) -> None:
    session = FakeSession(tokenizer, f"é ok 漢{CALL}", CALL, "thin ok")
    session.go_on = anyio.Event()
    async with agent_of(session) as (client, recorder):
        raw = await client.messages.create(
            model="", max_tokens=400, messages=[USER], tools=[ADD], stream=True
        )
        opening = await anext(raw)  # the policy has not gone on yet
        assert opening.type == "message_start"
        assert opening.message.usage.input_tokens == len(session.asked[0][0])
        session.go_on.set()
        events = [event async for event in raw]
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        pieces = [delta.text for delta in deltas if delta.type == "text_delta"]
        assert pieces[:2] == ["é", " "]  # whole characters only
        assert "".join(pieces) == "é ok 漢"
        kinds = [event.type for event in events]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        texts = [block[0], *[block[1]] * len(pieces), block[2]]
        assert kinds == [*texts, *block, "message_delta", "message_stop"]
        # What the client pieced together continues as well, here from a call without text.
        tools: Any = {"tools": [ADD], "max_tokens": 400, "model": ""}
        async with client.messages.stream(messages=[USER], **tools) as stream:
            final = await stream.get_final_message()
        [call] = final.content
        assert call.type == "tool_use"
        assert (call.input, final.stop_reason) == ({"a": 1, "b": [2, 3]}, "tool_use")
        assert final.usage.output_tokens == len(session.asked[1][1])
        assert final.usage.input_tokens == len(session.asked[1][0])
        told = [{"type": "tool_result", "tool_use_id": call.id, "content": "6", "is_error": False}]
        messages: Any = [
            USER,
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": told},
        ]
        async with client.messages.stream(messages=messages, **tools) as stream:
            assert "".join([text async for text in stream.text_stream]) == "thin ok"
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1", "a0c2", "a0c2"]


async def test_an_answer_says_why_it_ended(tokenizer: Tokenizer) -> None:
    session = FakeSession(tokenizer, "abc STOP ok", "abc STOP ok", "thin ok", "")
    async with agent_of(session) as (client, recorder):
        ask: Any = {"model": "", "max_tokens": 400, "messages": [USER]}
        whole = await client.messages.create(**ask, stop_sequences=["never", "STOP"])
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "STOP")
        async with client.messages.stream(**ask, stop_sequences=["STOP"]) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "STOP")
        assert final.content[0].type == "text"
        assert final.content[0].text == "abc "
        brief: Any = {**ask, "max_tokens": 1}
        cut = await client.messages.create(**brief)
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        silent = await client.messages.create(**ask)
        assert (silent.content, silent.stop_reason) == ([], "end_turn")
    check_exact(session, recorder)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens: expected"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "beginning of an answer"),
        ({"messages": [USER], "stop_sequences": [""]}, "empty text"),
        ({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "w"}]}, "not 'web_search_"),
        ({"messages": [USER], "tools": [{"input_schema": {}}]}, "tools[0]: a function needs a name"),
        ({"messages": [USER], "tools": [ADD], "tool_choice": {"type": "any"}}, "cannot be forced: 'any'"),
        ({"messages": [USER], "output_config": {"format": {"type": "json_schema"}}}, "format of the output"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0]: only text is supported, not 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0]: Object missing required field `tool_use_id`"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected"),
    ],
)  # fmt: skip
async def test_bad_requests_are_refused(tokenizer: Tokenizer, body: Any, message: str) -> None:
    async with agent_of(FakeSession(tokenizer)) as (client, recorder):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.post("/v1/messages", cast_to=object, body={"model": "", **body})
        error: Any = caught.value.body
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert message in error["error"]["message"]
        assert recorder.calls == 0


async def test_other_errors_have_their_status(tokenizer: Tokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok")
    ask: Any = {"model": "", "max_tokens": 9, "messages": [USER]}
    async with agent_of(session, CallLimits(calls=1)) as (client, recorder):
        stranger = client.with_options(api_key="sk-other")
        with pytest.raises(anthropic.AuthenticationError, match="belongs to no current agent run"):
            await stranger.messages.create(**ask)
        key = client.api_key
        bearer = AsyncAnthropic(base_url=client.base_url, api_key=None, auth_token=key)
        async with bearer:
            [model] = [model async for model in bearer.models.list()]
            assert (model.id, model.type) == ("policy", "model")
        with pytest.raises(anthropic.NotFoundError, match="POST /v1/messages/batches"):
            await client.messages.batches.create(requests=[])
        await client.messages.create(**ask)
        with pytest.raises(anthropic.BadRequestError, match="ask for 1 answers"):
            await client.messages.create(**ask)
        assert recorder.over == "max_calls"
        recorder.limits = CallLimits()
        session.fault = "a slot holds 512"
        with pytest.raises(anthropic.InternalServerError, match="a slot holds 512"):
            await client.messages.create(**ask)
        with pytest.raises(anthropic.InternalServerError, match="a slot holds 512"):
            await client.messages.create(**ask, stream=True)
    assert len(session.asked) == 1  # and nothing was tried again


@pytest.mark.parametrize("template", [TEMPLATE, "{% for m in messages %}{{ m.content }}{% endfor %}"])
async def test_a_template_that_hides_tools_is_warned_of_once(tmp_path: Path, template: str) -> None:
    session = FakeSession(tokenizer_with(template, tmp_path), "thin", "ok", "abc")
    ask: Any = {"model": "", "max_tokens": 9, "messages": [USER]}
    with capture_logs() as logs:
        async with agent_of(session) as (client, _):
            await client.messages.create(**ask)
            assert not logs
            await client.messages.create(**ask, tools=[ADD])
            await client.messages.create(**ask, tools=[ADD])
    expected = ["the policy does not see the tools of agents: its chat template does not show them"]
    assert [line["event"] for line in logs] == ([] if template == TEMPLATE else expected)


@pytest.mark.slow
def test_the_example_calls_its_tool(tmp_path: Path) -> None:
    """The policy of the example copies what its tool returned, so only a tool that was called is rewarded."""
    example, out = Path(__file__).parents[2] / "examples" / "agent" / "tools.yaml", tmp_path / "out"
    sandbox = "unsafe" if sandbox_problem() else "bubblewrap"
    output_of("run", example, f"out={out}", f"sandbox={sandbox}", cwd=example.parents[2])
    assert json.loads((out / "summary.json").read_text())["ledger"]["failed"] == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["reward"] for line in lines) > 0
    assert all(line["reward/turns"] > 2 and line["reward/chats"] == 1 for line in lines if "ledger" in line)
