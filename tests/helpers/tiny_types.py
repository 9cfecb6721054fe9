"""Configs of tiny models of many types, without tokenizers: `tiny_config("mpt")`."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from tiny_sizes import IDS, tiny_sizes

_SIZES = {**tiny_sizes(32, layers=2, max_position_embeddings=64, vocab_size=97, initializer_range=0.2), **IDS}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
_STATE = {"state_size": 8, "n_groups": 1, "num_heads": 4, "head_dim": 16, "chunk_size": 8}
_JITTER = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1}
_WINDOW = {"sliding_window": 4}
_MPT = {"d_model": 32, "n_heads": 2, "n_layers": 2}
_DBRX_WIDTHS = {"ffn_hidden_size": 48, "hidden_size": 32}
_DBRX = {
    "attn_config": {"kv_n_heads": 1, "attn_pdrop": 0.1, "clip_qkv": 8, "rope_theta": 1e4},
    "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.1} | _DBRX_WIDTHS,
}
_PLAIN = (
    *("arcee", "cohere", "gemma", "glm", "glm4", "granite", "llama", "nemotron", "olmo", "olmo2"),
    *("persimmon", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm"),
)
TYPES: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in _PLAIN},
    **dict.fromkeys(("cohere2", "gemma2", "gemma3_text", "mistral", "olmo3"), _WINDOW),
    **dict.fromkeys(("granitemoe", "olmoe", "qwen3_moe"), _EXPERTS),
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "gpt_oss": _EXPERTS | _WINDOW,
    "bloom": {"hidden_dropout": 0.1},
    "dbrx": _MPT | _DBRX,
    "falcon": {"alibi": True, "hidden_dropout": 0.1},
    "falcon-rotary": {"new_decoder_architecture": True},
    "gpt2": _GPT | {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_bigcode": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {"hidden_dropout": 0.1},
    "gptj": _GPT | {"rotary_dim": 8},
    "helium": {"head_dim": 16},
    "mamba": {"state_size": 8},
    "mamba2": _STATE,
    "mixtral": _EXPERTS | _JITTER,
    "mpt": _MPT | {"resid_pdrop": 0.1, "emb_pdrop": 0.1},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1, "layerdrop": 0.1},
    "phimoe": _EXPERTS | _JITTER,
    "starcoder2": {"residual_dropout": 0.1},
}
"""Name -> options. A name is a type of transformers, maybe with a variant behind a hyphen."""


def tiny_config(name: str, **options: Any) -> Any:
    """Return the config of a tiny model, and set torch's seed for its weights."""
    torch.manual_seed(0)
    return AutoConfig.for_model(name.partition("-")[0], **{**_SIZES, **TYPES[name], **options})
