"""The tasks of `benchmarks/staleness.py`: rows, flawed demonstrations, and starting models trained on them.

`sums` is the quickstart's. The others have starting models of their own:

- `chains`: running sums of 2 to 16 terms, most of them short, a few long, so that the length of answers has a
  long tail. The answer goes through all partial sums, and only the last one is rewarded.
- `sorting`: the digits of a number in ascending order. The teacher of the starting model nearly always swaps
  two of them, so right answers are rare at first.
- `largest`: the largest of 4 to 8 digits. The teacher writes another one of them in three of five answers.
  Nothing was tuned on it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from stretto.user_code.importable import load_module

__all__ = ["TASKS", "Task", "last_result"]

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
NUM_TRAIN, NUM_HELDOUT, NUM_DEMONSTRATIONS = 6144, 512, 64_000
SFT_STEPS = 3000

# A prompt, its right answer, and what a flawed teacher writes.
Problem = tuple[str, str, str]


def chain(rng: random.Random) -> Problem:
    """`3+5+9=`, 17, `8 17`; the teacher forgets to add a term in one of ten steps."""
    count = min(16, int(2 * rng.paretovariate(1.2)))
    terms = [rng.randint(1, 9) for _ in range(count)]
    right, total, written = terms[0], terms[0], list[str]()
    for term in terms[1:]:
        right += term
        total += term if rng.random() > 0.1 else 0
        written.append(str(total))
    return "+".join(map(str, terms)) + "=", str(right), " ".join(written)


def sorting(rng: random.Random) -> Problem:
    """`sort 5271=`, 1257, `1527`; the teacher swaps two neighbours in nineteen of twenty answers."""
    digits = [rng.choice("0123456789") for _ in range(rng.randint(4, 8))]
    written = sorted(digits)
    places = [i for i in range(len(written) - 1) if written[i] != written[i + 1]]
    if places and rng.random() > 0.05:
        i = rng.choice(places)
        written[i], written[i + 1] = written[i + 1], written[i]
    return f"sort {''.join(digits)}=", "".join(sorted(digits)), "".join(written)


def largest(rng: random.Random) -> Problem:
    """`3+5+9+1=`, 9, `9`; the teacher writes any of the terms in three of five answers."""
    terms = [rng.randint(1, 9) for _ in range(rng.randint(4, 8))]
    written = rng.choice(terms) if rng.random() < 0.6 else max(terms)
    return "+".join(map(str, terms)) + "=", str(max(terms)), str(written)


def last_result(completion: str, answer: str) -> float:
    """Return 1 if the last number is the answer; a reward function for a run file."""
    return float(completion.split()[-1:] == [answer])


@dataclass(frozen=True)
class Task:
    """Rows, a starting model, and the settings that depend on them."""

    name: str
    lr: float
    """Learning rate that suits a synchronous run."""
    options: tuple[str, ...]
    """Overrides of `staleness.yaml`."""
    problem: Callable[[random.Random], Problem] | None = None
    """Draws a problem; None uses the quickstart's rows and model."""

    def overrides(self, work: Path, *, layers: int = 3) -> list[str]:
        """Return overrides of `staleness.yaml`, after `make` was called with the same arguments."""
        if self.problem is None:
            return list(self.options)
        folder = self._folder(work, layers)
        return [
            *self.options,
            f"model={folder / 'model'}",
            f"dataset.path={folder / 'train.jsonl'}",
            f"evaluation.dataset.path={folder / 'heldout.jsonl'}",
        ]

    def make(self, work: Path, *, layers: int = 3) -> None:
        """Write the rows and train the starting model on demonstrations, if they do not exist yet."""
        folder = self._folder(work, layers)
        if self.problem is None or (folder / "model").exists():
            return
        print(f"making the starting model of {folder.name}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        heldout = self._write_rows(folder)
        self._write_demonstrations(folder, heldout)
        _write_untrained(folder / "untrained", layers)
        command = [sys.executable, "-m", "stretto", "run", str(QUICKSTART / "sft.yaml")]
        shutil.rmtree(folder / "sft", ignore_errors=True)
        options = [
            f"out={folder / 'sft'}",
            f"model={folder / 'untrained'}",
            f"dataset.path={folder / 'demonstrations.jsonl'}",
            f"steps={SFT_STEPS}",
            "training.threads=1",
            "evaluation=null",
        ]
        subprocess.run([*command, *options], check=True, capture_output=True)
        trained = folder / "sft" / "checkpoints" / f"step-{SFT_STEPS:06d}" / "model"
        shutil.move(trained, folder / "model")

    def _folder(self, work: Path, layers: int) -> Path:
        return work / f"{self.name}-{layers}"

    def _write_rows(self, folder: Path) -> set[str]:
        """Write training and held-out rows, and return the held-out prompts."""
        assert self.problem is not None
        make_model = _make_model()
        rng, rows = random.Random(f"rows {self.name}"), dict[str, dict[str, str]]()
        while len(rows) < NUM_TRAIN + NUM_HELDOUT:
            prompt, answer, _ = self.problem(rng)
            rows[prompt] = {"prompt": prompt, "answer": answer}
        shuffled = list(rows.values())
        rng.shuffle(shuffled)  # short problems run out early, so the order of drawing is not random
        make_model.write_rows(folder / "train.jsonl", shuffled[:NUM_TRAIN])
        make_model.write_rows(folder / "heldout.jsonl", shuffled[NUM_TRAIN:])
        return {row["prompt"] for row in shuffled[NUM_TRAIN:]}

    def _write_demonstrations(self, folder: Path, heldout: set[str]) -> None:
        assert self.problem is not None
        rng, rows = random.Random(f"demonstrations {self.name}"), list[dict[str, str]]()
        while len(rows) < NUM_DEMONSTRATIONS:
            prompt, _, written = self.problem(rng)
            if prompt not in heldout:
                rows.append({"prompt": prompt, "completion": written})
        _make_model().write_rows(folder / "demonstrations.jsonl", rows)


def _make_model() -> ModuleType:
    """Load the script that makes the quickstart's model."""
    return load_module(str(QUICKSTART / "make_model.py"))


def _write_untrained(folder: Path, layers: int) -> None:
    """Write an untrained model with the quickstart's tokenizer and architecture, but `layers` layers."""
    import torch

    make_model = _make_model()
    torch.manual_seed(0)
    tokenizer = make_model.make_tokenizer()
    config = make_model.make_model(tokenizer).config
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    model = make_model.Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


TASKS = {
    task.name: task
    for task in (
        Task("sums", 2e-4, ()),
        Task(
            "chains",
            1e-4,
            ("sampling.max_tokens=64", f"reward={{use: function, function: {__file__}:last_result}}"),
            chain,
        ),
        Task("sorting", 2e-4, ("sampling.max_tokens=12",), sorting),
        Task("largest", 2e-4, ("sampling.max_tokens=8",), largest),
    )
}
