"""Agents by endpoint: OpenAI's own client against it, and runs of agents that end as trajectories."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import openai
import psutil
import pytest
from anyio.abc import SocketStream
from openai import AsyncOpenAI

from agent_session import CALL, TEMPLATE, FakeSession, check_exact, openai_agent, tokenizer_with
from bus_testing import until
from kernel_setup import write_run
from patience import patience
from processes import sleepers
from stretto import Context
from stretto.agents.endpoint import Endpoint
from stretto.agents.recorder import CallLimits, CallRecorder
from stretto.assembly.compose import compose
from stretto.bus.server import NatsServer
from stretto.models.tokenizer import ByteTokenizer
from stretto.tokenizer import Tokenizer as PolicyTokenizer
from stretto.user_code.sandbox import sandbox_problem
from stretto.workflow import Prompt, Score, Session, Trajectory
from stretto_agent import AgentConfig, check
from stretto_agent.workflow import AgentError, AgentWorkflow

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return tokenizer_with(TEMPLATE, tmp_path_factory.mktemp("tokenizer"))


USER: Any = {"role": "user", "content": "abc ok?"}


async def test_a_chat_goes_on_token_by_token(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok", "abc")
    async with openai_agent(session) as (client, recorder):
        first = await client.chat.completions.create(
            model="gpt-9", messages=[USER], temperature=0.1, max_completion_tokens=40
        )
        [choice] = first.choices
        assert (choice.message.content, choice.finish_reason) == ("thin ok", "stop")
        prompt, answer = session.asked[0]
        assert first.usage
        assert first.usage.prompt_tokens == len(prompt)
        assert first.usage.completion_tokens == len(answer)
        parts: Any = {"role": "user", "content": [{"type": "text", "text": "and?"}]}
        messages = [USER, cast(Any, choice.message), parts]
        second = await client.chat.completions.create(model="gpt-9", messages=messages, logprobs=True)
        assert second.choices[0].logprobs
        assert second.choices[0].logprobs.content
        assert "".join(each.token for each in second.choices[0].logprobs.content) == "abc<|im_end|>"
        assert [each.logprob for each in second.choices[0].logprobs.content] == [-1, -2]
    check_exact(session, recorder)
    [trajectory] = recorder.trajectories(Score(0.5, {"correct": 1.0}))
    assert trajectory.score.reward == 0.5
    expected = {"correct": 1.0, "calls": 2.0, "chats": 1.0, "turns": 2.0, "splits": 0.0}
    assert trajectory.score.metrics == expected
    assert [sampling.max_tokens for sampling in session.samplings] == [40, 400]
    assert session.samplings[0].temperature == 1.0  # the run's, whatever an agent asks for
    assert session.conversation_ids == ["a0c1", "a0c1"]


async def test_rewritten_histories_and_calls_at_once_begin_new_chats(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer)
    async with openai_agent(session) as (client, recorder):
        create = client.chat.completions.create
        both: list[Any] = []

        async def ask() -> None:
            both.append(await create(model="", messages=[USER]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
        said = both[0].choices[0].message.content
        await create(model="", messages=[USER, {"role": "assistant", "content": f"{said}!"}, USER])
        several = await create(model="", messages=[USER], n=3)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
    check_exact(session, recorder)
    assert session.conversation_ids == [f"a0c{number}" for number in range(1, 7)]
    assert {each.score.metrics["chats"] for each in recorder.trajectories(Score(0.0))} == {6.0}


async def test_calls_of_tools_make_the_round(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, f"ok {CALL}{CALL}", "abc", f"<think>{CALL}</think>thin", CALL)
    async with openai_agent(session) as (client, recorder):
        messages: list[Any] = [USER]
        create = client.chat.completions.create
        first = await create(model="", messages=messages, tools=[ADD])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "ok "
        assert message.tool_calls
        assert [call.id for call in message.tool_calls] == ["call00001", "call00002"]
        call = message.tool_calls[0]
        assert call.type == "function"
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1, "b": [2, 3]}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "6"}]
        second = await create(model="", messages=messages, tools=[ADD], tool_choice="none")
        assert second.choices[0].message.content == "abc"
        # No call while it thinks, and none that was not looked for.
        messages += [second.choices[0].message, USER]
        third = await create(model="", messages=messages, tools=[ADD])
        assert third.choices[0].message.tool_calls is None
        fourth = await create(model="", messages=[USER])
        assert fourth.choices[0].message.content == CALL
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1", "a0c1", "a0c1", "a0c2"]
    chat = recorder.trajectories(Score(0.0))[0]
    assert "<|im_start|>tool\n6<|im_end|>" in tokenizer.decode(chat.tokens, special=True)


async def test_a_call_that_cannot_be_read_is_text(tokenizer: PolicyTokenizer) -> None:
    broken = CALL.replace("}\n<", "\n<")
    session = FakeSession(tokenizer, broken, broken)
    async with openai_agent(session) as (client, _):
        whole = await client.chat.completions.create(model="", messages=[USER], tools=[ADD])
        assert whole.choices[0].message.content == broken
        assert not whole.choices[0].message.tool_calls
        stream = await client.chat.completions.create(model="", messages=[USER], tools=[ADD], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == broken


async def test_a_stream_begins_with_the_first_token(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, f"é ok 漢{CALL}", "thin")
    session.go_on = anyio.Event()
    async with openai_agent(session) as (client, recorder):
        stream = await client.chat.completions.create(
            model="", messages=[USER], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        opening = await anext(stream)  # the policy has not gone on yet
        assert opening.choices[0].delta.role == "assistant"
        session.go_on.set()
        chunks = [chunk async for chunk in stream]
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(piece or "" for piece in pieces) == "é ok 漢"
        assert [piece for piece in pieces if piece][:2] == ["é", " "]  # whole characters only
        calls = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
        assert [(call.index, call.id) for call in calls] == [(0, "call00001")]
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage
        assert chunks[-1].usage.completion_tokens == len(session.asked[0][1])
        # What was pieced together from a stream continues as well.
        assert calls[0].function
        function = {"name": calls[0].function.name, "arguments": calls[0].function.arguments}
        call: Any = {"id": calls[0].id, "type": "function", "function": function}
        answer: Any = {"role": "assistant", "content": "é ok 漢", "tool_calls": [call]}
        told: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "6"}
        await client.chat.completions.create(model="", messages=[USER, answer, told], tools=[ADD])
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1", "a0c1"]


async def test_stop_texts_end_an_answer_and_are_not_shown(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "abc STOP ok", "abc STOP ok", "abc ST")
    async with openai_agent(session) as (client, recorder):
        whole = await client.chat.completions.create(model="", messages=[USER], stop="STOP")
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("abc ", "stop")
        for expected in ("abc ", "abc ST"):
            stream = await client.chat.completions.create(
                model="", messages=[USER], stop=["STOP", "never"], stream=True
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == expected
    check_exact(session, recorder)


async def test_completions_of_texts_and_of_ids(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin Observation: no", "ok", "abc", "abc", "thin")
    async with openai_agent(session) as (client, recorder):
        create = client.completions.create
        first = await create(model="", prompt="abc", stop="Observation:", max_tokens=30)
        assert first.choices[0].text == "thin "
        # As agents that write their prompts continue: the stop text is put back.
        prompt = "abc" + first.choices[0].text + "Observation: 42\n"
        second = await create(model="", prompt=prompt)
        assert second.choices[0].text == "ok"
        third = await create(model="", prompt=f"{prompt}ok and?", logprobs=0)
        assert third.choices[0].logprobs
        assert third.choices[0].logprobs.token_logprobs == [-1, -2]
        ids = await create(model="", prompt=[5, 6, 7])
        assert ids.choices[0].text == "abc"
        assert session.asked[-1][0] == [5, 6, 7]
        stream = await create(model="", prompt="ok", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "thin"
        pair = await create(model="", prompt=["a", "b"], n=2)
        assert [choice.index for choice in pair.choices] == [0, 1, 2, 3]
    check_exact(session, recorder)
    assert session.conversation_ids[:5] == ["a0c1", "a0c1", "a0c1", "a0c2", "a0c3"]


async def test_responses_go_on_by_id_and_by_items(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, f"ok {CALL}", "abc", "thin")
    async with openai_agent(session) as (client, recorder):
        create = client.responses.create
        first = await create(model="", input="abc ok?", tools=[FLAT])
        text, call = first.output
        assert text.type == "message"
        assert call.type == "function_call"
        assert first.output_text == "ok "
        assert json.loads(call.arguments) == {"a": 1, "b": [2, 3]}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "6"}
        second = await create(model="", input=[result], previous_response_id=first.id, tools=[FLAT])
        assert (second.output_text, second.status) == ("abc", "completed")
        assert second.usage
        assert second.usage.output_tokens == 2
        items: Any = [USER, *first.output, result, *second.output, {"role": "user", "content": "and?"}]
        third = await create(model="", input=items, tools=[FLAT])
        assert third.output_text == "thin"
        cut = await create(model="", input="abc", instructions="Be brief.", max_output_tokens=1)
        assert cut.status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="no response 'resp_1'"):
            await create(model="", input="abc", previous_response_id="resp_1")
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1", "a0c1", "a0c1", "a0c2"]
    prompt = tokenizer.decode(np.asarray(session.asked[-1][0], np.int32), special=True)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")


async def test_responses_are_streamed_as_events(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, f"abc {CALL}", "ok")
    async with openai_agent(session) as (client, recorder):
        async with client.responses.stream(model="", input="abc ok?", tools=[FLAT]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.done") == 2
        assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(
            range(len(events))
        )
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "abc "
        assert len(deltas) > 1
        assert final.output_text == "abc "
        call = final.output[1]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "6"}
        await client.responses.create(
            model="", input=[result], previous_response_id=final.id, tools=[FLAT], stream=False
        )
    check_exact(session, recorder)
    assert session.conversation_ids == ["a0c1", "a0c1"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"messages": []}, "length >= 1", "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "invalid enum value 'robot'", "messages[0].role"),
        ({"messages": [USER], "n": 0}, "n: expected", "n"),
        ({"messages": [USER], "max_tokens": "9"}, "max_tokens: expected", "max_tokens"),
        ({"messages": [USER], "stop": ""}, "empty text", "stop"),
        ({"messages": [USER], "tools": [{"type": "web"}]}, "only functions", "tools[0].type"),
        ({"messages": [USER], "tools": [ADD], "tool_choice": "required"}, "cannot be forced", "tool_choice"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "format", "response_format"),
        ({"messages": [USER], "top_logprobs": 2}, "logprobs of sampled tokens", "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "only text and images",
            "messages[0].content",
        ),
        ({"messages": [{"role": "tool", "content": "6"}]}, "tool_call_id", "messages[0].tool_call_id"),
    ],
)
async def test_bad_requests_are_refused_in_openais_form(
    tokenizer: PolicyTokenizer, body: Any, message: str, param: str
) -> None:
    async with openai_agent(FakeSession(tokenizer)) as (client, recorder):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", cast_to=object, body={"model": "", **body})
        error: Any = caught.value.body
        assert message in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert recorder.calls == 0


async def test_other_errors_have_their_status(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer)
    async with openai_agent(session) as (client, recorder):
        stranger = client.with_options(api_key="sk-other")
        with pytest.raises(openai.AuthenticationError, match="belongs to no current agent run"):
            await stranger.chat.completions.create(model="", messages=[USER])
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings"):
            await client.embeddings.create(model="", input="abc")
        assert [model.id async for model in client.models.list()] == ["policy"]
        session.fault = "a slot holds 512"
        with pytest.raises(openai.InternalServerError, match="a slot holds 512"):
            await client.chat.completions.create(model="", messages=[USER])
        assert str(recorder.fault) == "a slot holds 512"
        stream = client.chat.completions.create(model="", messages=[USER], stream=True)
        with pytest.raises(openai.InternalServerError, match="a slot holds 512"):  # not a broken stream
            await stream
    assert not session.asked  # and nothing was tried again


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "the body is not JSON: 'utf-8' codec"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "the body is not JSON"),
        (b'{"tools": [{"type": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 5_000_000 + b'"}]}', "a text of 50000"),
    ],
)
async def test_an_unreadable_body_is_refused(tokenizer: PolicyTokenizer, body: bytes, message: str) -> None:
    session = FakeSession(tokenizer)
    async with openai_agent(session) as (client, _):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            await client.post("/chat/completions", cast_to=object, content=body)
    assert not session.asked


async def test_a_model_without_a_template_completes_texts_only(tmp_path: Path) -> None:
    session = FakeSession(tokenizer_with(None, tmp_path), "a", "b")
    async with openai_agent(session) as (client, _):
        assert (await client.completions.create(model="", prompt="1+1=")).choices[0].text == "a"
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            await client.chat.completions.create(model="", messages=[USER])


async def test_limits_are_said_and_the_agent_goes_on_to_its_score(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin thin thin", "abc")
    async with openai_agent(session, CallLimits(calls=4, tokens=5, context=40)) as (client, recorder):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="may have 40 tokens"):
            await create(model="", messages=[{"role": "user", "content": "x" * 40}])
        assert recorder.over == "context_length_exceeded"
        cut = await create(model="", messages=[USER])
        assert cut.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="may sample 5 tokens") as caught:
            await create(model="", messages=[USER])
        assert caught.value.code == "max_total_tokens"
        with pytest.raises(openai.BadRequestError, match="ask for 4 answers"):
            await create(model="", messages=[USER], n=3)
    [trajectory] = recorder.trajectories(Score(0.0))
    assert trajectory.tokens[trajectory.loss_mask].tolist() == session.asked[0][1]


async def test_a_closed_recorder_ends_its_calls(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok")
    session.go_on = anyio.Event()
    endpoint = Endpoint()
    await endpoint.start()
    recorder = CallRecorder(cast("Session", session), "a0")
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key="none yet")
    async with anyio.create_task_group() as tasks:
        async with endpoint.serve(recorder) as key:
            client.api_key = key

            async def ask() -> None:
                with pytest.raises(openai.BadRequestError, match="the agent run is over"):
                    await client.chat.completions.create(model="", messages=[USER])

            tasks.start_soon(ask)
            await until(lambda: session.asked)
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()
    await client.close()
    await endpoint.stop()
    assert recorder.trajectories(Score(0.0)) == []


async def test_a_client_that_hangs_up_ends_its_call(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok", "abc")
    session.go_on = anyio.Event()
    async with openai_agent(session) as (client, recorder):
        impatient = client.with_options(timeout=patience(0.2), max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await impatient.chat.completions.create(model="", messages=[USER])
        with anyio.fail_after(patience()):
            await session.cancelled.wait()
        session.go_on.set()
        await client.chat.completions.create(model="", messages=[USER])
    assert session.conversation_ids == ["a0c1", "a0c2"]
    [trajectory] = recorder.trajectories(Score(0.0))
    assert trajectory.tokens[trajectory.loss_mask].tolist() == session.asked[1][1]


async def test_without_a_model_tokens_are_bytes() -> None:
    session = FakeSession(ByteTokenizer(), "漢字")
    async with openai_agent(session) as (client, _):
        stream = await client.chat.completions.create(model="", messages=[USER], stream=True)
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert [piece for piece in pieces if piece] == ["漢", "字"]


# ------------------------------------------------------------------------------------ runs of agents

CHAT = """curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
-H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
-d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$STRETTO_PROMPT\\"}]}" > /dev/null"""
SANDBOXED = pytest.mark.skipif(bool(sandbox_problem()), reason="bubblewrap cannot start")


async def run_agent(session: FakeSession, sandbox: Any = "unsafe", **options: Any) -> Sequence[Trajectory]:
    config = AgentConfig(use="agent", **options)
    workflow = AgentWorkflow(config, Context(run="r", name="r", seed=1, sandbox=sandbox))
    row = {"prompt": "1+1=", "answer": "2"}
    try:
        return await workflow.run(Prompt(row, np.ones(1, np.int32)), cast("Session", session))
    finally:
        await workflow.endpoint.stop()


@pytest.mark.parametrize("sandbox", ["unsafe", pytest.param("bubblewrap", marks=SANDBOXED)])
async def test_a_command_is_an_agent(
    tokenizer: PolicyTokenizer, sandbox: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "words").write_text("beside")
    session = FakeSession(tokenizer, *["thin"] * 4)
    session.group_size = 2
    command = f'{CHAT}; {CHAT}; cat words; echo " $SECRET $MINE"; cat'
    options: Any = {"command": command, "folder": str(tmp_path), "env": {"MINE": "m"}}
    trajectories = await run_agent(session, sandbox, **options)
    assert len(trajectories) == 4  # two chats of each run: neither continues with the other
    answers, columns = session.scored
    assert answers == ['beside  m\n{"prompt":"1+1=","answer":"2"}'] * 2
    assert columns == {
        "exit_status": [0, 0],
        "prompt_opened": ["", ""],
        "messages": [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "thin"}]] * 2,
    }


async def test_an_agent_that_prints_nothing_is_scored_by_the_last_answer(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok")
    await run_agent(session, command=["/bin/sh", "-c", CHAT])
    assert session.scored[0] == ["thin ok"]
    # What is kept begins inside a character, and the time is over inside another one.
    command = f"{CHAT}; yes 漢字 | head -c 300006; printf ' 漢\\346'; sleep 100"
    await run_agent(session, command=command, agent_timeout_s=patience(1))
    text = str(session.scored[0][0])
    assert (text[-1], len(text.encode()) // 1000, "\ufffd" in text) == ("漢", 262, False)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("echo oh >&2; exit 3", {}, "ended with status 3; the end of its standard error: oh"),
        ("exit 3", {"on_error": "score"}, "got no answer of the model and ended with status 3"),
        ("true", {}, "got no answer of the model and ended with status 0"),
        ("sleep 100", {"agent_timeout_s": patience(0.2)}, "got no answer of the model and was killed after"),
        (
            f"{CHAT}; sleep 100",
            {"on_timeout": "fail", "agent_timeout_s": patience(1)},
            "took longer than agent_timeout",
        ),
        (f"{CHAT}; printf 'caf\\351'", {}, "standard output is not UTF-8: .* byte 0xe9 in position 3"),
        (["/no/such/agent"], {}, "ended with status 127; the end of its standard error: .*/no/such/agent"),
    ],
)
async def test_a_run_that_failed_says_why(
    tokenizer: PolicyTokenizer, command: Any, options: Any, message: str
) -> None:
    with pytest.raises(AgentError, match=message):
        await run_agent(FakeSession(tokenizer), command=command, **options)


async def test_a_call_that_failed_is_the_reason(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer)
    session.fault = "a slot holds 512"
    with pytest.raises(AgentError, match="a call of the model failed: a slot holds 512"):
        await run_agent(session, command=CHAT)


async def test_what_there_is_is_scored(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer)
    statuses: list[int | None] = []
    each: list[dict[str, Any]] = [
        {"command": f"{CHAT}; sleep 100 & sleep 100", "agent_timeout_s": patience(1.5)},
        {"command": f"{CHAT}; exit 3", "on_error": "score"},
        {"command": f"{CHAT}; {CHAT} || exit 3", "max_calls": 1},  # a limit is no error
        {"command": f"{CHAT}; sleep 100 > /dev/stdout &"},  # what it leaves running does not keep it
    ]
    for options in each:
        with anyio.fail_after(patience()):
            assert len(await run_agent(session, **options)) == 1
        assert session.scored[1] is not None
        statuses.append(session.scored[1]["exit_status"][0])
    assert statuses == [None, 3, 3, 0]


# Says which of the ports in argv accept a connection; the endpoint's own is the last.
REACH = """
import os, socket, sys

