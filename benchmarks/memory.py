"""Which model fits on which GPU: the memory that `stretto check` counts, for trainer and engine on one card.

    python benchmarks/memory.py [--tokens 4096] [--slots 128] [--context 1536]

The models are configurations without weights, in the shapes of the Qwen2.5 series and of a hybrid (Qwen3.5).
Everything is in bfloat16 with recomputed activations. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from typing import Any

from transformers import AutoConfig

from stretto.engine import HeldModel
from stretto.training.config import LoraConfig
from stretto_torch import TorchInferenceConfig, TorchTrainingConfig

CARDS = (24, 48, 80, 141)
"""GiB of a GPU."""
LIBRARIES = 1.0
"""GiB that torch takes of a GPU in two processes."""
QWEN2 = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "tie_word_embeddings": True}


def qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **options: Any) -> dict[str, Any]:
    """The keys of a Qwen2 configuration."""
    return {
        **QWEN2,
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **options,
    }


MODELS: dict[str, dict[str, Any]] = {
    "0.5 B": qwen2(896, 4864, 24, 14, 2),
    "1.5 B": qwen2(1536, 8960, 28, 12, 2),
    "3 B": qwen2(2048, 11_008, 36, 16, 2),
    "7 B": qwen2(3584, 18_944, 28, 28, 4, vocab_size=152_064, tie_word_embeddings=False),
    "hybrid 2 B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--context", type=int, default=1536)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"{'model':12} {'trained':8} {'trainer':>8} {'engine':>8} {'sum':>7}  GiB; fits on")
    for name, keys in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            AutoConfig.for_model(**keys, dtype="bfloat16").save_pretrained(folder)
            for mode, lora in (("full", None), ("lora", LoraConfig())):
                row = results[f"{name}, {mode}"] = sizes(folder, lora, options)
                total = sum(row.values()) + LIBRARIES
                card = next((f"{card} GB" for card in CARDS if total <= card), "-")
                cells = f"{row['trainer']:8.1f} {row.get('engine', math.nan):8.1f} {total:7.1f}"
                print(f"{name:12} {mode:8} {cells}  {card}")
    print(json.dumps({"gib": results}))


def sizes(model: str, lora: LoraConfig | None, options: argparse.Namespace) -> dict[str, float]:
    """The GiB of the trainer, and of the engine where its cache is known."""
    training = TorchTrainingConfig(
        dtype="bfloat16",
        gpus=1,
        gradient_checkpointing=True,
        micro_batch_tokens=options.tokens,
        lora=lora,
    )
    inference = TorchInferenceConfig(
        dtype="bfloat16", gpus=1, slots=options.slots, context_length=options.context
    )
    trainer = training.memory([HeldModel(model, "policy", trainable=True)], options.context)
    assert trainer is not None
    assert "not known" not in trainer.settings, trainer.settings
    engine = inference.memory(model, trainer.parameters, 0, float("inf"))
    found = {"trainer": trainer, "engine": engine}
    return {part: round(memory.size / 2**30, 2) for part, memory in found.items() if memory is not None}


if __name__ == "__main__":
    main()
