r"""python make_model.py [--out DIR] [--demonstrations N] [--overlook P] [--seed N]: draw images, write rows.

Without options the script draws the images of run.yaml and writes its rows, in seconds. With the option
`--demonstrations` it also writes demonstrations with images of their own, a tokenizer, and an untrained
model. Supervised training by stretto then makes the model:

    python examples/vision/make_model.py --demonstrations 8000
    stretto run examples/vision/sft.yaml out=runs/vision-sft
    cp runs/vision-sft/checkpoints/step-001000/model/* examples/vision/model/

An image has four cells, most with a shape in them: a circle, square or triangle, red, green or blue, large
or small. The prompt names a colour: `red shapes?` after the image. The answer is their number.

The model is a Qwen2.5-VL of 0.4 M parameters. A cell of the image becomes one token. The demonstrations that
it imitates have a systematic error: the teacher overlooks each small shape with probability `overlook` (0.7).
So the model's most likely answer leaves the small shapes out, and decoded greedily it is right only where the
colour has none. Sampled at temperature 1 it sometimes counts them, which is enough for a reward to teach it
to do so always.

The images of training rows, held-out rows and demonstrations are drawn from different seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from stretto.user_code.importable import load_module

quickstart = load_module(str(Path(__file__).parent.parent / "quickstart" / "make_model.py"))

NUM_TRAIN, NUM_HELDOUT = 1024, 256  # images; two or three rows each
SIDE, CELL = 2, 28  # cells in a row; pixels of a cell, which are one token: 2 x 2 patches of 14 x 14
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SHAPES = ("circle", "square", "triangle")
FILLED, SMALL = 0.85, 0.45  # probability that a cell has a shape, and that a shape is small
RADII = {"large": (9, 11), "small": (5, 6)}  # from, to; in pixels
SHIFT = 2  # pixels by which a shape may be off the middle of its cell

VISION_START, VISION_END, IMAGE, VIDEO = SPECIAL = [
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
# Turns one after the other, as in the quickstart, with a placeholder for each image.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    + VISION_START
    + IMAGE
    + VISION_END
    + "{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Shape:
    """What a cell of an image shows."""

    name: str
    colour: str
    size: str


def choose_shapes(rng: random.Random) -> list[Shape | None]:
    """Choose what the cells show, row by row; None is an empty cell."""
    cells: list[Shape | None] = [None] * SIDE**2
    while not any(cells):
        for cell in range(len(cells)):
            size = "small" if rng.random() < SMALL else "large"
            shape = Shape(rng.choice(SHAPES), rng.choice([*COLOURS]), size)
            cells[cell] = shape if rng.random() < FILLED else None
    return cells


def draw(cells: Sequence[Shape | None], rng: random.Random) -> Image.Image:
    """Draw the shapes, each with a radius, a place in its cell and a tone of its own."""
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "gray")  # close to the mean of the processor
    pen = ImageDraw.Draw(image)
    for cell, shape in enumerate(cells):
        if shape is None:
            continue
        radius = rng.randint(*RADII[shape.size])
        row, column = divmod(cell, SIDE)
        x, y = (at * CELL + CELL // 2 + rng.randint(-SHIFT, SHIFT) for at in (column, row))
        box = (x - radius, y - radius, x + radius, y + radius)
        tone = tuple(part + rng.randint(-30, 30) for part in COLOURS[shape.colour])
        if shape.name == "circle":
            pen.ellipse(box, fill=tone)
        elif shape.name == "square":
            pen.rectangle(box, fill=tone)
        else:
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=tone)
    return image


def count_shapes(
    cells: Sequence[Shape | None], colour: str, rng: random.Random | None = None, overlook: float = 0.0
) -> str:
    """The number of a colour's shapes; each small one is overlooked with a probability."""
    shapes = [shape for shape in cells if shape and shape.colour == colour]
    return str(sum(not (rng and shape.size == "small" and rng.random() < overlook) for shape in shapes))


