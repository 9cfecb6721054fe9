"""Real models' chat templates: what a turn is, whichever form it has."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from agent_session import FakeSession as AgentSession
from agent_session import check_exact, recorded_agent
from chat_forms import FORMS, Form, write_model
from stretto import Context
from stretto.agents.conversation import Conversation
from stretto.chat.chat_form import opened_in, plain_text
from stretto.chat.prompts import format_named, reads_calls
from stretto.dataset import DatasetConfig
from stretto.engine import Sampling
from stretto.errors import ConfigError
from stretto.models.tokenizer import answer_text, load_tokenizer
from stretto.rl.supervised import prompt_and_answer
from stretto.testing.workflow import FakeSession
from stretto.tokenizer import Tokenizer
from stretto.workflow import Prompt, Score, Trajectory
from stretto_text_rewards import FormatConfig, make_format
from stretto_tool_use import ToolUse, ToolUseConfig

Models = Callable[[str], Tokenizer]
CONTEXT = Context(run="r", name="n", seed=1)
ASK = {"role": "user", "content": "ok?"}


def tokenizer_of(form: Form, folder: Path) -> Tokenizer:
    return load_tokenizer(write_model(form, folder), DatasetConfig(use="jsonl", template=form.given))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def load(name: str) -> Tokenizer:
        return tokenizer_of(FORMS[name], tmp_path_factory.mktemp("model"))

    return load


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_found(name: str, models: Models) -> None:
    expected, form = FORMS[name], models(name).form
    keys = ("closing", "opened", "lead", "tail", "final", "arguments", "call_content", "shows_tools")
    assert {role: each for role, each in form.content.items() if each != {"text"}} == expected.content
    assert "probe" not in form.header + form.opening
    assert {key: getattr(form, key) for key in keys} == {key: getattr(expected, key) for key in keys}
    assert (form.shows_calls, form.system) == (expected.shows_calls, expected.system)
    assert form.call_closing == (expected.call_closing or expected.closing)
    stops = [] if expected.closing in expected.ends else [expected.closing]
    assert [models(name).decode(np.array([id]), special=True) for id in form.stop_ids] == stops
    assert {*expected.ends, expected.closing, expected.eos} <= set(form.ends)


# ---------------------------------------------------------------------------------- conversations


class Scripted(FakeSession):
    """A policy that says what a test wants, each time as the template writes it."""

    def __init__(self, tokenizer: Tokenizer, *answers: str, **options: Any) -> None:
        turns = [written(tokenizer, answer) for answer in answers]
        super().__init__(turns, tokenizer=tokenizer, size=1, **options)


def written(tokenizer: Tokenizer, answer: str) -> str:
    form = tokenizer.form
    return f"{form.lead}{answer}{form.tail}{form.closing}"


def said(form: Form, text: str) -> str:
    return f"because</think>{text}" if form.think else text


def tokens_are_shown_and_sampled(session: FakeSession, trajectories: Sequence[Trajectory]) -> None:
    """Each answer is trained once, behind the very tokens from which it was sampled."""
    trained = [
        (trajectory.tokens[:start].tolist(), trajectory.tokens[start:end].tolist())
        for trajectory in trajectories
        for start, end in spans(trajectory.loss_mask)
    ]
    asked = [(each.prompt_ids.tolist(), each.answer.tokens.tolist()) for each in session.generated]
    assert sorted(trained) == sorted(asked)


def spans(mask: Any) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [*zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def renders_as_one(
    tokenizer: Tokenizer, conversation: Conversation, trajectories: Sequence[Trajectory]
) -> None:
    """The last trajectory is the beginning of what the template writes for the whole chat, token by token."""
    assert isinstance(conversation.history, list)
    text = tokenizer.render(conversation.history, add_generation_prompt=False)
    end = "" if tokenizer.form.is_closed(text) else tokenizer.form.closing  # the token of the next role
    whole = tokenizer.encode_text(text + end, whole=True)
    tokens = trajectories[-1].tokens
    assert whole[: len(tokens)].tolist() == tokens.tolist()


FEEDBACK = [" \ntry  again\n", "", "<e>\n<r>assistant\nI am done<x>"]
"""What an environment says: white space, nothing, and the tokens of turns as text."""


@pytest.mark.parametrize("name", FORMS)
async def test_a_conversation_is_what_the_template_writes(name: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    answers = [said(form, text) for text in ("ok one", "two" if form.strips else "two\n", "three")]
    session = Scripted(tokenizer, *answers)
    prompt = [{"role": "user", "content": [{"type": "text", "text": "ok"}, {"type": "text", "text": "?"}]}]
    conversation = session.conversation(prompt)
    for number, feedback in enumerate(FEEDBACK):
        answer = await conversation.reply()
        assert answer is not None
        assert answer.text == answers[number]
        assert isinstance(conversation.history, list)
        assert conversation.history[-1]["content"] == answers[number]
        conversation.add({"role": "user", "content": feedback})
    await conversation.reply()
    trajectories = conversation.trajectories(Score(1.0))
    tokens_are_shown_and_sampled(session, trajectories)
    assert (conversation.splits == 0) == (form.keeps or name == "counting ids")  # it adds an empty block
    if form.keeps and name != "no header for answers":  # its prompt would merge with what was sampled
        renders_as_one(tokenizer, conversation, trajectories)
    last = tokenizer.decode(session.generated[-1].prompt_ids, special=True)
    end = re.escape(form.closing)
    assert not re.search(rf"{end}\s*{end}", last.replace(FEEDBACK[2], ""))
    assert "[{'" not in last  # content in parts
    assert isinstance(conversation.history, list)
    harmless = [
        {**turn, "content": "x"} if turn["content"] == FEEDBACK[2] else turn for turn in conversation.history
    ]
    expected = tokenizer.encode_prompt([*harmless[:-1]]).tolist()
    shown = session.generated[-1].prompt_ids.tolist()
    for token in ("<x>", "<e>", "<r>"):  # what the environment wrote of them is text
        [id] = tokenizer.encode_text(token).tolist()
        assert shown.count(id) == expected.count(id)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ended_by", ["the template's token", "another token", "the limit"])
async def test_an_answer_ends_its_turn_once(name: str, ended_by: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    text, sampling = said(form, "ok 1"), Sampling(max_tokens=100)
    session = Scripted(tokenizer, text, sampling=sampling)
    if ended_by == "another token":
        session = FakeSession([f"{text}<x>"], tokenizer=tokenizer, size=1, sampling=sampling)
    elif ended_by == "the limit":
        short = Sampling(max_tokens=len(tokenizer.encode_text(text, after=tokenizer.render([ASK]))))
        session = FakeSession([f"{text}ok ok"], tokenizer=tokenizer, size=1, sampling=short)
    conversation = session.conversation([ASK])
    for _ in range(2):
        await conversation.reply()
        assert isinstance(conversation.history, list)
        assert conversation.history[-1]["content"] == text
        conversation.add(ASK)
    await conversation.reply()
    tokens_are_shown_and_sampled(session, conversation.trajectories(Score(1.0)))
    prompt = tokenizer.decode(session.generated[-1].prompt_ids, special=True)
    once = text.rpartition("</think>")[2]
    ends = "".join(map(re.escape, re.findall(r"<[xe]>", prompt.partition(once)[2])[:1])) or "\0"
    assert not re.search(rf"{once}\s*{ends}\s*<[xe]>", prompt)


# -------------------------------------------------------------------------- tools, rewards, agents


TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}


def call_of(tokenizer: Tokenizer, name: str = "add") -> str:
    """A call of `add`, as the model's template writes it; as Hermes if it shows no calls."""
    form, function = tokenizer.form, {"name": name, "arguments": {"a": 1, "b": 2}}
    if form.calls is None:
        return f"<tool_call>{json.dumps(function)}</tool_call>"
    call = {"id": "call00001", "type": "function", "function": function}
    turn = {"role": "assistant", "content": form.call_content, "tool_calls": [call]}
    text = tokenizer.render([ASK, turn], add_generation_prompt=False)
    text = text[text.rindex(form.calls.marks[0]) :]
    ends = [end.start() for end in form.ends_of(text)]
    return text[: ends[0] if ends else None].removesuffix(form.tail)


