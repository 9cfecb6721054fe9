"""`stretto samples`: what it finds and how it shows it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet
from typer.testing import CliRunner, Result

from kept_samples import Kept
from sample_messages import done, failed, record, trained, trajectories
from stretto import Context
from stretto.bus.messages.tickets import KeptText
from stretto.cli.main import app
from stretto.errors import ConfigError
from stretto_jsonl import JsonLines, JsonLinesConfig

CALLS = [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]
IMAGES = [{"type": "image", "sha256": name} for name in ("1a2b" * 16, "../../key")]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "what is 1+1?"},
    {"role": "assistant", "content": "<think>a tool", "tool_calls": CALLS},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "assistant", "content": "2\x1b[2J\u2028\u2029\x85"},
    {"role": "user", "content": [{"type": "text", "text": "see "}, *IMAGES]},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups: two trained, of which one has a conversation, and one that failed."""
    kept_run = Kept(tmp_path_factory.mktemp("run"))
    for ticket in (0, 1):
        bundle, kept = trajectories(ticket, reward=ticket / 2), record(ticket)
        chat = msgspec.json.encode(CHAT).decode() if ticket else ""
        texts = tuple(KeptText(None, text.text, chat) for text in kept.texts)
        kept = msgspec.structs.replace(kept, texts=texts)
        figures = trained([f"{ticket}/1/0", f"{ticket}/1/1"], 3 + ticket)
        kept_run.add(bundle, kept, done(bundle, kept), figures)
    kept_run.add(record(2), failed(2, "RewardError: \x1b[31mno"))
    kept_run.flush()
    return kept_run.folder


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["samples", *arguments])


def test_samples_as_text(run: Path) -> None:
    shown = ask(str(run), "--step", "4").stdout
    assert "0/1/0  trained in step 4 at staleness 3  reward 0" in shown
    assert "answer: 2" in shown
    assert "    answer 1 of 0" in shown
    assert "1/1/0" not in shown


def test_a_conversation_shows_its_tool_calls_and_no_control_characters(run: Path) -> None:
    shown = ask(str(run), "--ticket", "1").stdout
    assert '[assistant]\n      <think>a tool\n      calls {"name": "add"' in shown.replace("  [", "[")
    assert "[tool add]" in shown
    assert "2\\x1b[2J" in shown
    assert 'see [image 1a2b1a2b…]{"type": "image", "sha256": "../../key"}' in shown.replace("\n", "")
    assert "\x1b" not in shown


def test_a_group_side_by_side(run: Path) -> None:
    shown = ask(str(run), "--text", "answer 1 of 0", "--group").stdout
    [line] = [line for line in shown.splitlines() if "answer 0 of 0" in line]
    assert "answer 1 of 0" in line


def test_failed_tickets_show_their_reason(run: Path) -> None:
    shown = ask(str(run), "--failed").stdout
    assert "2/1  failed: RewardError: \\x1b[31mno" in shown


def test_samples_as_json_lines_and_parquet(run: Path, tmp_path: Path) -> None:
    lines = ask(str(run), "--format", "jsonl", "--reward", "0:0.5", "--order=-reward", "--limit", "3").stdout
    rows = [json.loads(line) for line in lines.split("\n")[:-1]]
    assert [row["id"] for row in rows] == ["1/1/0", "1/1/1", "0/1/0"]
    assert rows[0]["messages"] == CHAT
    assert "tokens" not in rows[0]
    file = tmp_path / "some.parquet"
    assert ask(str(run), "--format", "parquet", "--tokens", "--output", str(file)).exit_code == 0
    table = parquet.read_table(file).to_pylist()
    assert table[0]["advantages"] == [None, None, 0.5, 0.5]
    assert json.loads(table[0]["dataset_row"]) == {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize("format", ["training-trace", "atif"])
def test_samples_in_the_formats_of_other_tools(run: Path, tmp_path: Path, format: Any) -> None:
    done = ask(str(run), "--format", format, "--output", str(file := tmp_path / "traces.jsonl"))
    assert done.stderr == "left out 1 samples without tokens, or with images\n"
    rows = JsonLines(
        JsonLinesConfig(use="jsonl", path=str(file), format=format), Context(run="r", name="n", seed=1)
    )
    found = [rows[index] for index in range(len(rows))]
    assert [(row["tokens"], row["loss_mask"]) for row in found] == [([1, 2, 3, 4], [0, 0, 1, 1])] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "a:b"], "--step 'a:b': expected A:B"),
        (["--outcome", "great"], "--outcome 'great'; accepted: trained, filtered, expired"),
        (["--outcome", "traned"], "did you mean 'trained'?"),
        (["--purpose", "both"], "--purpose 'both'; accepted: train, eval"),
        (["--tokens"], "--tokens goes with --format jsonl"),
        (["--format", "xml"], "expected text, jsonl, parquet, training-trace or atif"),
        (["--format", "parquet"], "needs --output FILE"),
        (["--order", "colour"], "cannot be ordered by 'colour'"),
    ],
)
def test_what_cannot_be_asked(run: Path, arguments: list[str], message: str) -> None:
    result = ask(str(run), *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_no_sample_fits_a_step_that_has_none(run: Path) -> None:
    said = ask(str(run), "--step", "99").stderr
    assert said == "no sample fits; samples of training are kept from step 4 to 5\n"
    assert ask(str(run), "--step", "99", "--purpose", "eval").stderr == "no sample fits\n"
    assert ask(str(run), "--text", "nowhere").stderr == "no sample fits\n"


def test_a_folder_without_samples(tmp_path: Path) -> None:
    assert "holds no samples" in str(ask(str(tmp_path)).exception)
