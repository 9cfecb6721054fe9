"""Fetch the GSM8K data set and write it as rows for stretto: `python examples/gsm8k/fetch.py`.

This needs network and the library `datasets` (pip install datasets). It replaces train.jsonl and
heldout.jsonl in this folder: chat prompts that ask for a boxed answer, and the number after `####` as
`answer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


def row_of(example: dict[str, Any], name: str) -> dict[str, Any]:
    """Make one row, for the dataset `jsonl` and the reward `math`."""
    return {
        "id": name,
        "prompt": [{"role": "user", "content": f"{example['question']}\n{INSTRUCTION}"}],
        "answer": example["answer"].rpartition("####")[2].strip().replace(",", ""),
    }


def main() -> None:
    from datasets import load_dataset  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    for split, file in (("train", "train.jsonl"), ("test", "heldout.jsonl")):
        examples: Any = load_dataset("openai/gsm8k", "main", split=split)
        rows = (row_of(example, f"{split}-{index}") for index, example in enumerate(examples))
        Path(__file__).with_name(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