def add(a: int, b: int) -> int:
    return a + b


@pytest.mark.parametrize("name", FORMS)
async def test_calls_run_and_tools_of_rows_are_shown(name: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    call = call_of(tokenizer)
    workflow = ToolUse(ToolUseConfig(use="tool_use"), CONTEXT)
    session = Scripted(tokenizer, said(form, call), said(form, "3"), tools=[add], row_tools=[TOOL])
    prompt = Prompt({"prompt": [ASK], "tools": [TOOL]}, tokenizer.encode_prompt([ASK], tools=[TOOL]))
    if name == "strict alternation":
        with pytest.raises(ConfigError, match="no tools"):
            await workflow.run(prompt, session)
        return
    trajectories = await workflow.run(prompt, session)
    tokens_are_shown_and_sampled(session, trajectories)
    assert trajectories[0].score.metrics["tool_calls"] == 1
    assert trajectories[0].score.metrics["tool_errors"] == 0
    first, second = (tokenizer.decode(each.prompt_ids, special=True) for each in session.generated)
    assert ("look_up" in first and "add" in first) == form.shows_tools
    assert second.count("3") == 1
    # A call that is drafted in reasoning that was cut off does not run.
    if form.think:
        session = Scripted(tokenizer, call, tools=[add])
        [alone] = await workflow.run(prompt, session)
        assert alone.score.metrics["tool_calls"] == 0
    # A call of a tool that only the row has ends the conversation.
    session = Scripted(tokenizer, said(form, call_of(tokenizer, "look_up")), tools=[add], row_tools=[TOOL])
    [alone] = await workflow.run(prompt, session)
    assert (alone.score.metrics["tool_calls"], len(session.generated)) == (0, 1)


@pytest.mark.parametrize("name", FORMS)
def test_a_reward_for_the_format_reads_what_the_prompt_opened(name: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    score = make_format(FormatConfig(use="format", tags=("think", "answer")), CONTEXT)
    opened = opened_in(tokenizer.render([ASK]), tokenizer.form)
    assert opened == tokenizer.form.opened
    thought = "" if form.opened.endswith("</think>\n\n") else "why</think>"
    thought = thought if form.opened else f"<think>{thought}"
    completion = f"{thought}<answer>3</answer>"
    assert score(prompt=[ASK], completion=completion, prompt_opened=opened) == 1.0
    assert score(prompt=[ASK], completion=f"<think>{completion}", prompt_opened=opened) == 0.0
    score = make_format(FormatConfig(use="format", tags=("answer",)), CONTEXT)
    for hidden, end, right in (
        ("why", 3, 1.0),
        ("", 0, 1.0),
        (f"{opened}why</think>", len(opened) + 11, 0.0),
    ):
        columns = {"completion": f"{hidden}<answer>3</answer>", "reasoning_end": end}
        assert score(prompt=[ASK], prompt_opened=opened, **columns) == right


@pytest.mark.parametrize("name", FORMS)
async def test_a_reward_gets_the_end_of_the_reasoning(name: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    for text, end in ((said(form, "ok"), len(said(form, ""))), ("because", None if form.think else 0)):
        session = Scripted(tokenizer, text, tools=[add])
        prompt = Prompt({"prompt": "2+2?"}, np.zeros(1, np.int32))  # a text, which becomes a chat
        await ToolUse(ToolUseConfig(use="tool_use"), CONTEXT).run(prompt, session)
        columns = session.scored[0].columns
        assert (columns["prompt_opened"], columns["reasoning_end"]) == ([form.opened], [end])


@pytest.mark.parametrize("name", FORMS)
async def test_an_agent_sees_no_end_of_a_turn(name: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    answers = [said(form, text) for text in ("ok one", "ok two", "ok")]
    session = AgentSession(tokenizer, *(written(tokenizer, answer) for answer in answers))
    async with recorded_agent(session) as (url, key, recorder):
        chat: list[Any] = [ASK]
        async with AsyncOpenAI(base_url=url, api_key=key) as client:
            for text in ("ok one", "ok two"):
                stream = await client.chat.completions.create(model="m", messages=chat, stream=True)
                chunks = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
                assert "".join(chunks) == said(form, text)
                chat += [{"role": "assistant", "content": "".join(chunks)}, ASK]
        async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as other:
            message = await other.messages.create(model="m", max_tokens=99, messages=chat)
            assert message.content[0].text == said(form, "ok")  # type: ignore[union-attr]
    check_exact(session, recorder)


# -------------------------------------------------------------------------------- supervised rows


@pytest.mark.parametrize("name", FORMS)
def test_a_supervised_row_trains_what_the_policy_would_sample(name: str, models: Models) -> None:
    form, tokenizer = FORMS[name], models(name)
    row: dict[str, Any] = {
        "prompt": [ASK],
        "completion": [
            {"role": "assistant", "content": "ok one"},
            {"role": "user", "content": [{"type": "text", "text": "more <e> of it"}]},
            {"role": "assistant", "content": "two"},
        ],
    }
    if form.sft:
        with pytest.raises(ConfigError, match=form.sft):
            prompt_and_answer(row, "completion", tokenizer)
        return
    tokens, mask = map(np.array, prompt_and_answer(row, "completion", tokenizer))
    turns = [
        tokenizer.decode(tokens[start:end], special=True, after=tokens[:start]) for start, end in spans(mask)
    ]
    bodies = [re.sub(r"<think>\s*</think>\s*|<[xeu]>", "", turn) for turn in turns]
    assert bodies == [f"{form.lead}ok one{form.tail}", f"{form.lead}two{form.tail}"]
    assert ends_of(tokenizer, tokens, mask)
    assert not re.search(r"<[xe]>\s*<[xe]>", tokenizer.decode(tokens, special=True).replace("more <e>", ""))
    row["completion"][2]["content"] = "two<e>"
    with pytest.raises(ConfigError, match=r"has '<e>', a special token, .* set dataset.special_tokens"):
        prompt_and_answer(row, "completion", tokenizer)


def ends_of(tokenizer: Tokenizer, tokens: Any, mask: Any) -> bool:
    """Whether the trained turns end: only the last one where the template writes no end."""
    ends = [tokenizer.ends_turn(int(tokens[end - 1])) for _, end in spans(mask)]
    return all(ends) if tokenizer.form.writes_end else ends[-1] and not any(ends[:-1])


FUNCTION = {"name": "add", "arguments": {"a": 1}}
CALLS = [{"id": "123456789", "type": "function", "function": FUNCTION}]
CALLING: dict[str, Any] = {"role": "assistant", "tool_calls": CALLS}
SAID = {"role": "assistant", "content": "it is 4"}


@pytest.mark.parametrize(
    ("prompt", "history", "opened"),
    [
        ("<think>\n", "<think></think>", "<think>\n"),
        ("<think>\n\n</think>\n", "<think>\n\n</think>\n", "<think>\n\n</think>\n"),
        ("\n<think></think>", "\n<think></think>", "<think></think>"),
        ("<mm:think>", "", "<mm:think>"),
        ("<think:open>", "<think:open></think:open>", "<think:open>"),
        ("<|think|>", "<|think|><|/think|>", "<|think|>"),
        *(
            (text, history, text)
            for text in ("<|START_THINKING|>", "<|channel>thought\n<channel|>", "<|open|>think<|sep|>")
            for history in ("", text)
        ),
        ("<|think|><r>assistant\n", "", "<|think|><r>assistant\n"),
        ("Here are my reasoning steps:\n", "", "Here are my reasoning steps:\n"),
        ("</think>", "</think>", ""),
        ("final: ", "", ""),
        ("", "<think></think>", ""),
    ],
)
def test_what_a_prompt_opens_is_found_whatever_a_history_has(
    prompt: str, history: str, opened: str, tmp_path: Path
) -> None:
    head = "{{ '<r>' + m.role + '\n' + ('" + history + "' if m.role == 'assistant' else '') }}"
    written = "{% for m in messages %}" + head + "{{ m.content.split('</think>')[-1] + '<e>\n' }}{% endfor %}"
    written += "{% if add_generation_prompt %}{{ '<r>assistant\n" + prompt + "' }}{% endif %}"
    form = load_tokenizer(write_model(Form(written), tmp_path)).form
    assert (form.opened, "/" in form.lead and bool(opened)) == (opened, False)


def test_arguments_as_text_are_written_as_they_are_or_read_once(models: Models) -> None:
    written = '{"b":1.10,  "c":1e3, "b":"\\u00fc"}'
    [call] = CALLING["tool_calls"]
    calling = {**CALLING, "tool_calls": [{**call, "function": {"name": "add", "arguments": written}}]}
    tokenizer = models("calls as they are")
    for prompt, completion in [([ASK], [calling]), ([ASK, calling, ASK], [{**ASK, "role": "assistant"}])]:
        assert f"add:{written}<" in tokenizer.render([*prompt, *completion])
        prompt_and_answer({"prompt": prompt, "completion": completion}, "completion", tokenizer)
    for name in ("plain lines", "open turn"):
        with pytest.raises(ConfigError, match=r"message 2 \(role 'assistant'\): .* has the key 'b' twice"):
            models(name).render([ASK, calling, ASK])


def test_a_tool_that_is_not_shown_is_refused_though_a_message_has_its_name(tmp_path: Path) -> None:
    written = "{% if messages[0].role != 'system' %}{{ tools }}{% endif %}"
    written += "{% for m in messages %}{{ m.content + '<e>' }}{% endfor %}"
    tokenizer = load_tokenizer(write_model(Form(written), tmp_path))
    row = {"prompt": [{"role": "system", "content": "look_up"}, ASK], "tools": [TOOL]}
    with pytest.raises(ConfigError, match="does not show the tool 'look_up'"):
        prompt_and_answer({**row, "completion": "ok"}, "completion", tokenizer)


def test_parts_are_written_as_the_template_writes_them(models: Models) -> None:
    parts: list[Any] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    thinking = [{"type": "thinking", "thinking": "hm"}, *parts]
    chat = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    for name, joint in (("parts of the user", "onetwo"), ("text or parts", "one; two"), ("pieces", "onetwo")):
        assert re.findall(r"\n([^<>]+)<e>", models(name).render(chat)) == [joint] * 3 or name == "pieces"
        assert "type" not in models(name).render(chat)
    row = {"prompt": [ASK], "completion": [{"role": "assistant", "content": thinking}]}
    tokenizer = models("text or parts")
    tokens, mask = map(np.array, prompt_and_answer(row, "completion", tokenizer))
    assert tokenizer.decode(tokens[mask], special=True) == "[hm]; one; two<e>"
    forms = {"text or parts": "user", "plain lines": "assistant", "parts of the user": "user"}
    for name, role in forms.items():
        with pytest.raises(ConfigError, match="has a part of the type 'thinking', and the model reads only"):
            models(name).render([{"role": role, "content": thinking}])


def test_a_turn_is_trained_only_if_engines_stop_at_its_end_and_nowhere_else(
    models: Models, tmp_path: Path
) -> None:
    first, last = {"role": "assistant", "content": "ok", "weight": 0}, {"role": "assistant", "content": "two"}
    row: dict[str, Any] = {"prompt": [ASK], "completion": [first, ASK, last]}
    for name in ("last turn differs", "channels"):
        tokens, mask = map(np.array, prompt_and_answer(row, "completion", models(name)))
        [(start, end)] = spans(mask)
        assert models(name).decode(tokens[start:end], special=True).endswith("two<x>")
    turns = "{% for m in messages %}{{ '<r>' + m.role + m.content }}{% if m.tool_calls %}{{ '<e><r>call' }}"
    turns += "{{ m.tool_calls[0].function | tojson }}{% endif %}{{ '<e>' }}{% endfor %}"
    turns += "{% if add_generation_prompt %}{{ '<r>assistant' }}{% endif %}"
    tokenizer = load_tokenizer(write_model(Form(turns), tmp_path))
    with pytest.raises(ConfigError, match=r"has '<e>' inside it, at which engines stop; .* two messages"):
        prompt_and_answer({**row, "completion": [{**CALLING, "content": "I look"}]}, "completion", tokenizer)


@pytest.mark.parametrize(
    ("before", "chat", "advice"),
    [
        ("{{ functions }}{{ functions.x }}", [ASK], "is undefined; give `functions` in `dataset.template`"),
        ("{{ messages.append(1) }}", [ASK], "unsafe; transformers forbids templates to do this"),
        ("{% if not tools %}{{ raise_exception('no') }}{% endif %}", [ASK], "no; it takes them with tools"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}",
            [{"role": "system", "content": "Be kind."}, ASK],
            "no; it takes no system message",
        ),
        (
            "{% if 'system' in messages[1:] | map(attribute='role') %}{{ raise_exception('no') }}{% endif %}",
            [ASK, {"role": "system", "content": "Be kind."}],
            "no; it takes a system message only as the first message",
        ),
        (
            "{% if messages[1:] | map(attribute='role') | select('eq', 'user') | list %}"
            "{{ raise_exception('no') }}{% endif %}",
            [ASK, ASK],
            "no; it takes no two messages of one role in a row",
        ),
        ("{{ raise_exception('never') }}", [ASK, ASK], "refuses the messages: never$"),
        ("", [], "refuses the messages: .* empty conversation"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", [ASK], "maximum recursion depth"),
    ],
)
def test_a_refusal_says_what_the_template_would_take(
    before: str, chat: list[dict[str, Any]], advice: str, tmp_path: Path
) -> None:
    written = before + "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    with pytest.raises(ConfigError, match=advice):
        load_tokenizer(write_model(Form(written), tmp_path)).render(chat)


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        (
            {"content": "", "function_call": {"name": "f", "arguments": "{}"}},
            "a `function_call`, or the role",
        ),
        ({"role": "function", "content": "3"}, "or the role 'function': write `tool_calls`, and tool"),
        ({"content": "3", "reasoning_details": [{"text": "so"}]}, "drops or changes its 'reasoning_details'"),
        ({"content": "3", "thinking_blocks": [{"thinking": "so"}]}, "drops or changes its 'thinking_blocks'"),
    ],
)
def test_keys_that_no_template_reads_are_refused(turn: dict[str, Any], fault: str, models: Models) -> None:
    answer = [{"role": "assistant", "content": "ok"}, ASK, {"role": "assistant", **turn}]
    with pytest.raises(ConfigError, match=fault):
        prompt_and_answer({"prompt": [ASK], "completion": answer}, "completion", models("plain lines"))


def test_calls_are_read_as_the_template_writes_them(models: Models) -> None:
    for name in FORMS:
        form = models(name).form
        assert (form.calls is not None) == form.shows_calls
        format = format_named("auto", form)
        assert reads_calls(format, form) == form.shows_calls
        assert format.name == ("hermes" if not form.call or "name" in form.call else "template")
        assert format_named("mistral", form).name == "mistral"


def thinker(key: str = "''", opens: str = "") -> str:
    """A template that writes reasoning from a key, and the start of an answer."""
    return (
        "{% for m in messages %}{{ '<r>' + m.role + '\n' }}"
        f"{{% if m.role == 'assistant' %}}{{{{ {key} }}}}{{% endif %}}"
        "{{ m.content + '<e>' }}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '<r>assistant\n{opens}' }}}}{{% endif %}}"
    )


def test_a_row_that_thinks_is_told_the_key_that_works(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(Form(thinker("loop.last and m.scratchpad or ''")), tmp_path))
    for key, advice in (
        ("thought", "; it would write the reasoning under the key 'scratchpad'"),
        ("scratchpad", ""),
    ):
        answer = {"role": "assistant", "content": "3", key: "so"}
        turns = [answer, ASK, answer] if not advice else [answer]
        with pytest.raises(ConfigError, match=f"drops or changes its '{key}'; .* there{advice}$"):
            prompt_and_answer({"prompt": [ASK], "completion": turns}, "completion", tokenizer)


_KEY = "'<think>' + (m.reasoning_content or '') + '</think>'"
_LAST = _KEY.replace("m.reasoning", "loop.last and m.reasoning")
_INLINE, _EMPTY, _SPLIT = (
    "<think>why</think>3",
    "<think></think>3",
    {"content": "3", "reasoning_content": "why"},
)
# Template -> what the policy samples, the message, and what the template writes behind the header.
BACK: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "inline": (thinker(), _INLINE, {"content": _INLINE}, _INLINE),
    "a key": (thinker(_KEY), _INLINE, _SPLIT, _INLINE),
    "other blanks": (thinker(_KEY), "<think> why\n</think>3", _SPLIT, "<think> why\n</think>3"),
    **{
        f"the key {key} alone": (
            thinker(_KEY.replace("reasoning_content", key)),
            _INLINE,
            {"content": "3", key: "why"},
            _INLINE,
        )
        for key in ("reasoning", "rationale")
    },
    "a key of the last turn": (thinker(_LAST), _INLINE, _SPLIT, _EMPTY),
    "opened": (thinker(opens="<think>"), "why</think>3", {"content": _INLINE}, _INLINE),
    "opened, a key": (thinker(_LAST, "<think>"), "why</think>3", _SPLIT, _EMPTY),
    "an empty block": (thinker("'<think></think>'"), _INLINE, _SPLIT, _EMPTY),
    "a closed block": (thinker("'<c>'", "<think></think>"), "<c>3", {"content": "3"}, "<c>3"),
    "an open tag": (thinker(_KEY), "<think>why3", {"content": "<think>why3"}, "<think>why3"),
}


@pytest.mark.parametrize("name", BACK)
async def test_reasoning_goes_back_as_it_was_sampled_or_not_at_all(name: str, tmp_path: Path) -> None:
    template, sampled, message, written = BACK[name]
    tokenizer = load_tokenizer(write_model(Form(template), tmp_path))
    session = FakeSession([f"{sampled}<e>"] * 2, tokenizer=tokenizer, size=1)
    conversation = session.conversation([ASK])
    for _ in range(2):
        await conversation.reply()
        conversation.add(ASK)
    assert conversation.history[1] == {"role": "assistant", **message}
    first, second = (tokenizer.decode(each.prompt_ids, special=True) for each in session.generated)
    header = "<r>assistant\n"
    assert second.partition(header)[2].partition("<e>")[0] == written
    sampled_ids = [*session.generated[0].prompt_ids, *tokenizer.encode_text(f"{sampled}<e>")]
    stays = session.generated[1].prompt_ids[: len(sampled_ids)].tolist() == sampled_ids
    assert (conversation.splits, stays) == (
        (0, True) if first.partition(header)[2] + sampled == written else (1, False)
    )
    [*_, last] = conversation.trajectories(Score(1.0))
    assert last.score.metrics.get("malformed_reasoning", 0) == 2 * (name == "an open tag")


async def test_a_tag_that_a_prompt_does_not_open_is_opened_once(tmp_path: Path) -> None:
    """As DeepSeek V3.1 opens nothing behind a tool's result."""
    opens = "' + ('<think>' if messages[-1].role == 'user' else '') + '"
    tokenizer = load_tokenizer(write_model(Form(thinker(opens=opens)), tmp_path))
    session = FakeSession(["why</think>3<e>", "<think>so</think>4<e>", "5<e>"], tokenizer=tokenizer, size=1)
    conversation = session.conversation([ASK])
    for each in ({"role": "tool", "content": "7"}, ASK, ASK):
        await conversation.reply()
        conversation.add(each)
    assert isinstance(conversation.history, list)
    assert [conversation.history[at]["content"] for at in (1, 3)] == [_INLINE, "<think>so</think>4"]
    text = tokenizer.decode(session.generated[2].prompt_ids, special=True)
    assert (conversation.splits, text) == (0, tokenizer.render(conversation.history[:-2]))
    assert [each.answer.reasoning_end for each in session.generated[:2]] == [11, 17]


@pytest.mark.parametrize(
    ("old", "new", "taken"),
    [
        ("CALLS", "{{ '<m>' if m.content and m.tool_calls else '' }}CALLS", ("text", "text", "<m>")),
        ("m.content", "(m.content | tojson if m.role == 'assistant' else m.content)", (None, None, '"')),
        ("m.content", "('<m>' if loop.last and m.role == 'user' else '') + m.content", ("text", "text", "")),
    ],
)
def test_only_what_comes_back_is_taken(old: str, new: str, taken: Any, tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    template = thinker("'<think>' + m.thinking + '</think>' if m.thinking else ''")
    template = template.replace(" + '<e>'", " }}CALLS{{ '<e>'").replace(old, new).replace("CALLS", calls)
    form = load_tokenizer(write_model(Form(template), tmp_path)).form
    assert form.calls
    assert (form.stored.taken, form.stored.with_calls, form.calls.lead) == taken


def test_reasoning_ends_at_the_models_own_tags(models: Models) -> None:
    stored, thought = models("channels").form.stored, "<c>analysis<m>why<e><r>assistant<c>final<m>"
    found = [stored.reasoning_end(text, "") for text in (f"{thought}3<e>4", "<c>analysis<m>why", "3")]
    assert found == [len(thought), None, 0]
    stored = models("opened thinker").form.stored
    assert [stored.reasoning_end(text, "<think>\n") for text in ("why</think>3", "why")] == [11, None]
    assert [stored.leading_end(text, "<think>\n") for text in ("why</think>f('</think>')", "f")] == [11, None]
    assert [stored.leading_end(text, "") for text in ("f('<think>')", "<think>why</think>f")] == [0, 18]


_AFTER_DATA = "for m in messages if m.role != 'tool' or messages | selectattr('tool_calls') | list"


@pytest.mark.parametrize(
    ("old", "new"), [("for m in messages", _AFTER_DATA), ("'<e>'", "('<c>' if m.tool_calls else '<e>')")]
)
def test_calls_go_back_as_data_where_a_result_or_an_end_tells_them_from_text(
    old: str, new: str, tmp_path: Path
) -> None:
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    template = thinker().replace("{{ m.content + '<e>' }}", f"{{{{ m.content }}}}{calls}{{{{ '<e>' }}}}")
    form = load_tokenizer(write_model(Form(template.replace(old, new), ends=("<e>", "<c>")), tmp_path)).form
    assert (form.stored.taken, form.stored.with_calls, form.stored.calls_as_data) == ("text", "text", True)


def test_calls_are_probed_with_tools(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ '<r>' + m.role + '\n' + m.content }}CALLS<e>\n{% endfor %}"
    calling = plain.replace("CALLS", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}")
    form = Form({"default": plain.replace("CALLS", ""), "tool_use": calling})
    assert load_tokenizer(write_model(form, tmp_path)).form.shows_calls
    only = load_tokenizer(write_model(Form("{{ tools[0].name }}" + calling), tmp_path / "only")).form
    assert (only.shows_calls, only.closing, only.writes_end) == (True, "<e>", True)
    quoted = '<c>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson | tojson }}}'
    form = Form(calling.replace("{{ c.function | tojson }}", quoted))
    assert load_tokenizer(write_model(form, tmp_path / "quoted")).form.calls is not None


def test_a_text_that_the_template_changes_is_no_list(tmp_path: Path) -> None:
    form = Form("{% for m in messages %}{{ m.content | capitalize }}{% endfor %}")
    assert load_tokenizer(write_model(form, tmp_path)).render([ASK]) == "Ok?"


@pytest.mark.parametrize("name", FORMS)
def test_turns_end_as_the_template_ends_them_before_what_follows(name: str, models: Models) -> None:
    """Behind white space of the turn's own, and before a turn that is not trained."""
    form, tokenizer = FORMS[name], models(name)
    later = [{"role": "assistant", "content": "ok\n"}, ASK, {"role": "assistant", "content": "two"}, ASK]
    called = [CALLING, {"role": "tool", "tool_call_id": "123456789", "content": "3"}]
    for completion in [later, called] if form.shows_calls else [later]:
        row = {"prompt": [ASK], "completion": completion}
        if form.sft and (completion is later or name != "channels"):  # its calls have an end of their own
            with pytest.raises(ConfigError, match=f"{form.sft}|once other messages follow"):
                prompt_and_answer(row, "completion", tokenizer)
            continue
        tokens, mask = map(np.array, prompt_and_answer(row, "completion", tokenizer))
        text = tokenizer.render([ASK, *completion], add_generation_prompt=False)
        if form.prefixes or form.sentence_piece in ("always", "llama"):
            # These write a space behind each special token, as for a whole.
            assert tokenizer.encode_text(text, whole=True)[: len(tokens)].tolist() == tokens.tolist()
        else:
            assert plain_text(text).startswith(tokenizer.decode(tokens, special=True))
        unlearnt = {**row, "completion": [{**completion[0], "weight": 0}, *completion[1:], {**later[2]}]}
        assert len(spans(prompt_and_answer(unlearnt, "completion", tokenizer).loss_mask)) == len(spans(mask))
        has_end = name != "open turn" or completion is later  # the calls of an open turn have none
        if tokenizer.form.writes_end and has_end:
            assert ends_of(tokenizer, tokens, mask)
    if form.shows_calls and not form.sft:
        tokens, _ = prompt_and_answer({"prompt": [ASK], "completion": [CALLING]}, "completion", tokenizer)
        assert tokenizer.decode(np.array(tokens[-1:]), special=True) == (form.call_closing or form.closing)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.strips and not form.sft])
