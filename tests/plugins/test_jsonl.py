"""The dataset `jsonl`, and prompts made of columns."""

import gzip
import hashlib
import json
import os
import tracemalloc
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto import Context
from stretto.errors import ConfigError
from stretto.user_code.plain_data import decode_row, encode_row
from stretto_hf import HFConfig, HFDataset
from stretto_jsonl import JsonLines, JsonLinesConfig

CONTEXT = Context(run="r", name="n", seed=1)


def test_rows_are_read_by_index(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "n": 1}\n\n  \n{"question": "b", "n": 2}')
    rows = JsonLines(JsonLinesConfig(use="jsonl", path=str(file), prompt_column="question"), CONTEXT)
    found = [rows[index] for index in range(len(rows))]
    assert found == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: no column 'prompt'; its columns: question, n"):
        JsonLines(JsonLinesConfig(use="jsonl", path=str(file)), CONTEXT)[0]


def prompts(tmp_path: Path, row: Mapping[str, object], **options: object) -> Mapping[str, object]:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    section = {"use": "jsonl", "path": str(tmp_path / "rows.jsonl"), **options}
    return JsonLines(msgspec.convert(section, JsonLinesConfig), CONTEXT)[0]


def test_a_prompt_is_made_of_plain_columns(tmp_path: Path) -> None:
    row: dict[str, object] = {"question": "1+1?", "n": 3, "a b": "{x}"}
    template = "{{{n}}} {a b}\nQuestion: {question}\nAnswer:"
    asked = "{3} {x}\nQuestion: 1+1?\nAnswer:"
    assert prompts(tmp_path, row, prompt_template=template) == {**row, "prompt": asked}
    user, system = {"role": "user", "content": asked}, {"role": "system", "content": "Be brief."}
    chat = {"prompt_template": template, "system_prompt": "Be brief."}
    assert prompts(tmp_path, row, **chat) == {**row, "prompt": [system, user]}
    assert prompts(tmp_path, {"q": asked}, prompt_column="q", chat=True) == {"prompt": [user]}
    turns = {"prompt": [user]}
    assert prompts(tmp_path, turns, system_prompt="Be brief.") == {"prompt": [system, user]}