def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True

own = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
print(*[reaches(int(port)) for port in (*sys.argv[1:], own)])
"""


@SANDBOXED
@pytest.mark.parametrize(("network", "reached"), [(False, "False True"), (True, "True True")])
async def test_only_with_network_an_agent_reaches_the_bus(
    tokenizer: PolicyTokenizer, server: NatsServer, tmp_path: Path, network: bool, reached: str
) -> None:
    (tmp_path / "reach.py").write_text(REACH)
    port = server.url.rpartition(":")[2]
    session = FakeSession(tokenizer, "thin")
    command = f"{CHAT}; python reach.py {port}"
    await run_agent(session, "bubblewrap", command=command, folder=str(tmp_path), network=network)
    assert session.scored[0] == [reached]


# Calls the policy, opens further connections, and stays.
HOLD = """
import os, socket, subprocess, sys, time
port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
subprocess.run(["sh", "-c", sys.argv[1]], check=True)
subprocess.Popen(["sleep", "100.25"])
time.sleep(100)
"""


@SANDBOXED
async def test_many_killed_agents_leave_no_sockets(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    session = FakeSession(tokenizer)
    session.group_size = 12
    files = psutil.Process().num_fds()
    options = {"command": ["python", "hold.py", CHAT], "folder": str(tmp_path)}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run_agent(session, "bubblewrap", **options))
        await until(lambda: len(session.asked) >= 12)
        assert psutil.Process().num_fds() > files + 12 * 20
        tasks.cancel_scope.cancel()
    await until(lambda: psutil.Process().num_fds() <= files and not sleepers("100.25"))


async def test_one_agent_cannot_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.agents.endpoint._MAX_CONNECTIONS", 2)
    async with socket_of_endpoint() as (connect, _):
        first, second, third = [await connect() for _ in range(3)]
        assert await answers(first)
        assert await answers(second)
        with anyio.move_on_after(patience(0.3)):
            assert not await answers(third)
        await first.aclose()
        assert await answers(third)


async def test_a_connection_that_sends_no_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.agents.endpoint._IDLE_S", 0.2)
    async with socket_of_endpoint() as (connect, _):
        silent, halting = await connect(), await connect()
        await halting.send(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n")
        for client in (silent, halting):
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await client.receive()


async def test_strangers_at_the_port_take_few_files_and_stop_no_agent(tokenizer: PolicyTokenizer) -> None:
    session = FakeSession(tokenizer, "thin ok", "abc", "abc")
    async with openai_agent(session) as (client, _), AsyncExitStack() as clients:
        assert (await client.chat.completions.create(model="m", messages=[USER])).choices
        port = client.base_url.port
        assert port is not None
        strangers: list[SocketStream] = []
        for _ in range(200):
            strangers.append(await clients.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)))
            await strangers[-1].send(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n")
        with anyio.fail_after(patience()):
            for stranger in strangers[:100]:
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await stranger.receive()
        assert (await client.chat.completions.create(model="m", messages=[USER])).choices


async def test_the_end_of_a_socket_closes_its_connections() -> None:
    async with socket_of_endpoint() as (connect, serving):
        client = await connect()
        assert await answers(client)
        serving.cancel()
        assert not await answers(client)


@asynccontextmanager
async def socket_of_endpoint() -> AsyncGenerator[
    tuple[Callable[[], Awaitable[SocketStream]], asyncio.Task[None]]
]:
    """An endpoint that serves a socket: a function that connects to it, and the task that serves it."""
    endpoint = Endpoint()
    with socket.create_server(("127.0.0.1", 0)) as listener, anyio.fail_after(patience()):
        listener.setblocking(False)
        serving = asyncio.create_task(endpoint.serve_socket(listener))
        async with AsyncExitStack() as clients:

            async def connect() -> SocketStream:
                client = await anyio.connect_tcp(*listener.getsockname())
                return await clients.enter_async_context(client)

            yield connect, serving
        serving.cancel()
        await asyncio.wait([serving])
    await endpoint.stop()


async def answers(connection: SocketStream) -> bool:
    try:
        await connection.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        return (await connection.receive()).startswith(b"HTTP/1.1 401")
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return False


FUNCTION = """\
import asyncio
from helper import TOOLS, use
from openai import AsyncOpenAI

