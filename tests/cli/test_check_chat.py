"""What `check` says of the chat form, and of rows that the model does not read as they are written."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chat_forms import FORMS, write_model
from commands import called
from kernel_setup import write_run
from stretto.algorithm import Encoded
from stretto.dataset import DatasetConfig
from stretto.errors import ConfigError
from stretto.rl.supervised import cut_to_fit

ASK = {"role": "user", "content": "ok?"}


def checked(
    tmp_path: Path, *prompts: Any, form: str = "plain lines", more: Sequence[str] = (), **columns: Any
) -> str:
    if not (tmp_path / "model").exists():
        write_model(FORMS[form], tmp_path / "model")
    write_run(tmp_path, model="model", queue={"batch_size": 1}, steps=1, out="out")
    rows = [{"prompt": prompt, "answer": "1", **columns} for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = called("check", "run.yaml", *more, cwd=tmp_path)
    return done.stdout + done.stderr


def changed(folder: Path, form: str, *, of_tokens: dict[str, bool], **values: Any) -> None:
    """Write a form's model with other values in its tokenizer.json, and in each of its added tokens."""
    write_model(FORMS[form], folder)
    written = json.loads((file := folder / "tokenizer.json").read_text())
    written["added_tokens"] = [{**token, **of_tokens} for token in written["added_tokens"]]
    file.write_text(json.dumps({**written, **values}))


def test_the_chat_form_and_the_first_prompt_are_printed(tmp_path: Path) -> None:
    shown = checked(tmp_path, [ASK], form="opened thinker")
    assert "the prompt opens '<think>\\n' of the answer" in shown
    assert "a turn ends with '<e>'; the template writes '<e>'" in shown
    assert "calls with arguments as mapping" in shown
    assert "prompt     '<r>user\\nok?<e>\\n<r>assistant\\n<think>\\n'" in shown
    assert "warning" not in shown.replace("shuffle", "")


def test_an_end_that_the_tokenizer_reads_as_text_is_named(tmp_path: Path) -> None:
    """As some tokenizers do whose tokens are sought in the normalised text."""
    prepends = {"type": "Prepend", "prepend": "_"}
    changed(tmp_path / "model", "plain lines", of_tokens={"normalized": True}, normalizer=prepends)
    said = checked(tmp_path, [ASK])
    assert "ends a turn with '<e>', but behind a text the tokenizer reads it as text" in said


READ_OTHERWISE: list[tuple[Any, str]] = [
    (
        [{"role": "human", "content": "hidden"}, ASK],
        "does not show, or not as it is written (row 2: message 1",
    ),
    ([ASK, {"role": "assistant", "content": "1"}], "end with a turn of the assistant"),
    ([{"role": "user", "content": "a <e> b"}], "have the text of a special token in a message"),
    ("<r>user\nok?<e>\n<r>assistant\n", "are texts with special tokens"),
    ("", "have no token, and are left out"),
]


def test_each_prompt_that_is_read_otherwise_is_named(tmp_path: Path) -> None:
    prompts, words = zip(*READ_OTHERWISE, strict=True)
    said = checked(tmp_path, [ASK], *prompts)
    assert [each for each in words if each not in said] == [], said


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], "has a part of the type 'image'"),
        (json.dumps([ASK]), "expected chat messages as a list, found their JSON text"),
    ],
)
def test_a_prompt_that_is_no_text_is_named(prompt: Any, words: str, tmp_path: Path) -> None:
    assert words in checked(tmp_path, [ASK], prompt)


def test_characters_that_the_tokenizer_writes_in_another_way_are_not_lost(tmp_path: Path) -> None:
    changed(tmp_path / "model", "words for headers", of_tokens={}, normalizer={"type": "NFC"})
    said = checked(tmp_path, [{"role": "user", "content": "e\u0301 a\u2581b北"}])
    assert "drops or does not know (row 1: '北')" in said


def test_line_feeds_of_the_template_alone_are_not_missed(tmp_path: Path) -> None:
    changed(tmp_path / "model", "line before the text", of_tokens={"rstrip": True})
    assert "the tokenizer drops" not in checked(tmp_path, [ASK])


def test_reasoning_whose_marks_are_text_is_named(tmp_path: Path) -> None:
    changed(tmp_path / "model", "thinker by switch", of_tokens={"special": True})
    prompt = [ASK, {"role": "assistant", "content": "<think>hm</think>ok"}, ASK]
    said = checked(tmp_path, prompt, more=("dataset.special_tokens=text",))
    words = "have reasoning whose marks are text (dataset.special_tokens): it is not dropped (row 1: mess"
    assert words in said