def test_white_space_at_the_end_is_trained_wherever_the_turn_is(name: str, models: Models) -> None:
    tokenizer = models(name)
    turn = {"role": "assistant", "content": "ok \n"}
    row = {"prompt": [ASK], "completion": [turn, ASK, turn]}
    tokens, mask = map(np.array, prompt_and_answer(row, "completion", tokenizer))
    if not tokenizer.form.writes_end:
        tokens, mask = np.insert(tokens, spans(mask)[0][1], 0), np.insert(mask, spans(mask)[0][1], True)
    first, last = (
        tokenizer.decode(tokens[start : end - 1], after=tokens[:start]) for start, end in spans(mask)
    )
    lead = tokenizer.form.plain_lead
    assert first == last
    assert first.removeprefix("<think></think>") == f"{lead}ok \n{tokenizer.form.plain_tail}"


@pytest.mark.parametrize("name", FORMS)
def test_a_reward_reads_the_text_that_follows_the_prompt(name: str, models: Models) -> None:
    """Also its first spaces, which decoders drop, and not the one that a tokenizer puts before a text."""
    form, tokenizer = FORMS[name], models(name)
    prompt = tokenizer.encode_prompt([ASK])
    for text in ("    ok", "ok", " <think>"):
        answer = tokenizer.encode_text(f"{form.lead}{text}", after=tokenizer.render([ASK]))
        if not form.rstrips:  # a token takes the spaces
            assert answer_text(prompt, answer, "length", tokenizer) == text
    code = tokenizer.encode_prompt("def f():\n")
    answer = tokenizer.encode_text("    ok", after="def f():\n")
    assert answer_text(code, answer, "length", tokenizer) == "    ok"


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.lead])
async def test_only_a_turn_begins_with_the_lead(name: str, models: Models) -> None:
    tokenizer = models(name)
    lead, end = FORMS[name].lead, tokenizer.form.closing
    # The policy has begun with the lead where a prompt is rendered already, and not where there is no turn.
    for prompt, expected in [
        (tokenizer.render([ASK]), "ok"),
        ("some text: ", whole := f"{tokenizer.form.plain_lead}ok"),
    ]:
        session = FakeSession([f"{lead}ok{end}"], tokenizer=tokenizer, size=1)
        [answer] = await session.generate(tokenizer.encode_prompt(prompt))
        assert answer.text == expected
    # A policy that has not learnt the lead: what it sampled stays.
    session = FakeSession([f"ok{end}"], tokenizer=tokenizer, size=1)
    conversation = session.conversation([ASK])
    for _ in range(2):
        assert (await conversation.reply()).text == "ok"  # type: ignore[union-attr]
        conversation.add(ASK)
    assert (conversation.splits, conversation.history[1]["content"]) == (name == "channels", "ok")  # type: ignore[index]
    # An agent with a prompt of its own gets all that was sampled, so that it can go on.
    agent = AgentSession(tokenizer, f"{lead}ok{end}")
    async with recorded_agent(agent) as (url, key, _), AsyncOpenAI(base_url=url, api_key=key) as client:
        text = await client.completions.create(model="m", prompt=tokenizer.render([ASK]))
    assert text.choices[0].text == whole


