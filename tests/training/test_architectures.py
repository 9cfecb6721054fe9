"""Tiny models of many types: with the defaults, the trainer's loss is that of plain transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.algorithm import Loss
from training_engines import batch_of, loaded_engine, push_up

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
STATE = {"state_size": 8, "n_groups": 1, "num_heads": 4, "head_dim": 16, "chunk_size": 8}
JITTER = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1}
TYPES: Mapping[str, Mapping[str, Any]] = {
    "arcee": {},
    "bloom": {"hidden_dropout": 0.1},
    "cohere": {},
    "cohere2": {"sliding_window": 4},
    "falcon": {"alibi": True, "hidden_dropout": 0.1},
    "falcon-rotary": {"new_decoder_architecture": True},
    "gemma": {},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "glm": {},
    "glm4": {},
    "gpt2": GPT | {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_bigcode": GPT,
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "gpt_neox": {"hidden_dropout": 0.1},
    "gpt_oss": EXPERTS | {"sliding_window": 4},
    "gptj": GPT | {"rotary_dim": 8},
    "granite": {},
    "granitemoe": EXPERTS,
    "helium": {"head_dim": 16},
    "llama": {},
    "mamba": {"state_size": 8},
    "mamba2": STATE,
    "mistral": {"sliding_window": 4},
    "mixtral": EXPERTS | JITTER,
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "resid_pdrop": 0.1, "emb_pdrop": 0.1},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1, "layerdrop": 0.1},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": EXPERTS | JITTER,
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.1},
    "dbrx": {
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 1, "attn_pdrop": 0.1, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_jitter_eps": 0.1,
            "ffn_hidden_size": 48,
            "hidden_size": 32,
        },
    },
}
UNPACKED = ("falcon", "gpt_neo", "gptj", "mpt")
"""Types whose code takes no attention function of others, so that loading them packed raises."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_the_loss_is_that_of_plain_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("-")[0], **{**SIZES, **TYPES[name]})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = batch_of([20, 7, 2, 33], loss_mask=torch.ones(62, dtype=torch.bool))
    texts = [each["tokens"] for each in batch.split([1] * 4)]
    with torch.no_grad():
        logits = [plain(input_ids=text[None]).logits[0, :-1] for text in texts]
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat([text[1:] for text in texts]))
    for checkpointing in (False, True):
        with capture_logs() as logs:
            engine = loaded_engine(tmp_path, gradient_checkpointing=checkpointing)
        found = engine.train(batch, Loss(push_up, "token"), temperature=1.0)["loss"]
        assert found == pytest.approx(float(expected), abs=1e-5)
        reasons = [line["reason"] for line in logs if "padded" in line["event"]]
        assert (engine.form == "padded") == (len(reasons) == 1)
        assert name not in UNPACKED or reasons
