"""Samples in the formats of other tools. The schemas are those of their packages: `model_json_schema()` of
OpenEnv's `TrainingTrace` and of Harbor's `Trajectory`, of the versions in the files' names, without texts."""

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from stretto import Context
from stretto.errors import ConfigError
from stretto.models.tokenizer import load_tokenizer
from stretto.records.samples.traces import TraceFormat, write_trace
from stretto.rl.supervised import check_ids, tokens_of_row
from stretto_jsonl import JsonLines, JsonLinesConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)
SCHEMAS = {format: json.loads(next(FIXTURES.glob(f"{format}.*.json")).read_text()) for format in FORMATS}

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
PROMPT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "0+1?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "1+1?"},
]
ANSWERED = [
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
CHAT = [*PROMPT, *ANSWERED, {"role": "assistant", "content": "two"}]


def sample(**changes: Any) -> dict[str, Any]:
    """A conversation with a tool: two answers of two tokens."""
    tokens, mask = [5, 6, 7, 8, 9, 10, *b"two"], [0, 0, 1, 1, 0, 0, 1, 1, 1]
    ids = {"id": "3/1/0", "purpose": "train", "ticket": 3, "row": 7, "outcome": "trained", "step": 2}
    figures = {"staleness": 1, "reward": 0.5, "metrics": {"turns": 2}, "oldest": 0, "newest": 1}
    texts = {"prompt_text": "<1+1?", "text": "two", "finish": "stop", "messages": CHAT, "images": None}
    return {
        **ids,
        **figures,
        **texts,
        "dataset_row": {"prompt": PROMPT, "tools": [TOOL]},
        "tokens": tokens,
        "loss_mask": [bool(one) for one in mask],
        "logprobs": [0.0 if not one else -0.5 if at > 2 else 1e-7 for at, one in enumerate(mask)],
        **changes,
    }


ONE_ANSWER = {"messages": None, "metrics": {}, "loss_mask": [False] * 6 + [True] * 3}
TEXT = {**ONE_ANSWER, "dataset_row": {"prompt": "1+1?"}}
CUT = {"messages": "a conversation that was too long to ke"}


def read(tmp_path: Path, format: TraceFormat, *traces: Any, **keys: Any) -> list[dict[str, Any]]:
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in traces))
    config = JsonLinesConfig(use="jsonl", path=str(file), format=format, **keys)
    rows = JsonLines(config, Context(run="r", name="n", seed=1))
    return [rows[index] for index in range(len(rows))]


def written(format: TraceFormat, **changes: Any) -> dict[str, Any]:
    trace = write_trace(sample(**changes), 1, format, "run-1")
    assert trace is not None
    return trace


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("changes", "prompt"), [({}, PROMPT), (ONE_ANSWER, PROMPT), (TEXT, "1+1?"), (CUT, "<1+1?")]
)
def test_what_is_written_fits_the_schema_and_is_read_as_the_same_tokens(
    tmp_path: Path, format: TraceFormat, changes: dict[str, Any], prompt: Any
) -> None:
    trace = written(format, **changes)
    jsonschema.validate(trace, SCHEMAS[format])
    [first, second] = read(tmp_path, format, trace, written(format))
    for row, kept in ((first, sample(**changes)), (second, sample())):
        assert (row["tokens"], row["loss_mask"]) == (kept["tokens"], kept["loss_mask"])
    assert (first["prompt"], second["prompt"]) == (prompt, PROMPT)
    assert (second["tools"], second["id"]) == ([TOOL], f"{tmp_path / 'traces.jsonl'}:2")


def test_a_training_trace_has_ids_logprobs_and_masks() -> None:
    first, second = written("training-trace")["turns"]
    assert first["prompt_token_ids"] == [5, 6]
    assert (first["completion_token_ids"], first["per_token_logps"]) == ([7, 8], [0.0, -0.5])  # not above 0
    assert second["prompt_token_ids"] == [5, 6, 7, 8, 9, 10]
    assert second["loss_mask"] == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert second["request"] == {"messages": CHAT[:-1], "tools": [TOOL]}
    assert second["response"] == {"choices": [{"message": CHAT[-1]}]}
    assert (second["node_id"], second["metadata"]["reward"]) == ("3/1/0/1", 0.5)


def test_an_atif_trajectory_has_tools_and_their_results() -> None:
    trace = written("atif")
    assert [step["step_id"] for step in trace["steps"]] == [1, 2, 3, 4, 5, 6]
    sources = [(step["source"], step.get("is_copied_context")) for step in trace["steps"]]
    before = [("system", None), ("user", None), ("agent", True), ("user", None)]
    assert sources == [*before, ("agent", False), ("agent", False)]
    called = trace["steps"][4]
    assert called["tool_calls"] == [{"tool_call_id": "c", "function_name": "add", "arguments": {"a": 1}}]
    assert called["observation"] == {"results": [{"source_call_id": "c", "content": "2"}]}
    assert called["metrics"]["logprobs"] == [0.0, -0.5]
    assert trace["extra"]["reward"] == 0.5


