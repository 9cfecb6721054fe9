"""A `model` that is no model of this kind: the message says what it is, and which path is meant."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig as PeftConfig
from safetensors.numpy import save_file

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose, compose_mapping
from stretto.cli.start import checks
from stretto.cli.start.check_models import model_problems, source_problems
from stretto.models.files import positions_of
from stretto.training.config import LoraConfig
from stretto.training.source_files import adapter_problems

ROOT = Path(__file__).parents[2]
BASE = "base_model_name_or_path"
FORM: dict[str, object] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj"]}
OF_PEFT = PeftConfig().to_dict() | FORM | {BASE: "base"}
BERT = {"architectures": ["BertModel"], "model_type": "bert"}
T5 = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
OWN_CODE: dict[str, object] = {"auto_map": {"AutoModel": "mine.Model"}}
QWEN = {"architectures": ["Qwen2ForCausalLM"]}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMPTY = "\2\0\0\0\0\0\0\0{}"
SHARDS = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}


def weights(**dtypes: str) -> str:
    """A safetensors file with a 1 × 2 tensor of each of these dtypes."""
    header: dict[str, object] = {}
    end = 0
    for name, dtype in dtypes.items():
        offsets = (end, end := end + 2 * (1 + (dtype == "BF16")))
        header[name] = {"dtype": dtype, "shape": [1, 2], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"))
    return chr(len(text)) + "\0" * 7 + text + "\0" * end


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
        ({"config.json": QWEN | {"auto_map": {}}}, "", ""),
        ({"config.json": QWEN | OWN_CODE}, "", ""),
        (
            {"config.json": OWN_CODE | {"architectures": ["MyForCausalLM"]}},
            "",
            "a MyForCausalLM, which code in",
        ),
        ({"config.json": {}}, "", ""),
        ({"config.json": QWEN, INDEX: SHARDS, "model-1-of-2.safetensors": EMPTY}, "", "lacks model-2-of-2"),
        ({"config.json": QWEN, INDEX: SHARDS, WHOLE: EMPTY}, "", "has two sets of weights"),
        ({"config.json": QWEN, INDEX: {"weight_map": {"a": WHOLE}}, WHOLE: EMPTY}, "", ""),
        ({"config.json": QWEN, "consolidated.safetensors": EMPTY}, "", f"but no {WHOLE} or"),
        ({"config.json": QWEN, WHOLE: EMPTY, "adapter_config.json": {}}, "", "an adapter beside its weights"),
        *(
            ({"config.json": QWEN, WHOLE: weights(w=dtype)}, "", f"has w in {dtype}, quantized")
            for dtype in ("F8_E4M3", "I8")
        ),
        ({"config.json": QWEN, WHOLE: weights(w="BF16", mask="U8")}, "", ""),
    ],
)
def test_what_is_no_model_says_what_it_is(
    files: dict[str, Any], source: str, message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    found = [problem.message for problem in source_problems("model", str(tmp_path / source))]
    assert len(found) == bool(message)
    assert all(re.search(message, text) for text in found)


@pytest.mark.parametrize(
    ("own", "run", "message"),
    [
        ({}, {}, ""),
        ({BASE: "base"}, {}, ""),
        ({BASE: "elsewhere/of/base"}, {}, "warning: .* is an adapter of"),
        ({BASE: "/c/hub/models--org--base/snapshots/12ab"}, {}, ""),
        ({BASE: "runs/other/checkpoints/step-000100/model"}, {}, "warning: .* is an adapter of"),
        ({BASE: None}, {}, "warning: .* is an adapter of None, and the model"),
        ({BASE: "org/other"}, {}, "is an adapter of 'org/other', and the model is 'org/base'"),
        ({"r": 8}, {}, r"write rank: 8, alpha: 16, targets: \[k_proj, q_proj\]"),
        ({"target_modules": "all-linear"}, {}, r"targets: \[all-linear\]"),
        ({"use_rslora": True, "bias": "all"}, {}, "has .*use_rslora.*bias.* merge it into its model"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "has .*pissa_niter_4"),
        ({"init_lora_weights": "lora_ga"}, {}, "has .*lora_ga"),
        (OF_PEFT, {}, ""),
        ({"use_qalora": True, "qalora_group_size": 16}, {}, "error: .* has {'use_qalora': True}, which"),
        ({"exclude_modules": ["layers.1.q_proj"]}, {}, "has {'exclude_modules'"),
        ({"exclude_modules": r"model\.visual\..*"}, {}, ""),
        ({"task_type": "SEQ_CLS"}, {}, "has {'task_type': 'SEQ_CLS'}"),
        ({"a_key_of_a_later_peft": {"x": 1}}, {}, "has {'a_key_of_a_later_peft'"),
        ({}, {"adapter": "nowhere"}, "'nowhere' is no adapter in peft's format"),
    ],
)
def test_an_adapter_that_cannot_go_on_is_refused(
    own: dict[str, object], run: dict[str, str], message: str, tmp_path: Path
) -> None:
    usual = {"peft_type": "LORA", BASE: "org/base"} | FORM
    (tmp_path / "adapter_config.json").write_text(json.dumps(usual | own))
    (tmp_path / "adapter_model.safetensors").touch()
    adapter = run.get("adapter", str(tmp_path))
    lora = LoraConfig(rank=4, alpha=16, targets=("q_proj", "k_proj"), adapter=adapter)
    problems = adapter_problems(lora, "org/base", "training.lora")
    found = [f"{problem.severity}: {problem.message}" for problem in problems]
    assert len(found) == bool(message)
    assert all(re.search(message, text) for text in found)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_longrope_is_read_up_to_its_original_positions(key: str, tmp_path: Path) -> None:
    kind = "rope_type" if key == "rope_parameters" else "type"
    config = QWEN | {key: {kind: "longrope"}, "original_max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    assert positions_of(str(tmp_path)) == 32
    run: dict[str, Any] = {
        "name": "r",
        "model": str(tmp_path),
        "algorithm": "grpo",
        "training": "torch",
        "reward": "exact",
    }
    run |= {"steps": 1}
    dataset = {"use": "jsonl", "path": str(tmp_path / "config.json")}
    for room, count in ((None, 1), (64, 1), (32, 0)):
        inference = {"use": "torch", "context_length": room, "canary": None}
        sections = {"dataset": dataset, "inference": inference, "sampling": {"max_tokens": 9}}
        found = model_problems(Assembly(compose_mapping(run | sections)))
        assert [each.path for each in found].count("inference.context_length") == count


def test_a_context_above_the_positions_needs_yarn_on_both_sides(tmp_path: Path) -> None:
    """An engine that extended them alone would sample what the trainer does not compute."""
    yarn = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}
    for rope, errors in (({}, 1), ({"rope_scaling": yarn}, 0)):
        written = QWEN | {"max_position_embeddings": 32} | rope
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert positions_of(str(tmp_path)) == (96 if rope else 32)
        run = {"name": "r", "model": str(tmp_path), "algorithm": "grpo", "training": "torch", "steps": 1}
        dataset = {"use": "jsonl", "path": str(tmp_path / "config.json")}
        for engine in ("torch", "vllm", "sglang"):
            sections = {
                "inference": {"use": engine, "context_length": 96, "canary": None},
                "dataset": dataset,
            }
            assembly = Assembly(compose_mapping({**run, "reward": "exact", **sections}))
            found = [each for each in checks.problems(assembly, starting=False) if "YaRN" in each.message]
            assert [each.severity for each in found] == ["error"] * errors
            assert all('"factor": 3.0' in each.message for each in found)


def test_two_folders_are_one_model_if_their_tensors_are_the_same(tmp_path: Path) -> None:
    model, copy, other = (tmp_path / name / "tiny" for name in ("a", "b", "c"))
    for number, folder in enumerate((model, copy, other)):
        folder.mkdir(parents=True)
        save_file({"w": np.full(3, number // 2)}, folder / "model.safetensors")
    (tmp_path / "adapter_model.safetensors").touch()
    lora = LoraConfig(rank=4, alpha=16, targets=("q_proj", "k_proj"), adapter=str(tmp_path))
    for base, count in ((model, 0), (copy, 0), (shutil.copytree(copy, tmp_path / "copy"), 0), (other, 1)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(FORM | {BASE: str(base)}))
        problems = [*adapter_problems(lora, str(model), "training.lora")]
        assert [problem.severity for problem in problems] == ["error"] * count


def change(*keys: str | int, value: object) -> Callable[[Any], None]:
    """Return a function that sets what is at these keys in a tokenizer.json."""

    def set_it(written: Any) -> None:
        for key in keys[:-1]:
            written = written[key]
        written[keys[-1]] = value

    return set_it


def as_it_is(written: Any) -> None:
    del written


def swap(written: Any) -> None:
    pieces = written["model"]["vocab"]
    pieces["a"], pieces["b"] = pieces["b"], pieces["a"]


def as_unigram(written: Any) -> None:
    pieces = sorted(written["model"]["vocab"], key=written["model"]["vocab"].get)
    written["model"] = {"type": "Unigram", "vocab": [[piece, -1.0] for piece in pieces]}


def add_pieces(written: Any) -> None:
    written["model"]["vocab"] |= {"new": 101, "newer": 102}
    written["model"]["merges"] += [["e", "w"], ["n", "ew"]]


@pytest.mark.parametrize(
    ("rows", "written", "words"),
    [
        (0, swap, "error: .* 2 ids differ; the id .* is 'b', and 'a' for the run's model"),
        (0, change("added_tokens", 1, "content", value="<end>"), "error: .* 1 ids differ; .*'<end>'"),
        (0, change("model", "merges", value=[["b", "a"]]), "error: .* their merges differ"),
        (7, swap, "error: .* 2 ids differ"),
        (0, None, "warning: .* has no tokenizer.json here"),
        (7, None, "error: .* a vocabulary of 108 tokens, the run's model of 101"),
        (7, as_it_is, ""),
        (-7, as_it_is, ""),
        (0, add_pieces, ""),
        (0, as_unigram, ""),
        (0, change("model", "merges", value=["a b"]), ""),
    ],
)
def test_two_tokenizers_are_one_if_their_ids_mean_the_same(
    rows: int, written: Callable[[Any], None] | None, words: str, tmp_path: Path
) -> None:
    source, teacher = ROOT / "examples" / "quickstart" / "model", tmp_path / "teacher"
    own = Path(shutil.copytree(source, tmp_path / "own"))
    tokenizer = json.loads((own / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [["a", "b"]]
    (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copytree(own, teacher)
    config = json.loads((teacher / "config.json").read_text())
    config["vocab_size"] += rows
    (teacher / "config.json").write_text(json.dumps(config))
    if written is None:
        (teacher / "tokenizer.json").unlink()
    else:
        written(tokenizer)
        (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    changes = [f"model={own}", f"models.reference.path={teacher}", "algorithm.kl.coef=0.1"]
    assembly = Assembly(compose(ROOT / "examples" / "quickstart" / "run.yaml", changes))
    problems = [each for each in model_problems(assembly) if each.path == "models.reference.path"]
    found = [f"{problem.severity}: {problem.message}" for problem in problems]
    assert len(found) == bool(words)
    assert all(re.search(words, text) for text in found)