def test_a_prompt_that_cannot_be_made_of_the_columns_is_refused(tmp_path: Path) -> None:
    row: dict[str, object] = {"question": "?", "n": [1]}
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: prompt_template: no column 'qestion'; its columns: q"
    ):
        prompts(tmp_path, row, prompt_template="{qestion}")
    with pytest.raises(ConfigError, match="column 'n': expected text or a number, found list"):
        prompts(tmp_path, row, prompt_template="{n}")
    with pytest.raises(ConfigError, match="has a system message of its own"):
        prompts(tmp_path, {"prompt": [{"role": "system", "content": ""}]}, system_prompt="Be brief.")
    for wrong in ("{question", "question}", "{}", "{question:>9}", "{question!r}"):
        with pytest.raises(
            msgspec.ValidationError, match=r"prompt_template: .* a brace itself is written \{\{"
        ):
            prompts(tmp_path, row, prompt_template=wrong)
    with pytest.raises(msgspec.ValidationError, match="prompt_template and prompt_column are both given"):
        prompts(tmp_path, row, prompt_template="{n}", prompt_column="n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a", "n": NaN}', "the column 'n' has NaN or an infinity"),
        (b'{"prompt": "NaN", "deep": {"n": [1, -Infinity]}}', "the column 'deep' has NaN or an infinity"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "compressed by gzip; unpack it first: gunzip -k FILE"),
        (b'{"prompt": "\\ud83d\\ude00 \\ud83d!"}', r"\\ud83d is half of a character"),
        (b'{"prompt": "\\uDE00"}', r"\\uDE00 is half of a character"),
        ('{"prompt": "a"}'.encode("utf-16"), "as a file in UTF-16; save it as UTF-8"),
        (b"PAR1\x15\x04", "the file is Parquet; use the dataset 'hf'"),
    ],
)
def test_a_line_that_is_no_json_is_refused_with_its_place(line: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(line)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: not a JSON object in UTF-8: .*{words}"):
        JsonLines(JsonLinesConfig(use="jsonl", path=str(tmp_path / "rows.jsonl")), CONTEXT)


def test_a_key_that_stands_twice_is_refused_also_late_in_a_long_file(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": [{"role": "user"}, {"role": '"role":'}]})] * 2000
    for line in (1999, 7):
        rows[line] = '{"prompt": [{"role": "user", "role": "system"}]}'
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        with pytest.raises(ConfigError, match=rf"rows.jsonl:{line + 1}: an object has the key 'role' twice"):
            JsonLines(JsonLinesConfig(use="jsonl", path=str(tmp_path / "rows.jsonl")), CONTEXT)[line]


def test_rewards_get_the_values_of_a_row(tmp_path: Path) -> None:
    """Also those that msgpack does not have: integers of any size, dates, decimals, bytes."""
    row = prompts(tmp_path, {"prompt": "a", "answer": 10**25 + 7, "deep": [{"n": -(2**64)}]})
    assert decode_row(encode_row(row)) == {"prompt": "a", "answer": 10**25 + 7, "deep": [{"n": -(2**64)}]}
    day, noon = date(2026, 1, 2), datetime(2026, 1, 2, 12, tzinfo=UTC)
    values = {"day": day, "noon": noon, "price": Decimal("1.50"), "for": timedelta(5), "raw": b"\xff"}
    assert decode_row(encode_row(values)) == values
    assert type(decode_row(encode_row(values))["price"]) is Decimal


DATASETS = [(JsonLines, JsonLinesConfig), (HFDataset, HFConfig)]
HUMAN, GPT = {"from": "human", "value": "1+1?", "weight": 0}, {"from": "gpt", "value": "2"}
MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("before", [[], [HUMAN, GPT]])
def test_shared_chats_are_refused_with_the_line_that_converts_them(
    tmp_path: Path, dataset: Any, column: str, before: list[Any]
) -> None:
    row: dict[str, Any] = {"id": "r", column: [*before, HUMAN, GPT]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    make, config = dataset
    keys = {} if column == "conversations" else {"prompt_column": column}
    with pytest.raises(ConfigError, match=r"rows.jsonl.*in ShareGPT's form, `from` and `value`") as error:
        make(config(use="x", path=str(tmp_path / "rows.jsonl"), **keys), CONTEXT)[0]
    exec(str(error.value).partition("converts a row: ")[2], {"row": row})
    prompt = [*(MESSAGES if before else []), MESSAGES[0]]
    assert prompts(tmp_path, row) == {"id": "r", "prompt": prompt, "completion": [MESSAGES[1]]}


@pytest.mark.parametrize("dataset", DATASETS)
def test_lines_end_at_line_feeds_only(tmp_path: Path, dataset: Any) -> None:
    rows = [{"prompt": f"{n}\u2028a\u2029b\x85c", "n": n} for n in range(3)]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_text("\r\n".join(lines), newline="")
    make, config = dataset
    found = make(config(use="x", path=str(tmp_path / "rows.jsonl")), CONTEXT)
    assert [found[index] for index in range(len(found))] == rows


def many_rows(tmp_path: Path, worker: str, column: str = "prompt") -> JsonLines:
    """Open a file of 10,000 rows and as many blank lines in a process of a run."""
    file, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    if not file.exists():
        file.write_text("".join(f'{{"prompt": "a", "n": {n + 10000}}}\r\n \n' for n in range(10000)))
    folder.mkdir(exist_ok=True)
    context = Context(run="r", name="n", seed=1, folder=str(folder), worker=worker)
    return JsonLines(JsonLinesConfig(use="jsonl", path=str(file), prompt_column=column), context)


def check_rows(rows: JsonLines, tmp_path: Path) -> None:
    content = (tmp_path / "rows.jsonl").read_bytes()
    assert [rows[n] for n in range(len(rows))] == [
        json.loads(line) for line in content.splitlines() if line.strip()
    ]
    assert rows.fingerprint == hashlib.sha256(content).hexdigest()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_workers_share_the_positions_of_rows_that_the_kernel_has_found(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        processes = [many_rows(tmp_path, worker) for worker in ("kernel", "r-0", "r-1", "r-2", "r-3")]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 60 * 10000  # 60 MB for 10^6 rows
    for rows in processes:
        check_rows(rows, tmp_path)
    with pytest.raises(ConfigError, match=r"rows.jsonl:19999: no column 'q'"):
        many_rows(tmp_path, "r-4", column="q")[9999]
    [index] = (tmp_path / "run" / "rows").iterdir()
    inode = index.stat().st_ino
    check_rows(many_rows(tmp_path, "kernel"), tmp_path)
    assert index.stat().st_ino == inode, "workers on other machines lose the file that they read"


@pytest.mark.parametrize("damage", ["cut", "empty", "other positions", "pipe"])
def test_a_damaged_index_is_not_used(damage: str, tmp_path: Path) -> None:
    many_rows(tmp_path, "kernel")
    [index] = (tmp_path / "run" / "rows").iterdir()
    assert index.stat().st_mode & 0o777 == 0o600
    content = index.read_bytes()
    if damage == "pipe":
        index.unlink()
        os.mkfifo(index)
    else:
        cut = {"cut": content[:-32], "empty": b"", "other positions": content[:-32] + content[-64:-32]}
        index.write_bytes(cut[damage])
    check_rows(many_rows(tmp_path, "r-0"), tmp_path)
    many_rows(tmp_path, "kernel")
    assert index.read_bytes() == content


def test_a_worker_sees_that_the_file_changed_to_one_of_the_same_size_and_time(tmp_path: Path) -> None:
    kernel, file = many_rows(tmp_path, "kernel"), tmp_path / "rows.jsonl"
    before = file.stat()
    file.write_bytes(b" " + file.read_bytes().replace(b"\r", b"", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    worker = many_rows(tmp_path, "r-0")
    assert worker.fingerprint != kernel.fingerprint
    check_rows(worker, tmp_path)


def test_positions_are_in_memory_if_the_folder_cannot_have_them(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rows").touch()
    check_rows(many_rows(tmp_path, "kernel"), tmp_path)
