"""Sequences made of rows: which tokens of a conversation are trained, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_session import TEMPLATE, tokenizer_with
from stretto.algorithm import Encoded
from stretto.dataset import Message
from stretto.errors import ConfigError
from stretto.models.tokenizer import ByteTokenizer
from stretto.rl.supervised import prompt_and_answer, tokens_of_row
from stretto.tokenizer import Tokenizer

ASK = {"role": "user", "content": "1+1?"}
ADD = {"name": "add", "arguments": {"a": 1, "b": "é"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "2"}
LAST = {"role": "assistant", "content": "two"}
TRL = {"role": "assistant", "tool_calls": [{"type": "function", "function": ADD}]}
CALL = {"id": "c", "type": "function", "function": {**ADD, "arguments": json.dumps(ADD["arguments"])}}
OPENAI = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call><|im_end|>'

TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
TURN_END = "{{ '<|im_end|>\n' }}"
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# No tool calls and no tools.
PLAIN = f"{{% for m in messages %}}{TURN}{{{{ m.content }}}}{TURN_END}{{% endfor %}}{OPENING}"
# As DeepSeek's: the arguments are text.
TEXT = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + c.function.arguments + ']' }}"
    "{% endfor %}",
)
# As Qwen3's: an empty thought is written before the answer while it is the last message.
THINKS = PLAIN.replace(
    "{{ m.content }}",
    "{{ '<think></think>' if loop.last and m.role == 'assistant' and not add_generation_prompt }}"
    "{{ m.content }}",
)
# As DeepSeek-R1's: a thought is opened, and left out of the history.
OPENS = PLAIN.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}")


def trained(encoded: Encoded, tokenizer: Tokenizer) -> str:
    """The text of a sequence, with what is trained in brackets."""
    text, inside = "", False
    tokens, mask = np.asarray(encoded.tokens, np.int32), np.asarray(encoded.loss_mask)
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(mask)) + 1):
        inside = bool(mask[part[0]])
        text += ("⟦{}⟧" if inside else "{}").format(tokenizer.decode(tokens[part], special=True))
    return text


def test_the_row_of_the_docs_is_encoded(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    row = json.loads(page.partition("```json\n")[2].partition("```")[0])
    tokenizer = tokenizer_with(TEMPLATE, tmp_path)
    found = trained(prompt_and_answer(row, "completion", tokenizer), tokenizer)
    assert '⟦<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call><|im_end|>⟧' in found
    assert found.endswith("⟦two<|im_end|>⟧")


@pytest.mark.parametrize("call", [TRL, OPENAI])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_the_assistants_turns_are_trained_as_the_template_writes_them(
    call: Message, tools: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(TEMPLATE, tmp_path)
    row = {"prompt": [ASK], "completion": [call, RESULT, LAST], "tools": tools}
    encoded = prompt_and_answer(row, "completion", tokenizer)
    shown = json.dumps(TOOLS)
    assert trained(encoded, tokenizer) == (
        f"<|im_start|>system\n{shown}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        f"⟦{WRITTEN}⟧\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧"
    )


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (TEXT, [TRL, RESULT, LAST], '⟦[add{"a": 1, "b": "é"}]<|im_end|>⟧ ⟦two<|im_end|>⟧'),
        (THINKS, [LAST, ASK, LAST], "⟦two<|im_end|>⟧ ⟦<think></think>two<|im_end|>⟧"),
        (PLAIN, "two", "⟦two<|im_end|>⟧"),
    ],
    ids=["text", "earlier", "an answer as text"],
)
def test_training_follows_the_template(template: str, answer: Any, expected: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(template, tmp_path)
    encoded = prompt_and_answer({"prompt": [ASK], "completion": answer}, "completion", tokenizer)
    found = trained(encoded, tokenizer)
    assert " ".join(f"⟦{part.partition('⟧')[0]}⟧" for part in found.split("⟦")[1:]) == expected
    assert found.replace("⟦", "").replace("⟧", "").startswith("<|im_start|>user\n1+1?")


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (PLAIN, {"completion": [TRL]}, "message 1 of the answer (role 'assistant'): the chat template drops"),
        (PLAIN, {"completion": [LAST], "tools": TOOLS}, "does not show the tool 'add'"),
        (PLAIN, {"prompt": [ASK, OPENAI, RESULT], "completion": [LAST]}, "message 2 of the prompt"),
        (FORGETS, {"completion": [LAST, RESULT, LAST]}, "message 2 of the answer (role 'tool')"),
        (FORGETS, {"prompt": [ASK, LAST, RESULT], "completion": [LAST]}, "message 3 of the prompt"),
        (TEMPLATE, {"completion": [{**LAST, "content": "a</think>b"}, ASK, LAST]}, "changes its 'content'"),
        (OPENS, {"completion": [LAST]}, "opens the answer with '<think>', and writes"),
        (PLAIN, {"completion": [{**LAST, "reasoning_content": "why"}]}, "changes its 'reasoning_content'"),
        (PLAIN, {"completion": [{**TRL, "tool_calls": ["add"]}]},
         "expected tool calls with a function's name"),
        (PLAIN, {"completion": [LAST], "tools": ["add"]}, "column 'tools' of row 7: expected a list of JSON"),
        (PLAIN, {"completion": [ASK, LAST]}, "begins with a turn of the user; expected the answer alone"),
        (PLAIN, {"prompt": "1+1?", "completion": [LAST]}, "has chat messages, and the prompt is text"),
        (PLAIN, {"completion": [{**LAST, "content": [{"type": "image"}]}]},
         "only the prompt may have images"),
        (None, {"completion": [LAST]}, "has no chat template"),
    ],
)  # fmt: skip
def test_what_the_template_does_not_write_is_an_error_with_the_row(
    template: str, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prompt_and_answer({"prompt": [ASK], "id": 7} | row, "completion", tokenizer_with(template, tmp_path))
    assert "of row 7: " in str(caught.value)
    assert message in str(caught.value)


def test_reasoning_may_leave_the_history_of_the_prompt(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATE, tmp_path)
    earlier = {"role": "assistant", "content": "<think>hm</think>no"}
    row = {"prompt": [ASK, earlier, ASK], "completion": [{**LAST, "content": "<think>so</think>two"}]}
    found = trained(prompt_and_answer(row, "completion", tokenizer), tokenizer)
    assert found.endswith("⟦<think>so</think>two<|im_end|>⟧")
    assert "hm" not in found


def test_given_tokens_are_taken_if_they_are_those_of_the_model() -> None:
    tokenizer = ByteTokenizer()
    row = {"id": 7, "prompt": "ab", "completion": "cd", "tokens": [*b"ab cd"], "loss_mask": [1, 0, 0, 1, 1]}
    encoded = tokens_of_row(row, "completion", tokenizer)
    assert encoded == (list(b"ab cd"), [False, False, False, True, True])
    assert tokens_of_row({**row, "loss_mask": None}, "completion", tokenizer) is None
    assert tokens_of_row({**row, "completion": "c \nd"}, "completion", tokenizer) == encoded
    for change, message in (
        ({"tokens": [1, 2, 3, 4, 5]}, "is not the text of the column 'completion' in this model's tokens"),
        ({"loss_mask": [1]}, "expected a list of token ids"),
        ({"loss_mask": [1, 0, 0, 0, 0]}, "at least one after the first"),
        ({"tokens": "ab cd"}, "expected a list of token ids"),
    ):
        with pytest.raises(ConfigError, match=f"column 'tokens' of row 7: .*{message}"):
            tokens_of_row(row | change, "completion", tokenizer)
