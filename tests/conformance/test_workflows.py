"""The built-in workflows keep the promises of workflows."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from stretto.testing import WorkflowConformance

CODE = '''
def environment(turn, **_):
    return {"feedback": " again: ", "reward": 0.5} if turn < 3 else None

def silent(turn, **_):
    return " again: " if turn < 3 else None

def add(a: int, b: int) -> int:
    """A sum."""
    return a + b
'''

BOTH = '''
from stretto import Component, hookimpl
from stretto.environment import EnvironmentToolsConfig
from stretto.workflow import group_of


class BothConfig(EnvironmentToolsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section with an environment and tools."""


class Both:
    def __init__(self, config, context): ...

    async def run(self, prompt, session):
        async def two_answers():
            chat = session.conversation(prompt.row["prompt"], tools=await session.tools())
            await chat.reply()
            feedback = await session.feedback(prompt, chat, {})
            chat.add(f"{(await session.call('add', {'a': 1, 'b': 2})).text} {feedback.messages[0]}")
            await chat.reply()
            return chat

        chats = await group_of(session, two_answers)
        scores = await session.score(prompt, [chat.answers[-1] for chat in chats])
        pairs = zip(chats, scores, strict=True)
        return [part for chat, score in pairs for part in chat.trajectories(score)]


@hookimpl
def stretto_workflow():
    yield Component("both", Both, BothConfig, "an environment and a tool, and a text that is added to a chat")
'''


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class WithCode(WorkflowConformance):
    """Its options name functions of a file."""

    code: ClassVar[dict[str, Any]]

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
        folder = tmp_path_factory.mktemp("code")
        (folder / "code.py").write_text(CODE)
        code = msgspec.json.encode(cls.code).replace(b"code.py", bytes(folder / "code.py"))
        return {"use": cls.use, **cls.options, **msgspec.json.decode(code)}


class TestSingleTurn(WorkflowConformance):
    use = "single_turn"


class TestMultiTurn(WithCode):
    use = "multi_turn"
    code = {"environment": "code.py:silent"}


class TestMultiTurnWithRewards(WithCode):
    use = "multi_turn"
    code = {"environment": "code.py:environment"}
    options = {"max_turns": 2}


class TestToolUse(WithCode):
    use = "tool_use"
    code = {"tools": ["code.py:add"]}
    answers = (CALL, "<tool_call>?", "3", "4")


class TestBoth(WithCode):
    """A text that is added to a chat is the user's, as in `multi_turn`."""

    use = "both"
    code = {"environment": "code.py:silent", "tools": ["code.py:add"]}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def plugin(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        file = tmp_path_factory.mktemp("plugin") / "both.py"
        file.write_text(BOTH)
        cls.plugins = (str(file),)
