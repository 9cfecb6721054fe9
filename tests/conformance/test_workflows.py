"""The built-in workflows keep the promises of workflows."""

from __future__ import annotations

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
    answers = (
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        "<tool_call>?",
        "3",
        "4",
    )
