"""A `model` that is no model of this kind: the message says what it is, and which path is meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stretto.cli.start.check_models import source_problems
from stretto.training.adapter_files import adapter_problems
from stretto.training.config import LoraConfig

BASE = "base_model_name_or_path"
BERT = {"architectures": ["BertModel"], "model_type": "bert"}
T5 = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
QWEN = {"architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({"adapter_config.json": {"r": 8}}, "", "a LoRA adapter of another model"),
        ({"adapter_config.json": {BASE: "org/base"}}, "", "a LoRA adapter of 'org/base'"),
        ({"config.yaml": {}, "checkpoints/step-000002/model/config.json": QWEN}, "", "step-000002/model'"),
        ({"config.yaml": {}}, "", "it is the folder of a run; .* it has no checkpoint"),
        ({"model/config.json": QWEN}, "", "no config.json; '.*/model' has one"),
        ({"w.gguf": {}}, "", "it has GGUF weights; transformers converts them"),
        ({"w.gguf": {}}, "w.gguf", "is a file of GGUF weights"),
        ({"config.json": T5}, "", "is an encoder with a decoder"),
        ({"config.json": BERT}, "", "is a BertModel, which has no head that writes text"),
        ({"config.json": QWEN}, "", ""),
        ({"config.json": {}}, "", ""),
    ],
)
def test_what_is_no_model_says_what_it_is(
    files: dict[str, dict[str, object]], source: str, message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    found = [problem.message for problem in source_problems("model", str(tmp_path / source))]
    assert len(found) == bool(message)
    assert all(re.search(message, text) for text in found)


@pytest.mark.parametrize(
    ("own", "run", "message"),
    [
        ({}, {}, ""),
        ({BASE: "elsewhere/of/base"}, {}, ""),
        ({BASE: "/c/hub/models--org--base/snapshots/12ab"}, {}, ""),
        ({BASE: "runs/other/checkpoints/step-000100/model"}, {}, "warning: .* is an adapter of"),
        ({BASE: None}, {}, "warning: .* is an adapter of None, and the model"),
        ({BASE: "org/other"}, {}, "is an adapter of 'org/other', and the model is 'org/base'"),
        ({"r": 8}, {}, r"write rank: 8, alpha: 16, targets: \[k_proj, q_proj\]"),
        ({"target_modules": "all-linear"}, {}, r"targets: \[all-linear\]"),
        ({"use_rslora": True, "bias": "all"}, {}, "has .*use_rslora.*bias.* merge it into its model"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "has .*pissa_niter_4"),
        ({"init_lora_weights": "lora_ga"}, {}, "has .*lora_ga"),
        ({}, {"adapter": "nowhere"}, "'nowhere' is no adapter in peft's format"),
    ],
)
def test_an_adapter_that_cannot_go_on_is_refused(
    own: dict[str, object], run: dict[str, str], message: str, tmp_path: Path
) -> None:
    usual = {"peft_type": "LORA", BASE: "org/base", "target_modules": ["q_proj", "k_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(usual | {"r": 4, "lora_alpha": 16} | own))
    (tmp_path / "adapter_model.safetensors").touch()
    adapter = run.get("adapter", str(tmp_path))
    lora = LoraConfig(rank=4, alpha=16, targets=("q_proj", "k_proj"), adapter=adapter)
    problems = adapter_problems(lora, "org/base", "training.lora")
    found = [f"{problem.severity}: {problem.message}" for problem in problems]
    assert len(found) == bool(message)
    assert all(re.search(message, text) for text in found)