def test_samples_without_tokens_or_with_images_are_not_written() -> None:
    for changes in ({"loss_mask": [False] * 9}, {"images": ["0" * 64]}):
        assert write_trace(sample(**changes), 1, "atif", "run-1") is None
    images = {**TEXT, "dataset_row": {"prompt": "<image>?", "images": ["/a.png"]}}
    assert write_trace(sample(**images), 1, "training-trace", "run-1") is None


def test_a_prompt_that_does_not_go_on_begins_another_row(tmp_path: Path) -> None:
    trace = written("training-trace")
    trace["turns"][1]["prompt_token_ids"][0] = 99
    first, second = read(tmp_path, "training-trace", trace)
    assert (first["tokens"], first["loss_mask"]) == ([5, 6, 7, 8], [0, 0, 1, 1])
    assert second["tokens"] == [99, 6, 7, 8, 9, 10, *b"two"]
    assert second["loss_mask"] == [0] * 6 + [1] * 3  # no token is trained twice
    trace = written("atif")
    subagent: Any = {**written("atif"), "trajectory_id": "sub", "extra": None}
    subagent["steps"][4]["metrics"]["prompt_token_ids"] = [50]
    subagent["steps"][5] |= {"is_copied_context": True}
    of_both = read(tmp_path, "atif", {**trace, "subagent_trajectories": [subagent]})
    assert [row["tokens"] for row in of_both] == [sample()["tokens"], [50, 7, 8]]


def test_masks_within_a_completion_are_kept(tmp_path: Path) -> None:
    trace = written("training-trace")
    trace["turns"][1]["loss_mask"][-2] = 0
    [row] = read(tmp_path, "training-trace", trace)
    assert row["loss_mask"] == [0, 0, 1, 1, 0, 0, 1, 0, 1]


def changed(format: TraceFormat, key: str, value: Any) -> dict[str, Any]:
    trace = written(format)
    turn = trace["turns"][1] if format == "training-trace" else trace["steps"][5]["metrics"]
    turn.pop(key) if value is None else turn.update({key: value})
    return trace


def of_models(agent: str, last: str) -> dict[str, Any]:
    trace = written("atif")
    trace["agent"]["model_name"], trace["steps"][-1]["model_name"] = agent, last
    return trace


def test_calls_of_the_agents_own_model_are_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, "atif", of_models("small", "small"))) == 1


@pytest.mark.parametrize(
    ("format", "trace", "message"),
    [
        ("training-trace", '{"turns": [', "not a JSON object in UTF-8: .*"),
        ("training-trace", {"prompt": "a"}, "missing required field `turns`"),
        ("training-trace", written("atif"), r"at `\$.schema_version`"),
        ("atif", written("training-trace"), r"at `\$.schema_version`"),
        ("atif", {**written("atif"), "schema_version": "ATIF-v2.0"}, r"schema_version"),
        ("training-trace", changed("training-trace", "per_token_logps", None), "field `per_token_logps`"),
        ("training-trace", changed("training-trace", "per_token_logps", [0.0]), "turn 2: 1 logprobs for 3"),
        ("training-trace", changed("training-trace", "loss_mask", [1] * 9), "turn 2: expected a loss_mask"),
        ("training-trace", changed("training-trace", "completion_token_ids", [-1]), r"ids\[0\]"),
        ("atif", changed("atif", "logprobs", None), "step 6: expected one call .* logprobs in its metrics"),
        ("atif", changed("atif", "prompt_token_ids", None), "step 6: expected one call of the model"),
        ("atif", changed("atif", "logprobs", [0.0]), "turn 2: 1 logprobs for 3 sampled tokens"),
        ("training-trace", {"turns": []}, "without a token to train on"),
        ("training-trace", changed("training-trace", "prompt_token_ids", []), "turn 2: no prompt_token_ids"),
        ("atif", of_models("small", "large"), "step 6 is of the model 'large', and the agent's is 'small'"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, format: TraceFormat, trace: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"traces\.jsonl:2: .*{message}"):
        read(tmp_path, format, written(format), trace)


def test_prompts_of_a_trace_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the format 'atif' has its prompts; leave out prompt_column"):
        read(tmp_path, "atif", written("atif"), system_prompt="Be brief.")


def test_ids_of_another_model_name_the_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None)
    trace = written("training-trace", **TEXT)
    [row] = read(tmp_path, "training-trace", trace)
    encoded = tokens_of_row(row, "completion", tokenizer)
    assert encoded is not None
    check_ids(encoded, row, 120)
    with pytest.raises(ConfigError, match=r"traces\.jsonl:1': has ids from 5 to 119, and the model has 119"):
        check_ids(encoded, row, 119)
    trace["turns"][0]["response"]["choices"][0]["text"] = "three"
    [row] = read(tmp_path, "training-trace", trace)
    with pytest.raises(ConfigError, match=r"traces\.jsonl:1': is not the text of the column 'completion'"):
        tokens_of_row(row, "completion", tokenizer)