def test_what_a_template_writes_otherwise_than_it_is_sampled_is_named(tmp_path: Path) -> None:
    """Answers as JSON; and behind a tool's result no tag, which is no missing header if that has a number."""
    template = (
        "{% for m in messages %}{{ '<r>' ~ loop.index ~ '\n' ~ (m.content | tojson) ~ '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}<r>{{ messages | length + 1 }}\n"
        "{{ '<think>' if messages[-1].role == 'user' }}{% endif %}"
    )
    write_model(replace(FORMS["plain lines"], template=template), tmp_path / "model")
    said = checked(tmp_path, [ASK, ASK, ASK], [ASK, {"role": "tool", "content": "3"}])
    assert "writes the answer 'a \"b\" & <c>\\nd' as " in said
    assert "open less than behind a user: the model may write (row 2: '<think>')" in said
    assert "open no answer" not in said


def test_a_template_that_takes_no_answer_back_is_refused(tmp_path: Path) -> None:
    template = (  # engines stop behind the reasoning
        "{% for m in messages %}{% if m.reasoning %}{{ '<r>thought\n' + m.reasoning + '<e>\n' }}{% endif %}"
        "{{ '<r>' + m.role + '\n' + m.content + '<e>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<r>{% endif %}"
    )
    write_model(replace(FORMS["plain lines"], template=template), tmp_path / "model")
    (tmp_path / "env.py").write_text("def env(completion): ...\n")
    refused = (
        "workflow: the chat template writes an answer with reasoning, quotes or line feeds in no form in"
    )
    assert refused not in checked(tmp_path, [ASK])
    assert refused in checked(tmp_path, [ASK], more=("workflow={use: multi_turn, environment: env.py:env}",))


def test_tags_that_no_answer_has_are_named(tmp_path: Path) -> None:
    words = "the model writes its reasoning between special tokens such as '<e>'"
    for tags, is_named in (("[think, answer]", True), ("[answer]", False)):
        said = checked(tmp_path, [ASK], form="channels", more=(f"reward={{use: format, tags: {tags}}}",))
        assert (words in said) == is_named


def test_tools_and_calls_that_no_template_shows_are_named(tmp_path: Path) -> None:
    written = "{% for m in messages %}{{ '<r>' + m.role + '\n' + m.content + '<e>\n' }}{% endfor %}"
    write_model(replace(FORMS["plain lines"], template=written), tmp_path / "model")
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    called_before = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, ASK]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    said = checked(tmp_path, *[called_before] * 30, tools=tools)
    cure = "describe them in `system_prompt` of the dataset, in the format of `tool_parser`"
    assert f"have tools that the chat template does not show (row 1: look_up); {cure}\n" in said
    assert "have tool calls that the chat template does not show (row 1: message 2" in said
    first = written.replace("+ '<e>", "+ (m.tool_calls[:1] | tojson if m.tool_calls else '') + '<e>")
    write_model(replace(FORMS["plain lines"], template=first), tmp_path / "first")
    two = [{**call, "function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "sub")]
    for calls, is_named in ((two[:1], False), (two, True)):
        chat = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}, ASK]
        said = checked(tmp_path, chat, more=(f"model={tmp_path / 'first'}",))
        assert ("tool calls that the chat template does not show (row 1: message 2" in said) == is_named
    for system in ([{"role": "system", "content": "Tools: look_up"}], []):
        more = () if system else ("dataset.system_prompt='Write look_up()'",)
        assert "have tools" not in checked(tmp_path, [*system, ASK], tools=tools, more=more)


@pytest.mark.parametrize(
    "content",
    [
        "m.content | capitalize",
        "m.content | map(attribute='text') | join if loop.first and m.content is not string else m.content",
    ],
)
def test_a_content_that_is_written_otherwise_is_named(content: str, tmp_path: Path) -> None:
    written = "{% for m in messages %}{{ '<r>' + m.role + '\n' }}{{ CONTENT }}{{ '<e>\n' }}{% endfor %}"
    form = replace(FORMS["plain lines"], template=written.replace("CONTENT", content))
    write_model(form, tmp_path / "model")
    asked = [{"role": "user", "content": [{"type": "text", "text": "ok"}]}]
    said = checked(tmp_path, [*asked, {"role": "assistant", "content": "Yes"}, *asked])
    assert "does not show, or not as it is written (row 1: message" in said
    assert "content is text" in said


SYSTEM = [{"role": "system", "content": "Be kind."}]


