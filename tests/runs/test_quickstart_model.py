"""The quickstart's files are what examples/quickstart/make_model.py says they are."""

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import output_of
from stretto.user_code.importable import load_module

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(str(FOLDER / "make_model.py"))


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
        texts = [row["prompt"] for row in chunk]
        prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32, **choice)
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
    assert pairs == script.make_pairs(unseen, forget=0.6, count=script.NUM_PAIRS, seed=0)
    assert not {row["prompt"] for row in pairs} & unseen
    right = {row["prompt"]: row["answer"] for row in train}
    assert all(row["chosen"] == right.get(row["prompt"], row["chosen"]) != row["rejected"] for row in pairs)
    shown = script.make_demonstrations(unseen, forget=0.6, count=1000, seed=0)
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


def test_demonstrations_forget_carries_and_nothing_else(script: ModuleType) -> None:
    right = forgotten = 0
    for row in script.make_demonstrations(set(), forget=0.6, count=2000, seed=0):
        first, *terms = (int(term) for term in row["prompt"].removesuffix("=").split("+"))
        before = first
        for term, written in zip(terms, map(int, row["completion"].split()), strict=True):
            carry = before % 10 + term >= 10
            assert written in {before + term, before + term - 10 * carry}
            right += carry and written == before + term
            forgotten += written != before + term
            before = written
    assert 0.57 <= forgotten / (right + forgotten) <= 0.63  # 0.6; a deviation is 0.007


def test_the_model_forgets_carries_as_its_teacher_did(script: ModuleType) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32).eval()
    assert model.config.hidden_size // model.config.num_attention_heads == 32  # vLLM on CPU refuses 16
    assert sum(file.stat().st_size for file in (FOLDER / "model").iterdir()) < 2**20
    rows = random.Random(0).sample(rows_of("heldout.jsonl"), 512)
    assert 0.11 <= accuracy(model, tokenizer, rows, script.END_ID) <= 0.25  # 0.18; a deviation is 0.017
    assert accuracy(model, tokenizer, rows, script.END_ID, sample=False) <= 0.1
    faulty = [{**row, "answer": without_carries(row["prompt"])} for row in rows[:128]]
    assert accuracy(model, tokenizer, faulty, script.END_ID, sample=False) >= 0.57  # 0.71


def without_carries(prompt: str) -> str:
    terms = [int(term) for term in prompt.removesuffix("=").split("+")]
    return " ".join(str(sum(terms[: n + 1]) % 10) for n in range(1, len(terms)))


@pytest.mark.slow
def test_the_quickstart_teaches_the_model_to_carry(tmp_path: Path) -> None:
    document = yaml.safe_load((FOLDER / "run.yaml").read_text())
    assert set(document["training"]) == {"use", "lr", "threads"}  # the engine's own settings are enough
    assert document["evaluation"]["sampling"]["temperature"] == 0
    out = tmp_path / "out"
    fewer = ("steps=60", "evaluation.every=30")  # of 200 steps, after which it is 0.911
    output_of("run", FOLDER / "run.yaml", f"out={out}", *fewer, cwd=FOLDER.parent.parent)
    first, *_, last = json.loads((out / "summary.json").read_text())["evaluation"]
    assert first["accuracy"] <= 0.1
    assert last["accuracy"] >= 0.8
