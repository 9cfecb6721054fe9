"""An error of full memory names what the process held, what was counted, and the keys that free most."""

import re
from pathlib import Path

import pytest
import torch

from kernel_setup import write_run
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.errors import EngineError
from stretto.workers.full_memory import out_of_memory

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
OF_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
OF_HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
)


SIZE = r"\d+\.\d GiB"
HELD = rf"this process held {SIZE} \(weights {SIZE}, gradients {SIZE}, optimizer {SIZE}, other {SIZE}\)"


@pytest.mark.parametrize(
    ("worker", "error", "pattern"),
    [
        (
            "trainer-0",
            OF_GPU,
            rf"; its GPU was full; `stretto check` counts {SIZE} \(weights \d.*, activations \d\.\d, .*\); "
            r"training\.micro_batch_tokens=512 frees",
        ),
        ("trainer-critics-1", OF_HOST,
         rf"; this machine's memory was full; {HELD}; `stretto check` counts {SIZE} .*; groups\.critics\."),
        ("inference-0", OF_HOST,
         rf"held {SIZE}; .* \(weights 0\.0, .*cache \d\.\d, .*\); inference\.slots=1024 frees {SIZE}"),
        ("verifier-0", OF_HOST, rf"; this machine's memory was full; this process held {SIZE}$"),
        ("inference-0", ValueError("3"), "^$"),
    ],
)  # fmt: skip
def test_full_memory_ends_with_what_was_held_and_counted(
    worker: str, error: Exception, pattern: str, tmp_path: Path
) -> None:
    torch_engine = {"use": "torch", "micro_batch_tokens": 16384}
    file = write_run(
        tmp_path,
        model=str(QUICKSTART / "model"),
        steps=1,
        algorithm="ppo",
        inference={"use": "torch", "slots": 4096},
        training=torch_engine,
        groups={"critics": torch_engine},
        models={"critic": {"group": "critics"}},
    )
    wrapped = EngineError("the engine broke")
    wrapped.__cause__ = error
    said = out_of_memory(wrapped, worker, Assembly(compose(file), folder=""))
    assert re.search(pattern, said), said
