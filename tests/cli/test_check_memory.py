"""What a run's engines take of the machine's memory, as `stretto check` counts it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

import stretto_torch
from commands import called
from stretto.assembly import memory_changes
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start import check_memory, checks
from stretto.cli.start.check_memory import memory_lines, memory_problems
from stretto.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MIB, GIB = 2**20, 2**30
PARAMETERS = 204_096
"""Of the quickstart's model."""


def assembled(*overrides: str) -> Assembly:
    return Assembly(compose(QUICKSTART / "run.yaml", overrides))


def machine(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=int(gib * GIB)))
    monkeypatch.setattr(stretto_torch, "is_amd", lambda: False)


def problems(*overrides: str, limited: bool = True) -> dict[str, tuple[str, str]]:
    found = memory_problems(assembled(*overrides), limited=limited)
    return {each.path: (each.severity, each.message) for each in found}


def test_check_says_what_each_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16)
    cache = 5.5 * GIB
    table = [*memory_lines(assembled(f"inference.cache_gb={cache / GIB}", "inference.slots=40"))]
    head, training, inference, *rest = (line.split() for line in table)
    parts = ["weights", "gradients", "optimizer", "activations", "fragments"]
    parts += ["passes", "cache", "version", "libraries"]
    assert head == ["memory", "GiB", *parts, "sum", "of"]
    assert " ".join(training) == "training 1 x host 0.00 0.00 0.00 0.21 0.09 0.00 0.00 0.00 0.25 0.56 16.0"
    assert " ".join(inference) == "inference 1 x host 0.00 0.00 0.00 0.00 0.00 0.02 5.50 0.00 0.25 5.77 16.0"
    assert [" ".join(line) for line in rest[:3]] == [
        "training: micro-batches of 4096 tokens",
        "inference: 40 slots x 96 tokens, cache at most 5.5 GiB",
        "host: 6.3 GiB of 16.0",
    ]
    assert "\nmemory     GiB       weights " in called("check", QUICKSTART / "run.yaml").stdout


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ((), {"weights": 4, "packed": 4, "version": 4}),
        (("inference.linear=torch",), {"weights": 4, "version": 4}),
        (("inference.dtype=bfloat16", "training.publish_dtype=bfloat16"), {"weights": 2, "version": 2}),
        (("training.lora={}",), {"weights": 4, "packed": 4}),
        (("training.lora.send=merged",), {"weights": 4, "packed": 4, "version": 4}),
        (("inference.gpus=1",), {"weights": 2}),
        (("inference.gpus=1", "training.dtype=float32"), {"weights": 4}),
    ],
)
def test_copies_of_the_weights_are_counted(
    overrides: tuple[str, ...], parts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AMD, oneDNN gets packed ones; an engine maps the version that it swaps in."""
    monkeypatch.setattr(stretto_torch, "is_amd", lambda: True)
    composed = compose(QUICKSTART / "run.yaml", overrides)
    [found] = [need for need in Assembly(composed, gpu_bytes=GIB).needs if need.section == "inference"]
    copies = {name: size for name, size in found.memory.parts.items() if name not in ("cache", "passes")}
    assert copies == {name: bytes_each * PARAMETERS for name, bytes_each in parts.items()}


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (("algorithm=sft", "dataset.path=HERE/rows.jsonl", "queue.batch_size=3"), 3 * 12),
        (("algorithm=dpo", "dataset.path=HERE/rows.jsonl", "queue.batch_size=3"), 3 * 2 * 12),
        (("algorithm=sft", "dataset.path=HERE/rows.jsonl", "training.micro_batch_tokens=16"), 16),
        ((), 4096),
    ],
)
def test_a_micro_batch_is_no_larger_than_a_batch_of_the_longest_rows(
    overrides: tuple[str, ...], tokens: int, tmp_path: Path
) -> None:
    row = {"prompt": "1+1=", "completion": "1234567", "chosen": "1234567", "rejected": "2"}
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"prompt": "1+1="[n:]}) + "\n" for n in range(3))
    )
    here = (each.replace("HERE", str(tmp_path)) for each in overrides)
    rows_only = ("evaluation=null", "reward=null") if overrides else ()
    assembly = assembled(f"out={tmp_path}/out", *rows_only, *here)
    assert not [each for each in checks.problems(assembly, starting=False) if each.severity == "error"]
    assert assembly.needs[0].memory.settings == f"micro-batches of {tokens} tokens"


@pytest.mark.parametrize(
    "overrides", [(), ("algorithm=sft", "reward=null", "algorithm.completion_column=answer")]
)
def test_a_model_without_weights_counts_for_other_gpus(overrides: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copy(QUICKSTART / "model" / "config.json", tmp_path)
    of_gpus = ("training.gpus=1", "training.dtype=float32", "inference.gpus=1", "evaluation=null")
    composed = compose(
        QUICKSTART / "run.yaml", (*of_gpus, f"model={tmp_path}", f"out={tmp_path}/out", *overrides)
    )
    of_others = Assembly(composed, gpu_bytes=40 * GIB)
    warned = {each.message: each.severity for each in checks.problems(of_others, starting=False)}
    assert "error" not in warned.values()
    assert warned[f"{str(tmp_path)!r} has no weights: expected *.safetensors in the folder"] == "environment"
    assert {need.memory.parts["weights"] for need in of_others.needs} == {4 * PARAMETERS}
    here = checks.problems(Assembly(composed), starting=False)
    assert "error" in [each.severity for each in here if "has no weights" in each.message]


def test_what_does_not_fit_is_refused_unless_a_user_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16)
    assert problems() == {}
    assert problems("inference.cache_gb=13")["model"][0] == "warning"  # over 80 %
    severity, message = problems("inference.cache_gb=60")["model"]
    assert severity == "error"
    assert message == (
        "its engines need 60.8 GiB of memory, and this machine has 16.0; inference.cache_gb=15.0 frees 45 "
        "GiB; it fits with inference.cache_gb=15.0; `--no-memory-limit` starts it anyway"
    )
    assert problems("inference.cache_gb=60", limited=False)["model"][0] == "warning"
    refused = called("check", QUICKSTART / "run.yaml", "inference.cache_gb=60")
    assert refused.returncode == 2
    assert "--no-memory-limit" in refused.stderr
    accepted = called("check", QUICKSTART / "run.yaml", "inference.cache_gb=60", "--no-memory-limit")
    assert accepted.returncode == 0
    assert "warning" in accepted.stderr
    assert problems("inference.cache_gb=60", "launcher=slurm") == {}  # other machines


def test_checkpoints_that_the_disk_cannot_hold_are_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and AdamW's two states are 12 bytes a parameter; two are kept beside the one being written."""
    run = assembled(f"out={tmp_path}/out", "checkpoint.every=1")
    for room, count in ((3 * 12 * PARAMETERS, 0), (3 * 12 * PARAMETERS - 1, 1)):
        usage = shutil.disk_usage(tmp_path)._replace(free=room)
        monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=usage))
        found = [each for each in memory_problems(run, limited=True) if each.path == "checkpoint"]
        assert [each.severity for each in found] == ["environment"] * count
        assert all("3 checkpoints take" in each.message for each in found)


