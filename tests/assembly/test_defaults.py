"""Keys that a run file leaves null: decided once, from the device and from other keys, and written down."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import yaml

from commands import called
from stretto.assembly import assembly as assembled
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose
from stretto.errors import ConfigError
from stretto.kernel.durable.changes import assemble_in_force, write_values
from stretto.machine import gpus
from stretto.training.config import ModelTrainingConfig
from stretto_agent import AgentConfig

ROOT = Path(__file__).parents[2]
QUICKSTART, GSM8K = ROOT / "examples" / "quickstart" / "run.yaml", ROOT / "examples" / "gsm8k_grpo.yaml"
GIB = 2**30
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SEVEN_B = {
    **QWEN,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "listed_gpus", tuple)


def model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"model={folder}"


def decided(file: Path, *overrides: str, gib: int | None = None) -> Composed:
    return Assembly(compose(file, overrides), gpu_bytes=None if gib is None else gib * GIB).composed


def chosen(composed: Composed, *paths: str) -> list[Any]:
    values: list[Any] = []
    for path in paths:
        section, _, key = path.rpartition(".")
        values.append(getattr(composed.section(section), key))
    return values


DTYPES = ("training.dtype", "inference.dtype")


def test_a_processor_keeps_its_defaults() -> None:
    run = decided(QUICKSTART)
    assert chosen(run, *DTYPES, "training.micro_batch_tokens", "workflow.timeout_s") == [
        *["float32"] * 2,
        4096,
        600,
    ]
    server = decided(QUICKSTART, "inference=vllm", "inference.python=/bin/true", "training.dtype=bfloat16")
    assert chosen(server, *DTYPES, "inference.slots") == ["bfloat16", "float32", 64]
    assert run.reasons == server.reasons == ()


@pytest.mark.parametrize(
    ("gib", "tokens", "slots"), [(None, 8192, 256), (24, 16384, 256), (80, 16384, 256)], ids=str
)
def test_a_card_gets_its_own(gib: int | None, tokens: int, slots: int, tmp_path: Path) -> None:
    keys = (*DTYPES, "training.micro_batch_tokens", "inference.context_length")
    run = decided(GSM8K, model(tmp_path, QWEN), gib=gib)
    assert chosen(run, *keys) == ["bfloat16", "bfloat16", tokens, 1536]
    assert [path for path, _ in run.reasons] == [keys[0], keys[1], keys[3], keys[2]]
    server = decided(GSM8K, model(tmp_path, QWEN), "inference=vllm", "inference.gpus=1", gib=gib)
    assert chosen(server, "inference.slots") == [slots]
    few = decided(GSM8K, "inference=vllm", "queue.batch_size=4", "queue.max_staleness=0", gib=gib)
    assert chosen(few, "inference.slots") == [32]  # the samples in flight


def test_a_large_model_gets_smaller_passes(tmp_path: Path) -> None:
    lora = ("training.lora={}", "training.share=1", "inference.share=1")
    small = decided(GSM8K, model(tmp_path, SEVEN_B), *lora, gib=24)
    assert 512 <= small.section("training").micro_batch_tokens < 16384
    assert chosen(decided(GSM8K, model(tmp_path, SEVEN_B), *lora, gib=80), "training.micro_batch_tokens") == [
        16384
    ]


def test_slots_follow_the_room_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.serving.config.parameters_in", Mock(return_value=7_615_616_512))
    server = (model(tmp_path, SEVEN_B), "inference=vllm", "inference.gpus=1", "inference.share=1")
    # 0.8 x 24 GiB - 14.19 GiB of weights = 5.01 GiB; a token has 2 x 28 x 4 x 128 x 2 bytes; 1,536 tokens.
    [slots] = chosen(decided(GSM8K, *server, gib=24), "inference.slots")
    assert slots == int(2 * (0.8 * 24 * GIB - 2 * 7_615_616_512) / (1536 * 57_344)) == 122
    assert chosen(decided(GSM8K, *server, gib=16), "inference.slots") == [16]
    assert chosen(decided(GSM8K, *server, gib=140), "inference.slots") == [512]


def test_trainers_and_engines_have_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(decided(GSM8K, "inference.dtype=float32"), *DTYPES) == ["float32"] * 2
    attached = decided(GSM8K, "inference=vllm", "inference.urls=[http://127.0.0.1:1]")
    assert chosen(attached, *DTYPES, "inference.slots") == ["bfloat16", "float32", 64]
    monkeypatch.setattr(gpus, "listed_gpus", lambda: (gpus.Gpu("0", "GPU-a", "Tesla T4", 15 * GIB),))
    monkeypatch.setattr(gpus, "_answer", Mock(return_value="GPU-a, 7.5\n"))
    old = decided(GSM8K)
    assert chosen(old, *DTYPES) == ["float32"] * 2
    assert dict(old.reasons)["training.dtype"] == "these GPUs do not compute in bfloat16"
    monkeypatch.setattr(gpus, "_answer", Mock(return_value="GPU-a, 12.0\n"))
    assert chosen(decided(GSM8K), *DTYPES) == ["bfloat16"] * 2


def test_the_longest_answer_has_time() -> None:
    run = decided(QUICKSTART, "sampling.max_tokens=32768", "inference.context_length=40000")
    assert chosen(run, "workflow.timeout_s") == [3276.8]
    varied = decided(
        QUICKSTART,
        "variants.long.sampling.max_tokens=9000",
        "variants.long.workflow.use=single_turn",
        "variants.short={workflow: {timeout_s: 5}}",
    )
    assert varied.section("variants.long.workflow").timeout_s == 900
    assert chosen(varied, "workflow.timeout_s", "variants.short.workflow.timeout_s") == [600, 5]
    with pytest.raises(ValueError, match="agent_timeout_s=600 must be less than timeout_s=600"):
        AgentConfig(use="agent", function="a:b", agent_timeout_s=600)


def test_what_was_decided_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    run = decided(GSM8K, model(tmp_path, QWEN), gib=24)
    write_values(tmp_path / "run", run)
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert text.startswith("# training.dtype: with GPUs; the weights that are trained stay float32\n")
    assert yaml.safe_load(text)["training"]["micro_batch_tokens"] == 16384
    monkeypatch.setattr(assembled, "_dtype_of_run", Mock(return_value=("float32", "another machine")))
    asked = Mock(return_value=())
    monkeypatch.setattr(gpus, "listed_gpus", asked)
    resumed = assemble_in_force(tmp_path / "run").composed
    assert msgspec.to_builtins(resumed.config) == msgspec.to_builtins(run.config)
    assert not resumed.reasons
    assert not asked.called, "the driver's answer takes seconds in each worker"


def test_auto_still_asks_for_a_number() -> None:
    with pytest.raises(ConfigError, match="'auto' needs a number"):
        decided(GSM8K, "training.micro_batch_tokens=auto")
    assert ModelTrainingConfig().tokens_per_pass == 4096


def test_check_prints_what_it_chose(tmp_path: Path) -> None:
    model = f"model={QUICKSTART.parent / 'model'}"
    printed = called("check", QUICKSTART, model, "training.gpus=1", "--gpu-memory", "24")
    assert "note: training.dtype is bfloat16: with GPUs; the weights" in printed.stderr