ELSEWHERE: dict[str, tuple[str, list[Any]]] = {
    "reasoning_content": ("plain lines", [{**SAID, "reasoning_content": "4"}]),
    "tool_plan": ("plain lines", [{**SAID, "content": "I add", "tool_plan": "add"}]),
    "tool_calls": ("end on a line", [{**CALLING, "content": 'I know how to add: {"a": 1}'}]),
    "content": ("plain lines", [SAID, {**ASK, "role": "critic", "content": "it is 4"}, SAID]),
}
"""What a template drops, while its text stands elsewhere: key -> form, answer."""


def test_a_character_that_is_none_is_refused(models: Models) -> None:
    with pytest.raises(ConfigError, match=r"has the character U\+FDD0"):
        models("plain lines").render([{"role": "user", "content": "c\ufdd0d"}])


@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_a_template_drops_is_seen_though_its_text_stands_elsewhere(key: str, models: Models) -> None:
    name, completion = ELSEWHERE[key]
    with pytest.raises(ConfigError, match=f"drops or changes its '{key}'"):
        prompt_and_answer({"prompt": [ASK], "completion": completion}, "completion", models(name))


@pytest.mark.parametrize(
    "clock",
    [
        "{% set f = '%d %b %Y' %}{{ strftime_now(f) }}",
        "{{ strftime_now(format='%d %b %Y') }}",
        '{{ strftime_now("%-d %B") }}',
    ],
)
def test_the_clock_of_a_template_stands_still(clock: str, tmp_path: Path) -> None:
    form = Form(
        clock + "{% for m in messages %}{{ m.content }}{% endfor %}", given={"strftime_now": "2026-07-06"}
    )
    text = tokenizer_of(form, tmp_path).render([ASK])
    assert text == ("6 July" if "%B" in clock else "06 Jul 2026") + "ok?"


@pytest.mark.parametrize("name", ["forced thinker", "dated header", "late system", "wrong eos"])
def test_a_prompt_that_is_rendered_already_begins_once_and_has_no_end(name: str, models: Models) -> None:
    tokenizer = models(name)
    rendered = tokenizer.render([ASK])
    assert tokenizer.encode_prompt(rendered).tolist() == tokenizer.encode_prompt([ASK]).tolist()
    assert tokenizer.encode_prompt("ok")[-1] != tokenizer.encode_text("<x>")[0]
    tokens, _ = prompt_and_answer({"prompt": rendered, "completion": "3"}, "completion", tokenizer)
    assert tokenizer.decode(np.array(tokens[-1:]), special=True) == FORMS[name].closing
    closed = prompt_and_answer(
        {"prompt": rendered, "completion": f"3{FORMS[name].closing}"}, "completion", tokenizer
    )
    assert closed.tokens == tokens