def test_a_cache_without_a_size_keeps_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 slots of 96 tokens of 1.5 kB would take 4.5 MiB."""
    machine(monkeypatch, 0.02)
    table = memory_lines(assembled("evaluation.own_engine=false", "inference.slots=32"))
    assert any("cache at most 0.0025 GiB" in line for line in table)


def on_gpu(*overrides: str, gib: float) -> Assembly:
    gpu = (
        *("training.gpus=1", "training.share=0.5", "training.dtype=float32"),
        *("inference.gpus=1", "inference.share=0.5"),
    )
    composed = compose(QUICKSTART / "run.yaml", (*gpu, *overrides))
    return Assembly(composed, gpu_bytes=int(gib * GIB))


def test_a_change_that_check_names_makes_the_run_fit() -> None:
    """Libraries take half a GiB of a GPU in each process."""
    assert not [*memory_problems(on_gpu(gib=2), limited=True)]
    tokens = "training.micro_batch_tokens=16384"
    [found] = memory_problems(on_gpu(tokens, gib=1.3), limited=True)
    assert (found.path, found.severity) == ("training", "error")
    assert found.message.startswith("needs 0.9 GiB of its GPU, and may use 0.6; training.micro_batch_tokens")
    fits = found.message.partition("it fits with ")[2].partition(";")[0].split()
    assert fits
    assert not [*memory_problems(on_gpu(tokens, *fits, gib=1.3), limited=True)]
    [of_cluster] = memory_problems(on_gpu(tokens, "launcher=slurm", gib=1.3), limited=True)
    assert of_cluster == found


def test_engines_that_sleep_leave_training_their_share() -> None:
    """Half of 1.5 GiB is 0.75, all is 1.0, without the 0.5 that the engine's libraries keep."""
    large = ("training.micro_batch_tokens=12288", "dataset.max_prompt_tokens=12000")
    awake = on_gpu(*large, "inference.sleep=false", gib=1.5)
    [found] = memory_problems(awake, limited=True)
    assert "inference.sleep=true frees 0.25 GiB" in found.message
    asleep = on_gpu(*large, "inference.sleep=auto", gib=1.5)
    assert asleep.config.inference.sleep is True
    assert not [*memory_problems(asleep, limited=True)]
    assert [need.limit / GIB for need in asleep.needs] == [1.0, 0.75]
    assert on_gpu("inference.sleep=auto", gib=2).config.inference.sleep is False, "it fits without"
    assert on_gpu(*large, "inference.sleep=auto", gib=0.6).config.inference.sleep is False, "it never fits"


