"""Real runs on models whose chat templates are other people's, against what transformers renders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from chat_forms import FORMS, Form, write_weights
from commands import output_of

pytestmark = pytest.mark.slow

WORLD = """
def answer(turn):
    return {"feedback": " more\\n ", "reward": 0.5} if turn < 3 else {"reward": 1.0}
"""
TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [TOOL, {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]
PARTS = [{"type": "text", "text": "is it "}, {"type": "text", "text": "ok?"}]


def samples_of(run: Path, *options: str) -> list[dict[str, Any]]:
    output_of("samples", run, "--format", "jsonl", "--tokens", "--output", run / "rows.jsonl", *options)
    return [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("form", "workflow", "row", "renders"),
    [
        (replace(FORMS["plain lines"], eos="<x>", ends=("<x>",)),
         {"use": "multi_turn", "environment": "world.py:answer"},
         {"prompt": [{"role": "user", "content": PARTS}]}, [{"role": "user", "content": "is it ok?"}]),
        (FORMS["forced thinker"], {"use": "tool_use", "tools": ["tools.py:add"]},
         {"prompt": [{"role": "user", "content": "ok?"}], "tools": [TOOL]},
         [{"role": "user", "content": "ok?"}]),
        (FORMS["late system"], {"use": "single_turn"},
         {"prompt": [{"role": "system", "content": "t"}, {"role": "user", "content": PARTS}]},
         [{"role": "system", "content": "t"}, {"role": "user", "content": "is it ok?"}]),
    ],
    ids=["wrong eos", "forced thinker", "late system"],
)  # fmt: skip
def test_what_is_trained_is_what_transformers_renders(
    tmp_path: Path, form: Form, workflow: dict[str, Any], row: dict[str, Any], renders: list[dict[str, Any]]
) -> None:
    """Token for token, in training and in evaluations."""
    model = write_weights(form, tmp_path / "model")
    transformer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    end = transformer.convert_tokens_to_ids(form.closing)
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "tools.py").write_text('def add(a: int, b: int) -> int:\n    "Add."\n    return a + b\n')
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "answer": "ok"}) + "\n")
    rows = {"use": "jsonl", "path": str(tmp_path / "rows.jsonl"), "template": form.given}
    said = {transformer.convert_tokens_to_ids("ok"): 100.0, end: 99.0}
    document = {
        "name": "forms",
        "model": str(model),
        "algorithm": {"use": "grpo", "group_size": 4},
        "training": {"use": "torch", "threads": 1},
        "inference": {"use": "torch", "threads": 1},
        "workflow": workflow,
        "reward": "exact",
        "dataset": rows,
        "sampling": {"max_tokens": 6, "logit_bias": said},
        "evaluation": {"dataset": rows, "keep_answers": True},
        "queue": {"batch_size": 2},
        "steps": 2,
        "out": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    output_of("run", tmp_path / "run.yaml", cwd=tmp_path)
    output_of("evaluate", tmp_path / "run", "--out", tmp_path / "again", cwd=tmp_path)

    found = [*samples_of(tmp_path / "run"), *samples_of(tmp_path / "again", "--purpose", "eval")]
    assert {each["purpose"] for each in found} == {"train", "eval"}
    tools = TOOLS if "tools" in row else None

    def ids(chat: list[dict[str, Any]], **options: Any) -> list[int]:
        return transformer.apply_chat_template(chat, tools=tools, return_dict=False, **options)

    prompt = ids(renders, add_generation_prompt=True)
    for each in found:
        tokens, mask = each["tokens"], np.array(each["loss_mask"])
        assert tokens[: len(prompt)] == prompt
        assert not mask[: len(prompt)].any()
        assert mask[-1] == 1
        assert set(np.array(tokens)[mask == 1].tolist()) <= {int(token) for token in said}
        if form.keeps:  # the whole chat, turn for turn
            words = transformer.decode(tokens[len(prompt) :]).removesuffix(form.closing)
            alone = [{"role": "assistant", "content": words}]
            said_later = each["messages"][len(renders) :] if each["messages"] else alone
            assert ids([*renders, *said_later])[: len(tokens)] == tokens
