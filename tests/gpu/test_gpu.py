"""What only a GPU shows (`make test-gpu`): numbers, memory, placement, NCCL. Skipped where there is none.

Those with one GPU passed on an H100. Those with two, and that of `cuda_graphs`, were not tried.
"""

import os
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tests.conftest import Run, Start

from fixture_types import Models
from patience import patience
from stretto.algorithm import Loss
from stretto.launcher import visible_gpus
from torch_engine import Update, load, own_logprobs, perturbed, request, serving, weights_of
from training_engines import batch_of, batch_of_one_prompt, loaded_engine, off, push_up, random_batch, step_of

GPUS = torch.cuda.device_count()
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and this machine has {GPUS}")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(patience(600)),
    pytest.mark.skipif(not GPUS, reason="torch finds no GPU with CUDA"),
]

CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of a logprob between GPU and CPU, or between engine and trainer."""


engine_of = partial(loaded_engine, lr=1e-3, warmup_steps=10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_on_the_gpu_computes_what_one_on_the_cpu_does(tiny_models: Models, dtype: str) -> None:
    batch = random_batch(0)
    cpu = engine_of(tiny_models("qwen2"), device="cpu")
    gpu = engine_of(tiny_models("qwen2"), device="cuda", gpus=1, dtype=dtype)
    for _ in range(3):
        found, expected = (engine.forward(batch, temperature=1.0).cpu() for engine in (gpu, cpu))
        torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=0)
        for engine in (gpu, cpu):
            engine.train(batch, Loss(push_up, "token"), temperature=1.0)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="needs varlen attention with grouped queries")
def test_varlen_attention_computes_what_separate_calls_do(tiny_models: Models) -> None:
    """The engine itself compares them at the start, and would log why it does not use the kernel."""
    make = partial(engine_of, tiny_models("qwen2"), device="cuda", gpus=1, dtype="bfloat16")
    with capture_logs() as logs:
        engines = [make(varlen_attention=varlen) for varlen in (True, False)]
    assert logs == []
    found, expected = (
        step_of(engine, batch_of_one_prompt([300, 1, 260, 260], 200), Loss(push_up, "token"))[0]
        for engine in engines
    )
    assert off(found, expected) < 0.05  # 0.01 is rounding; wrong alignment gives 0.5


def test_a_checkpoint_moves_between_gpu_and_cpu(tiny_models: Models, tmp_path: Path) -> None:
    gpu = engine_of(tiny_models("qwen2"), device="cuda", gpus=1)
    gpu.train(random_batch(0), Loss(push_up, "token"), temperature=1.0)
    gpu.save(tmp_path)
    cpu = engine_of(tiny_models("qwen2"), device="cpu")
    cpu.load(tmp_path)
    saved = dict(gpu.weights())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in cpu.weights())


def test_a_step_of_new_shapes_takes_no_longer_than_one_of_known_shapes(tiny_models: Models) -> None:
    """cuDNN's attention in bfloat16 builds a plan for each new shape, which takes up to a second."""
    engine = engine_of(tiny_models("qwen2"), device="cuda", gpus=1, dtype="bfloat16")

    def seconds(lengths: list[int]) -> float:
        batch, began = batch_of(lengths), monotonic()
        engine.train(batch, Loss(push_up, "token"), temperature=1.0)
        torch.cuda.synchronize()
        return monotonic() - began

    seconds([30, 30])
    new = [seconds([40 + n, 50 + 2 * n]) for n in range(8)]
    known = [seconds([40, 50]) for _ in range(8)]
    assert median(new) < 3 * median(known)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_replayed_steps_compute_what_the_plain_forward_does(tiny_models: Models, dtype: str) -> None:
    folder = tiny_models("qwen2")
    models = [load(folder), perturbed(load(folder), 1)]
    async with serving(folder, slots=16, gpus=1, device="cuda", dtype=dtype, cuda_graphs=True) as served:
        for version, model in enumerate(models):  # the second version by the graphs of the first
            await served.engine.swap(Update(weights_of(model), version))
            requests = [
                request(f"{version}/{i}", np.arange(4, 10 + 9 * i), 1 + i, max_tokens=20 * i + 5)
                for i in range(5)
            ]
            for asked, samples in zip(requests, await served.answers(*requests), strict=True):
                for sample in samples:
                    expected = own_logprobs(model, asked, sample.tokens)
                    np.testing.assert_allclose(sample.logprobs, expected, atol=CLOSE[dtype])


def test_an_engine_keeps_to_its_share_of_the_gpu(tiny_models: Models) -> None:
    try:
        engine_of(tiny_models("qwen2"), device="cuda", gpus=1, share=0.1)
        total = torch.cuda.get_device_properties(0).total_memory
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def assert_trained(run: Run, dtype: str) -> None:
    """It trained to the end on GPUs, and engine and trainer agree about the tokens of each version."""
    assert run.end() == 0, run.text()
    assert run.assert_balanced()["version"] == 4
    run.assert_audit_is_clean()
    measured = [line["mismatch_max"] for line in run.metrics() if "mismatch_max" in line]
    assert measured
    assert max(measured) < CLOSE[dtype]


def options(model: Path, dtype: str, share: float, training: str = "use: torch") -> list[str]:
    return [
        f"model={model}",
        f"training={{{training}, device: cuda, gpus: 1, share: {share}, dtype: {dtype}}}",
        f"inference={{use: torch, device: cuda, gpus: 1, share: {share}, dtype: {dtype}, slots: 16}}",
        *("sampling.max_tokens=16", "queue.max_staleness=0", "steps=4"),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_and_engine_share_a_gpu(
    start: Start, tiny_models: Models, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes gloo there, because NCCL refuses two processes on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_gpus(os.environ)[0])
    chosen = options(tiny_models("qwen2"), dtype, 0.45)
    assert_trained(start(*chosen, "weights={use: collective, backend: auto}"), dtype)


@TWO_GPUS
def test_weights_travel_by_nccl(start: Start, tiny_models: Models) -> None:
    """`nccl` refuses two processes on one GPU, so this also shows that each got its own."""
    chosen = options(tiny_models("qwen2"), "float32", 1.0)
    assert_trained(start(*chosen, "weights={use: collective, backend: nccl}"), "float32")


@TWO_GPUS
def test_two_ranks_train_over_nccl(start: Start, tiny_models: Models) -> None:
    chosen = options(tiny_models("llama"), "float32", 0.45, "use: fsdp2, processes: 2")
    assert_trained(start(*chosen), "float32")
