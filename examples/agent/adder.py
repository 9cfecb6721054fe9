"""An agent on Anthropic's client library that knows nothing of stretto: it gives the policy a tool that adds.

Alone, it works with any server that has Anthropic's API:

    export ANTHROPIC_BASE_URL=http://… ANTHROPIC_API_KEY=…
    echo '{"prompt": "3+5+9="}' | python examples/agent/adder.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic

ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def result_of(use: Any) -> dict[str, Any]:
    """Run a call of the tool, and return its result for the policy."""
    try:
        text = str(int(use.input["a"]) + int(use.input["b"]))
    except (KeyError, TypeError, ValueError) as error:
        text = f"error: {error!r}"
    return {"type": "tool_result", "tool_use_id": use.id, "content": text}


def solve(prompt: str) -> str:
    """Return the first answer of a chat that calls no tool."""
    client = Anthropic()  # the address and the key are in the environment
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        message = client.messages.create(model="policy", max_tokens=100, messages=messages, tools=[ADD])
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [result_of(use) for use in uses]
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)["prompt"]))