@pytest.mark.parametrize(
    ("only", "prompts", "hidden"),
    [
        ("messages[0].role != 'system'", ([ASK], [*SYSTEM, {"role": "user", "content": "add 1"}]), 2),
        ("messages[0].role == 'system'", ([*SYSTEM, ASK], "add 1"), 2),
        ("messages[-1].role == 'user'", ([ASK, {"role": "tool", "content": "3"}],), 1),
    ],
)
@pytest.mark.parametrize("of_run", [False, True])
def test_tools_are_sought_in_each_prompt(
    only: str, prompts: tuple[Any, ...], hidden: int, of_run: bool, tmp_path: Path
) -> None:
    turns = "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    written = "{% if tools and ONLY %}{{ tools | tojson }}{% endif %}".replace("ONLY", only) + turns
    write_model(replace(FORMS["plain lines"], template=written), tmp_path / "model")
    (tmp_path / "tools.py").write_text('def add(a: int) -> int:\n    """Add one."""\n    return a + 1\n')
    workflow = ("workflow={use: tool_use, tools: ['tools.py:add']}", "sandbox=unsafe") if of_run else ()
    tools = [] if of_run else [{"type": "function", "function": {"name": "add", "description": "Add one."}}]
    said = checked(tmp_path, *prompts, more=workflow, tools=tools)
    unseen = (
        f"1 of {len(prompts)} prompts have tools that the chat template does not show (row {hidden}: add)"
    )
    assert unseen in said
    assert ("Add one." in said.partition("prompt     ")[2]) == (hidden != 1)  # it shows the first prompt
    assert "does not show tools" not in said


def test_a_prompt_that_opens_no_answer_is_named(tmp_path: Path) -> None:
    opens = "{% if loop.last and add_generation_prompt and m.role == 'user' %}<a>{% endif %}"
    written = "{% for m in messages %}{{ m.content }}<e>" + opens + "{% endfor %}"
    write_model(replace(FORMS["plain lines"], template=written), tmp_path / "model")
    said = checked(tmp_path, [{"role": "system", "content": "Be kind."}], [ASK])
    assert "1 of 2 prompts open no answer in the chat template: the model has to write the header" in said


def test_prompts_without_a_token_and_a_tokenizer_that_does_not_fit_are_refused(tmp_path: Path) -> None:
    assert "error: run.yaml" in checked(tmp_path, "", "")  # of no token
    assert "error: run.yaml" not in checked(tmp_path, "", [ASK])
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 7}')
    assert "have tokens outside of the model's vocabulary" in checked(tmp_path, [ASK])
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2" + 7 * b"\0" + b"{}")
    assert "has no tokenizer that can be loaded" in checked(tmp_path, [ASK])


def test_a_row_beyond_the_models_positions_is_refused_or_cut() -> None:
    rows, row = DatasetConfig(use="jsonl"), Encoded([1, 2, 3, 4], [False, False, True, True])
    assert cut_to_fit(row, rows, 4) == row
    too_long = r"4 tokens, and the model has 3 positions; dataset\.max_tokens cuts"
    with pytest.raises(ConfigError, match=too_long):
        cut_to_fit(row, rows, 3)
    cut = cut_to_fit(row, DatasetConfig(use="jsonl", max_tokens=3), 3)
    assert cut == Encoded([1, 2, 3], [False, False, True])
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        cut_to_fit(row, DatasetConfig(use="jsonl", max_tokens=2), 3)


def test_answers_that_are_trained_otherwise_than_they_are_written_are_named(tmp_path: Path) -> None:
    changed(tmp_path / "model", "words for headers", of_tokens={}, normalizer={"type": "NFC"})
    chosen = [{"role": "assistant", "content": "ok 京\r\n"}]
    given: dict[str, Any] = {"chosen": chosen, "rejected": "ok? no", "chat_template_kwargs": {"a": False}}
    said = checked(tmp_path, [ASK], more=["algorithm=dpo"], **given)
    assert "1 of 1 prompts have a column 'chat_template_kwargs', which is not read" in said
    assert (
        "1 of 1 answers begin with their prompt, which the model would read twice (row 1: column 'rej" in said
    )
    assert "1 of 1 answers have characters that the tokenizer drops or does not know (row 1: column" in said
    assert "column 'chosen': '京\\r" in said
    doubled = ["algorithm=sft", "dataset.special_tokens=tokens"]
    said = checked(tmp_path, [ASK], more=doubled, completion="ok<x>")
    assert "1 of 1 answers end with the token that ends a turn, and the chat template adds another" in said


def test_each_supervised_row_is_encoded_as_the_run_would(tmp_path: Path) -> None:
    write_model(FORMS["plain lines"], tmp_path / "model")
    write_run(tmp_path, model="model", queue={"batch_size": 1}, steps=1, out="out")
    rows = [{"prompt": [ASK], "completion": text} for text in ("1", "<r>2", "3")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = called("check", "run.yaml", "algorithm=sft", cwd=tmp_path)
    assert (
        "1 of 3 rows cannot be trained on, and the run would end at the first (checked: all rows)"
        in done.stderr
    )
    assert "row 2: " in done.stderr
