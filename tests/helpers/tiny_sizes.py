"""What the configs of tiny models have in common: `{**tiny_sizes(64, layers=3), **IDS}`."""

from typing import Any

IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


def tiny_sizes(width: int, *, layers: int, heads: int = 2, key_heads: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 3 * width // 2, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads, **more}