def make_rows(name: str, count: int, seed: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Choose `count` images and return a row for each of their colours. Draw them if there is a folder."""
    return [
        row_of(colour, file) | {"answer": count_shapes(cells, colour)}
        for cells, file in choose_images(name, count, seed, folder)
        for colour in colours_of(cells)
    ]


def make_demonstrations(
    count: int, seed: int, folder: Path | None = None, *, overlook: float
) -> list[dict[str, Any]]:
    """The same rows, with the answers of the teacher."""
    rng = random.Random(f"teacher {seed}")
    rows: list[dict[str, Any]] = []
    for cells, file in choose_images("demonstration", count, seed, folder):
        for colour in colours_of(cells):
            rows.append(row_of(colour, file) | {"completion": count_shapes(cells, colour, rng, overlook)})
    return rows


def choose_images(
    name: str, count: int, seed: int, folder: Path | None
) -> Iterator[tuple[list[Shape | None], str]]:
    """Yield the shapes of images, each with its file. Draw them if there is a folder."""
    rng = random.Random(f"{name} {seed}")
    for number in range(count):
        cells, file = choose_shapes(rng), f"images/{name}-{number:05d}.png"
        drawing = random.Random(rng.random())
        if folder:
            draw(cells, drawing).save(folder / file)
        yield cells, file


def colours_of(cells: Sequence[Shape | None]) -> list[str]:
    return [colour for colour in COLOURS if any(shape and shape.colour == colour for shape in cells)]


def row_of(colour: str, file: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"<image>{colour} shapes?"}]
    return {"id": f"{Path(file).stem}-{colour}", "prompt": prompt, "images": [file]}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The quickstart's tokenizer, with a token for each word of the task and those that stand for images."""
    tokenizer: PreTrainedTokenizerFast = quickstart.make_tokenizer()
    tokenizer.add_tokens([*COLOURS, "shapes"])
    tokenizer.add_special_tokens({"additional_special_tokens": [quickstart.TURN, *SPECIAL]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor() -> Qwen2VLImageProcessorPil:
    """Make the image processor, which brings every image to the size of the task's."""
    pixels = (SIDE * CELL) ** 2
    return Qwen2VLImageProcessorPil(
        patch_size=CELL // 2, merge_size=2, size={"shortest_edge": pixels, "longest_edge": pixels}
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    vocabulary = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,  # of dimension 32: vLLM on CPU refuses 16
            "num_key_value_heads": 2,
            "max_position_embeddings": quickstart.MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.04,
            "bos_token_id": None,
            "eos_token_id": quickstart.END_ID,
            "pad_token_id": quickstart.PAD_ID,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "fullatt_block_indexes": [0, 1],
            "initializer_range": 0.04,
        },
        tie_word_embeddings=True,
        image_token_id=vocabulary[IMAGE],
        video_token_id=vocabulary[VIDEO],
        vision_start_token_id=vocabulary[VISION_START],
        vision_end_token_id=vocabulary[VISION_END],
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=quickstart.END_ID,
        pad_token_id=quickstart.PAD_ID,
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the images of the vision example, and write its rows.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where everything goes")
    parser.add_argument("--demonstrations", type=int, default=0, help="images of demonstrations")
    parser.add_argument(
        "--overlook", type=float, default=0.7, help="how often the teacher overlooks a small shape"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        rows = make_rows(name, count, args.seed, args.out)
        quickstart.write_rows(args.out / f"{name}.jsonl", rows)
        print(f"{args.out / name}.jsonl: {len(rows):,} rows, {count:,} images")
    if not args.demonstrations:
        return
    torch.manual_seed(args.seed)
    rows = make_demonstrations(args.demonstrations, args.seed, args.out, overlook=args.overlook)
    quickstart.write_rows(args.out / "demonstrations.jsonl", rows)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    for part in (model, tokenizer, make_processor()):
        part.save_pretrained(args.out / "untrained")
    print(f"{args.out / 'untrained'}: {model.num_parameters():,} parameters; {len(rows):,} demonstrations")


if __name__ == "__main__":
    main()
