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


@torch.no_grad()
def accuracy(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], end_id: int, *, sample: bool = True
) -> float:
    """The share of rows answered exactly: sampled at temperature 1, or greedily."""
    choice = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}  # top_k is 50 unless said
    right = 0
    for start in range(0, len(rows), 256):
        chunk = rows[start : start + 256]
        prompts = tokenizer(
            [row["prompt"] for row in chunk], padding=True, padding_side="left", return_tensors="pt"
        )
        ids = prompts["input_ids"]
        output = model.generate(
            input_ids=ids,
            attention_mask=prompts["attention_mask"],
            max_new_tokens=32,
            **choice,
        )
        for row, tokens in zip(chunk, output[:, ids.shape[1] :].tolist(), strict=True):
            end = tokens.index(end_id) if end_id in tokens else None
            right += end is not None and tokenizer.decode(tokens[:end]) == row["answer"]
    return right / len(rows)


def test_rows_are_the_scripts_and_apart(script: ModuleType) -> None:
    train, heldout = rows_of("train.jsonl"), rows_of("heldout.jsonl")
    assert (train, heldout) == script.make_rows(0)
    assert len(heldout) >= 1024
    unseen = {row["prompt"] for row in heldout}
    assert not {row["prompt"] for row in train} & unseen
    pairs = rows_of("pairs.jsonl")
    assert pairs == script.make_pairs(unseen, slip=0.15, count=script.NUM_PAIRS, seed=0)
    assert not {row["prompt"] for row in pairs} & unseen
    right = {row["prompt"]: row["answer"] for row in train}
    assert all(row["chosen"] == right.get(row["prompt"], row["chosen"]) != row["rejected"] for row in pairs)
    shown = script.make_demonstrations(unseen, slip=0.15, count=1000, seed=0)
    assert not {row["prompt"] for row in shown} & unseen


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
    assert 0.40 <= accuracy(model, tokenizer, rows, script.END_ID) <= 0.56  # 0.48; a deviation is 0.022
    assert accuracy(model, tokenizer, rows[:128], script.END_ID, sample=False) >= 0.95
