"""Fixtures shared by all tests: a real nats-server, and a bus on it for any role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from stretto.bus.client import Bus, connect
from stretto.bus.messages import Subjects
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.config import BusConfig

RUN = "test-run"


@pytest.fixture
def bus_config() -> BusConfig:
    """Overridden by tests that want another."""
    return BusConfig(grace_s=2.0, max_payload_mb=1)


@pytest.fixture
async def server(tmp_path: Path, bus_config: BusConfig) -> AsyncIterator[NatsServer]:
    """A real server on a free port, under its guard, owned by this process."""
    folder = tmp_path / "bus"
    lock = lock_run(folder)
    running = await NatsServer.start(folder, RUN, bus_config, tmp_path / "logs")
    yield running
    await running.stop()
    lock.close()


OpenBus = Callable[[str], AbstractAsyncContextManager[Bus]]


@pytest.fixture
def open_bus(server: NatsServer, tmp_path: Path) -> OpenBus:
    """`async with open_bus("rollout") as bus`: a bus with the credentials of a role."""
    del server

    def open_as(role: str) -> AbstractAsyncContextManager[Bus]:
        return connect(Bootstrap.read(tmp_path / "bus" / f"{role}.json"), f"st.{RUN}.inbox.{role}")

    return open_as


@pytest.fixture
def names() -> Subjects:
    """Subjects of the test's run."""
    return Subjects(RUN)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_models("qwen2")`: folder of a random model of that architecture, with a tokenizer."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            _make_tiny_model(architecture, made[architecture])
        return made[architecture]

    return folder


def _make_tiny_model(architecture: str, folder: Path) -> None:
    """About 0.1 M parameters over printable ASCII; sharp enough that errors show."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<|im_end|>"]
    characters = ["Ġ" if code == 32 else chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<pad>"
    )
    fast.save_pretrained(folder)
    common = {
        "vocab_size": len(vocabulary),
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.08,
    }
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }
    options = {
        "qwen2": {**sizes, "tie_word_embeddings": True},
        "llama": {**sizes, "tie_word_embeddings": False},
        "gemma2": {**sizes, "head_dim": 32, "sliding_window": 8, "attn_implementation": "eager"},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model(architecture, **common, **options[architecture])
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)
