"""Full memory ends with what the process held, and with the keys that free most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_setup import write_run
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.errors import EngineError
from stretto.workers.full_memory import out_of_memory

OF_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
OF_HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
)


@pytest.mark.parametrize(
    ("worker", "error", "words"),
    [
        (
            "trainer-0",
            OF_GPU,
            ["its GPU was full; these keys free most: training.lora={}", "tokens (now 512)"],
        ),
        (
            "trainer-critics-1",
            OF_HOST,
            ["memory was full: ", " GiB in this process", "groups.critics.lora={}"],
        ),
        ("inference-0", OF_HOST, ["inference.slots (now 8), inference.context_length (now None)"]),
        ("inference-0", ValueError("3"), []),
    ],
)
def test_full_memory_names_what_frees_most(
    worker: str, error: Exception, words: list[str], tmp_path: Path
) -> None:
    torch_engine = {"use": "torch", "micro_batch_tokens": 512}
    file = write_run(
        tmp_path,
        model="org/name",
        steps=1,
        algorithm="ppo",
        inference={"use": "torch", "slots": 8},
        training=torch_engine,
        groups={"critics": torch_engine},
        models={"critic": {"group": "critics"}},
    )
    wrapped = EngineError("the engine broke")
    wrapped.__cause__ = error
    said = out_of_memory(wrapped, worker, Assembly(compose(file), folder=""))
    assert bool(said) is bool(words)
    assert all(each in said for each in words), said