async def agent(prompt, n, client_of=AsyncOpenAI):
    print("to standard error")
    client = client_of()
    messages = [{"role": "user", "content": prompt}]
    for turn in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages += [message, {"role": "tool", "tool_call_id": f"call0000{turn}", "content": use(n)}]
    return message.content
"""
HELPER = """\
TOOLS = [{"type": "function", "function": {"name": "half", "parameters": {"type": "object"}}}]

def use(n):
    return str(n / 2)
"""


def test_a_function_trains(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FUNCTION)
    (tmp_path / "helper.py").write_text(HELPER)
    run = start(
        *("workflow=agent", f"workflow.function={tmp_path}/agent.py:agent"),
        f"sandbox={'unsafe' if sandbox_problem() else 'bubblewrap'}",
        *("model=null", "inference.vocab_size=200", "algorithm.group_size=2"),
        *("queue.batch_size=1", "queue.max_staleness=0", "steps=2"),
        out="function",
    )
    run.assert_completed(2, batch_size=1, bound=0)
    for line in run.metrics():
        assert line["reward/turns"] == line["reward/calls"] == 3
        assert line["reward/chats"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected either `command` or `function`"),
        ({"command": "true", "function": "a:b"}, "expected either `command` or `function`"),
        ({"command": "true", "agent_timeout_s": patience(600)}, "must be less than timeout_s=600"),
    ],
)
def test_what_cannot_run_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentConfig(use="agent", **options)


def problems_of(folder: Path, **options: Any) -> list[tuple[str, str, str]]:
    """What the check of the workflow says, as severity, path and message."""
    workflow = {"use": "agent", "command": "true", **options.pop("workflow", {})}
    config = compose(write_run(folder, steps=1, workflow=workflow, **options)).config
    assert isinstance(config.workflow, AgentConfig)
    return [(each.severity, each.path, each.message) for each in check(config.workflow, config)]


def test_an_agent_without_network_needs_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text(
        '#!/bin/sh\ncase "$*" in *--unshare-net*)\n'
        "echo 'bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted' >&2; exit 1;; esac\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    [(severity, path, message)] = problems_of(tmp_path)
    assert (severity, path) == ("environment", "sandbox")
    assert message.startswith("bubblewrap cannot start: bwrap: loopback: Failed RTM_NEWADDR")
    assert "write `workflow.network: true`" in message
    [(severity, path, message)] = problems_of(tmp_path, workflow={"network": True})
    assert (severity, path) == ("warning", "workflow.network")
    assert "its loopback included" in message


def test_a_chat_template_that_shows_no_tools_is_warned_of(tmp_path: Path) -> None:
    def warnings_of(template: str | None) -> list[str]:
        model = tmp_path / str(hash(template))
        tokenizer_with(template, model)
        problems = problems_of(tmp_path, sandbox="unsafe", model=str(model))
        return [message for _, path, message in problems if path == "model"]

    assert warnings_of(TEMPLATE) == []
    assert warnings_of(None) == []  # the agent may ask for completions of text
    [warning] = warnings_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "will not see what the agent sends as `tools`" in warning
