"""An agent that knows nothing of stretto: three tries at a running sum, with a tool that checks it.

Alone, it works with any server that has OpenAI's API:

    echo '{"prompt": "3+5+9="}' | OPENAI_BASE_URL=http://… OPENAI_API_KEY=… python examples/agent/agent.py
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from typing import Any

from openai import OpenAI

TURNS = 3


def first_slip(prompt: str, answer: str) -> int | None:
    """The tool: return the position of the first wrong partial sum, from 1; None if all are right."""
    terms = [int(term) for term in prompt.removesuffix("=").split("+")]
    right = [str(partial) for partial in accumulate(terms)][1:]
    said = answer.split()
    if said == right:
        return None
    same = (mine == yours for mine, yours in zip(right, said, strict=False))
    return next((at for at, equal in enumerate(same, 1) if not equal), min(len(said), len(right)) + 1)


def solve(prompt: str) -> str:
    """Return the last answer of a chat of at most three turns."""
    client = OpenAI()  # the address and the key are in the environment
    messages: list[Any] = [{"role": "user", "content": prompt}]
    answer = ""
    for _ in range(TURNS):
        completion = client.chat.completions.create(model="policy", messages=messages)
        message = completion.choices[0].message
        answer = message.content or ""
        if first_slip(prompt, answer) is None:
            break
        # This model understands only sums, so the next message is the prompt again.
        messages += [message, {"role": "user", "content": prompt}]
    return answer


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)["prompt"]))
