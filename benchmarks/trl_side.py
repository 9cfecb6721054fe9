"""TRL's side of `time_to_accuracy.py` and `real_model.py`. Its Python has TRL, and nothing of stretto.

    VENV/bin/python benchmarks/trl_side.py SETTINGS.json

The settings are fields of `Settings`. The script trains with `GRPOTrainer`. It writes into the folder `out`
the models `checkpoint-N` and the file `times.json`: the Unix times at which training began and at which each
step ended.
"""

# pyright: reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run."""

    model: str
    rows: str
    """JSON lines with `prompt` and `answer`, in the order of training."""
    out: str
    seed: int
    threads: int
    steps: int
    save_every: int
    prompts: int
    """Prompts of a step."""
    group_size: int
    max_tokens: int
    lr: float
    dtype: str
    """`float32`, or `bfloat16` for weights and computation."""
    passes: int
    """Forward and backward passes of a step: parts of the batch whose gradients are added up."""


class Times(TrainerCallback):
    """Notes when training begins and when each step ends."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ended: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Training begins: the next thing is the first batch."""
        self.began = time.time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step ended."""
        self.ended.append(time.time())


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each completion that equals its row's answer, else 0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(settings.threads)
    times = Times()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype)),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        reward_funcs=exact,
        train_dataset=Dataset.from_list(
            [json.loads(line) for line in Path(settings.rows).read_bytes().splitlines()]
        ),
        callbacks=[times],
        args=config_of(settings),
    )
    trainer.train()
    out = Path(settings.out)
    (out / "times.json").write_text(json.dumps({"began": times.began, "ended": times.ended}))


def config_of(settings: Settings) -> GRPOConfig:
    """Return the settings of TRL that are fast on a CPU: no recomputation, no logs, one generation
    for the whole batch."""
    return GRPOConfig(
        output_dir=settings.out,
        seed=settings.seed,
        max_steps=settings.steps,
        # The objective: clipped, mean over the tokens of the batch, group-relative rewards, no reference.
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        beta=0.0,
        num_iterations=1,
        # The batch
        num_generations=settings.group_size,
        per_device_train_batch_size=settings.prompts * settings.group_size // settings.passes,
        gradient_accumulation_steps=settings.passes,
        shuffle_dataset=False,
        # Generation
        max_completion_length=settings.max_tokens,
        temperature=1.0,
        # The optimizer
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        # The machine
        use_cpu=True,
        bf16=settings.dtype == "bfloat16",
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        # What is written
        save_strategy="steps",
        save_steps=settings.save_every,
        save_only_model=True,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
