"""The quickstart's files are what examples/quickstart/make_model.py says they are."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent.parent / "examples" / "quickstart"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_model", FOLDER / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_rows_are_the_scripts_and_apart(script: ModuleType) -> None:
    train, heldout = rows_of("train.jsonl"), rows_of("heldout.jsonl")
    assert (train, heldout) == script.make_rows(0)
    assert len(heldout) >= 1024
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}


def test_every_answer_is_the_running_sum() -> None:
    lengths = set[int]()
    for row in rows_of("train.jsonl") + rows_of("heldout.jsonl"):
        terms = [int(term) for term in row["prompt"].removesuffix("=").split("+")]
        assert row["answer"].split() == [str(sum(terms[: n + 1])) for n in range(1, len(terms))]
        lengths.add(len(row["answer"]))
    assert min(lengths) <= 2
    assert max(lengths) >= 24  # lengths vary widely


def test_the_tokenizer_writes_back_what_it_read() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    text = "3+5+9=8 17\nEvery printable character: ~!@#$%^&*()_"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "3+5="}], tokenize=False)
    assert chat == "3+5="


def test_half_its_answers_are_right(script: ModuleType) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32).eval()
    assert model.config.hidden_size // model.config.num_attention_heads == 32  # vLLM on CPU refuses 16
    assert sum(file.stat().st_size for file in (FOLDER / "model").iterdir()) < 2**20
    rows = random.Random(0).sample(rows_of("heldout.jsonl"), 512)
    assert 0.40 <= script.accuracy(model, tokenizer, rows) <= 0.56  # 0.48; a deviation is 0.022
    assert script.accuracy(model, tokenizer, rows[:128], sample=False) >= 0.95
