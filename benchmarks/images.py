"""Bytes of images on the bus for each group, and images per second of the whole chain.

    python benchmarks/images.py

Each group of 8 answers has one image of 448 x 448 pixels, which no other group has. A rollout worker reads,
hashes and sends it; an engine fetches, decodes and preprocesses it and computes the prompt; the trainer
preprocesses it. The model is a Qwen2.5-VL with 0.05 M parameters in which such an image is 256 tokens, so the
figures are those of the chain and not of a model. Runs with prompts of text of the same length, whose groups
per second are the limit of the rest of the run, alternate with runs with PNG and JPEG files.

`bytes` are those of the files that engines received, for each group that was issued. `with each sample` is
computed: 8 times the mean size of a file. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.utils import logging as transformers_logging

from whole_runs import summary_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from vision_models import make_vision_model, never_sample_images

GROUP = 8
BATCH = 4
"""Groups of a step."""
WARM = 3
"""Steps before the measured ones."""
KINDS = ("text", "png", "jpeg")
SECTIONS = """\
name: images
model: {model}
algorithm: {{use: grpo, group_size: 8}}
training: {{use: torch, lr: 1.0e-5, micro_batch_tokens: 8192}}
inference: {{use: torch, slots: 32, context_length: 512}}
sampling: {{max_tokens: 4}}
workflow: single_turn
reward: {{use: function, function: {folder}/reward.py:score}}
dataset: {{use: jsonl, path: {folder}/{kind}.jsonl}}
queue: {{batch_size: 4, max_staleness: 2}}
samples: {{keep: none}}
launcher: local
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="steps of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--pixels", type=int, default=448, help="width and height of an image")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    print(f"{'round':>5} {'prompts':>7} {'bytes per group':>13} {'with each sample':>16} {'groups/s':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(folder, rows=(options.steps + 10) * BATCH, pixels=options.pixels)
        for number in range(1, options.rounds + 1):
            for kind in KINDS if number % 2 else reversed(KINDS):
                own = measure(folder, kind, folder / f"{kind}-{number}", options.steps)
                figures[kind].append(own)
                print(
                    f"{number:>5} {kind:>7} {own['bytes']:>13.0f} {own['with_each_sample']:>16.0f} "
                    f"{own['groups_per_s']:>8.2f}",
                    flush=True,
                )
    medians = {
        kind: {name: statistics.median(each[name] for each in own) for name in own[0]}
        for kind, own in figures.items()
    }
    result: dict[str, Any] = {
        "images_per_s": {kind: round(medians[kind]["groups_per_s"], 2) for kind in KINDS[1:]},
        "bytes_per_group": {kind: round(medians[kind]["bytes"]) for kind in KINDS[1:]},
        "bytes_ratio": {
            kind: round(medians[kind]["bytes"] / medians[kind]["with_each_sample"], 3) for kind in KINDS[1:]
        },
        "speed_ratio_to_text": {
            kind: round(medians[kind]["groups_per_s"] / medians["text"]["groups_per_s"], 3)
            for kind in KINDS[1:]
        },
    }
    print(json.dumps(result))


def write_files(folder: Path, *, rows: int, pixels: int) -> None:
    """Write the model, the reward, and the rows and images of each kind."""
    transformers_logging.disable_progress_bar()
    make_vision_model("qwen2_5_vl", folder / "model", patch=14, most_pixels=pixels**2, positions=512)
    never_sample_images(folder / "model")
    (folder / "reward.py").write_text(
        "def score(prompt, completion, **columns): return sum(map(ord, completion)) % 7\n"
    )
    length = (pixels // 28) ** 2 + 1
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number in range(rows):
        drawn = image(number, pixels)
        for kind in KINDS[1:]:
            name = f"{number}.{kind}"
            (folder / name).write_bytes(file_of(drawn, kind))
            asked = [{"role": "user", "content": "<image>how many?"}]
            lines[kind].append(json.dumps({"prompt": asked, "images": [name]}))
        asked = [{"role": "user", "content": f"{number} ".ljust(length, "x") + "how many?"}]
        lines["text"].append(json.dumps({"prompt": asked}))
    for kind, own in lines.items():
        (folder / f"{kind}.jsonl").write_text("\n".join(own) + "\n")


def image(seed: int, pixels: int) -> Image.Image:
    """Return an image that files compress about as well as photographs: soft shapes with a little noise."""
    generator = np.random.default_rng(seed)
    shapes = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    soft = np.asarray(shapes.resize((pixels, pixels), Image.Resampling.BICUBIC), np.float32)
    noisy = soft + generator.normal(0, 2, soft.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def file_of(drawn: Image.Image, kind: str) -> bytes:
    """Return the bytes of an image's file."""
    stream = io.BytesIO()
    drawn.save(stream, kind.upper(), **({"quality": 90} if kind == "jpeg" else {}))
    return stream.getvalue()


def measure(folder: Path, kind: str, out: Path, steps: int) -> dict[str, float]:
    """Return the figures of one run."""
    file = folder / f"{kind}.yaml"
    file.write_text(SECTIONS.format(model=folder / "model", folder=folder, kind=kind))
    summary = summary_of(file, out, f"steps={steps}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    lines = [line for line in lines if "ledger" in line][min(WARM, steps - 2) :]
    log = (out / "logs" / "inference-0.jsonl").read_bytes().splitlines()
    came = [event for event in map(json.loads, log) if event["event"] == "images came"]
    sizes = [each.stat().st_size for each in folder.glob(f"*.{kind}")] or [0]
    return {
        "bytes": sum(event["bytes"] for event in came) / summary["ledger"]["issued"],
        "with_each_sample": GROUP * sum(sizes) / len(sizes),
        "groups_per_s": BATCH * (len(lines) - 1) / (lines[-1]["time_s"] - lines[0]["time_s"]),
    }


if __name__ == "__main__":
    main()
