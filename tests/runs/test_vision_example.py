"""The files of examples/vision are what its make_model.py says they are."""

import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from commands import output_of
from patience import patience
from stretto.models.vision import Vision
from stretto.user_code.importable import load_module

FOLDER = Path(__file__).parents[2] / "examples" / "vision"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(str(FOLDER / "make_model.py"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images and rows of run.yaml, and with a few demonstrations."""
    folder = tmp_path_factory.mktemp("vision")
    command = [sys.executable, str(FOLDER / "make_model.py"), "--out", str(folder), "--demonstrations", "10"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_rows_are_the_scripts_and_their_images_apart(script: ModuleType, made: Path) -> None:
    images: dict[str, set[bytes]] = {}
    for name, count in (("train", script.NUM_TRAIN), ("heldout", script.NUM_HELDOUT)):
        rows = rows_of(made / f"{name}.jsonl")
        assert rows == script.make_rows(name, count, 0)
        files = {file for row in rows for file in row["images"]}
        images[name] = {Image.open(made / file).tobytes() for file in files}
        assert len(images[name]) == len(files) == count
    assert not images["train"] & images["heldout"]
    assert (made / "untrained" / "model.safetensors").is_file()
    assert len({row["images"][0] for row in rows_of(made / "demonstrations.jsonl")}) == 10


def test_answers_count_the_shapes_of_the_colour(script: ModuleType) -> None:
    circle, square = script.Shape("circle", "red", "small"), script.Shape("square", "red", "large")
    cells = [square, script.Shape("circle", "blue", "large"), None, circle]
    assert [script.count_shapes(cells, colour) for colour in ("red", "blue", "green")] == ["2", "1", "0"]


def test_demonstrations_overlook_small_shapes_and_nothing_else(script: ModuleType) -> None:
    teacher, right, large = (
        np.array([int(row["completion"]) for row in script.make_demonstrations(2000, 0, overlook=overlook)])
        for overlook in (0.7, 0.0, 1.0)
    )
    overlooked = (right - teacher).sum() / (right - large).sum()
    assert 0.67 <= overlooked <= 0.73  # 0.7; a deviation is 0.008
    assert (large <= teacher).all()
    assert (teacher <= right).all()


@pytest.mark.slow
def test_the_processor_makes_a_token_of_each_cell(script: ModuleType, made: Path) -> None:
    vision = Vision(str(FOLDER / "model"))
    row = rows_of(made / "train.jsonl")[0]
    with Image.open(made / row["images"][0]) as image:
        seen = vision.see(row["prompt"], [image])
    assert int((seen.ids == vision.image_token).sum()) == script.SIDE**2
    assert vision.tokenizer.decode(seen.ids[-4:]) == row["prompt"][0]["content"].removeprefix("<image>")
    answer = vision.tokenizer.encode_text(row["answer"])
    assert len(answer) == 1
    assert vision.tokenizer.decode(answer) == row["answer"]


@torch.no_grad()
def answers_of(rows: list[dict[str, Any]], folder: Path, end_id: int, *, sample: bool) -> list[str]:
    """The model's answer to each row, sampled at temperature 1 or greedily."""
    vision = Vision(str(FOLDER / "model"))
    model: Any = AutoModelForImageTextToText.from_pretrained(FOLDER / "model", dtype=torch.float32).eval()
    seen = [vision.see(row["prompt"], [Image.open(folder / file) for file in row["images"]]) for row in rows]
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in seen])).long()  # all of one length
    media = {
        name: torch.from_numpy(np.concatenate([each.media[name] for each in seen])) for name in seen[0].media
    }
    choice = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}  # top_k is 50 unless said
    kinds, mask = (ids == vision.image_token).long(), torch.ones_like(ids)
    output = model.generate(
        input_ids=ids, attention_mask=mask, mm_token_type_ids=kinds, max_new_tokens=4, **media, **choice
    )
    answers = [tokens[: [*tokens, end_id].index(end_id)] for tokens in output[:, ids.shape[1] :].tolist()]
    return [vision.tokenizer.decode(np.array(answer)) for answer in answers]


@pytest.mark.slow
def test_the_model_overlooks_small_shapes_as_its_teacher_did(script: ModuleType, made: Path) -> None:
    assert sum(file.stat().st_size for file in (FOLDER / "model").iterdir()) < 2**21
    rows = rows_of(made / "heldout.jsonl")
    end_id = script.quickstart.END_ID

    def accuracy(expected: list[str], *, sample: bool) -> float:
        answers = answers_of(rows, made, end_id, sample=sample)
        return fmean(one == other for one, other in zip(answers, expected, strict=True))

    torch.manual_seed(0)
    right = [row["answer"] for row in rows]
    assert 0.3 <= accuracy(right, sample=False) <= 0.5
    assert accuracy(right, sample=True) >= 0.3
    rng = random.Random(0)
    overlooked = [
        script.count_shapes(cells, colour, rng, 1.0)
        for cells, _ in script.choose_images("heldout", script.NUM_HELDOUT, 0, None)
        for colour in script.colours_of(cells)
    ]
    assert accuracy(overlooked, sample=False) >= 0.7


@pytest.mark.nightly
@pytest.mark.timeout(patience(600))
def test_the_run_teaches_the_model_to_see_small_shapes(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = [f"dataset.path={made / 'train.jsonl'}", f"evaluation.dataset.path={made / 'heldout.jsonl'}"]
    output_of("run", FOLDER / "run.yaml", f"out={out}", "steps=20", *rows, cwd=FOLDER.parent.parent)
    first, *_, last = json.loads((out / "summary.json").read_text())["evaluation"]
    assert first["accuracy"] <= 0.5
    assert last["accuracy"] >= 0.8  # 0.97 in three seeds

    figures = tmp_path / "figures.json"
    output_of("evaluate", out, "--out", tmp_path / "evaluated", "--json", figures, cwd=FOLDER.parent.parent)
    assert json.loads(figures.read_text())["avg"]["mean"] == pytest.approx(last["accuracy"], abs=0.01)