def test_state_on_the_host_frees_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_changes, "_WORTH", 0.0)

    def freed(*overrides: str) -> int | None:
        found = memory_changes.changes(on_gpu(*overrides, gib=2), "training")
        return next((change.freed for change in found if change.override == "training.state=host"), None)

    assert freed() == freed("training.use=fsdp2") == 12 * PARAMETERS  # gradients, AdamW's two states
    for layout in ("use=pipeline", "use=fsdp2 training.shard=false", "state=host", "gpus=0"):
        assert freed(*f"training.{layout}".split()) is None, layout


def test_auto_fills_the_memory_with_a_micro_batch() -> None:
    auto = "training.micro_batch_tokens=auto"
    assembly = on_gpu(auto, gib=1.4)
    section: Any = assembly.config.training
    tokens = section.micro_batch_tokens
    assert 512 < tokens < 65536
    [training] = [need for need in assembly.needs if need.section == "training"]
    assert 0.85 * training.limit < training.size <= 0.9 * training.limit
    with pytest.raises(ConfigError, match="'auto' needs a number: the memory of its machine"):
        Assembly(compose(QUICKSTART / "run.yaml", ("training.gpus=1", auto)))


def test_weights_that_do_not_fit_into_shared_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_usage(folder: Path) -> SimpleNamespace:
        if folder != Path("/dev/shm"):
            return SimpleNamespace(free=GIB)
        return SimpleNamespace(free=2 * 4 * PARAMETERS - 1)

    monkeypatch.setattr(check_memory, "shutil", SimpleNamespace(disk_usage=disk_usage))
    severity, message = problems()["weights"]
    assert (severity, "--shm-size" in message) == ("environment", True)
    assert "weights" not in problems("training.dtype=bfloat16")
    assert "weights" not in problems("weights.folder=/tmp")


def test_padded_rows_are_said(tmp_path: Path) -> None:
    model = shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    kinds = ["sliding_attention"] * config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config | {"layer_types": kinds, "sliding_window": 16}))
    table = "\n".join(memory_lines(assembled(f"model={model}")))
    assert "training: micro-batches of 4096 tokens in padded rows" in table
