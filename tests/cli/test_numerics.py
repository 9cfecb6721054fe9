"""`stretto numerics`: healthy models of many shapes, and the table of planted faults in docs/numerics.md."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import stretto.training.engine as training
import stretto.training.packing as packing
import stretto_torch.decoder_fast as decoder_fast
import stretto_torch.slots as slots
from stretto.cli.numerics.bench import run
from stretto.errors import ConfigError
from stretto.testing import make_tiny_model
from stretto.testing.tiny_model import make_tiny_tokenizer
from stretto_torch.batcher import Batcher
from stretto_torch.inference import TorchInferenceEngine
from tiny_sizes import tiny_sizes
from torch_engine import Folders

LOST = "model.layers.1.mlp.down_proj.weight"
STALE = "model.embed_tokens.weight"
LONG = 60  # tokens of a row: longer than those of the trial when a model is loaded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


class Table:
    """The output of a measurement."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        self.first = text.splitlines()[0]
        self.failed = re.findall(r"^FAIL  (\w+(?: \w+)?)  ", text, re.MULTILINE)
        self.healthy = re.findall(r"^ok    (\w+(?: \w+)?)  ", text, re.MULTILINE)


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Callable[..., Table]:
    def measure(model: Path, *overrides: str, quick: bool = False) -> Table:
        status = run(str(model), overrides, None, quick=quick)
        return Table(status, capsys.readouterr().out)

    return measure


def lose_a_weight(patch: pytest.MonkeyPatch) -> None:
    swap = Batcher.swap

    def lossy(self: Batcher, tensors: dict[str, Tensor], version: int) -> float:
        lost = {LOST: torch.zeros_like(tensors[LOST])} if LOST in tensors else {}
        return swap(self, {**tensors, **lost}, version)

    patch.setattr(Batcher, "swap", lossy)


def keep_a_shard(patch: pytest.MonkeyPatch) -> None:
    swap = Batcher.swap

    def stale(self: Batcher, tensors: dict[str, Tensor], version: int) -> float:
        kept = {name: tensor for name, tensor in tensors.items() if version < 1 or name != STALE}
        return swap(self, kept, version)

    patch.setattr(Batcher, "swap", stale)


def leave_out_the_adapter(patch: pytest.MonkeyPatch) -> None:
    factors: Any = vars(training)["adapter_factors"]

    def zero(*given: Any) -> Any:
        return ((name, tensor * 0 if "lora_B" in name else tensor) for name, tensor in factors(*given))

    patch.setattr(training, "adapter_factors", zero)


def see_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    attend = packing._attend_in_blocks  # pyright: ignore[reportPrivateUsage]

    def leaky(query: Tensor, key: Tensor, value: Tensor, blocks: list[Any], scaling: float | None) -> Tensor:
        if len(blocks) == 1 or query.shape[2] < LONG:
            return attend(query, key, value, blocks, scaling)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        sizes = [block.keys for block in blocks]
        keys, values = key.split(sizes, 2), value.split(sizes, 2)
        results: list[Tensor] = []
        parts = query.split([block.queries for block in blocks], 2)
        for number, (part, block) in enumerate(zip(parts, blocks, strict=True)):
            bias = block.bias
            if bias is None:
                bias = torch.full((block.queries, block.keys), -torch.inf).triu(1)
            own = [keys[number]], [values[number]]
            if number:  # the last token of the block before
                own = [keys[number - 1][:, :, -1:], *own[0]], [values[number - 1][:, :, -1:], *own[1]]
                bias = torch.cat([torch.zeros(len(bias), 1), bias], 1)
            k, v = torch.cat(own[0], 2), torch.cat(own[1], 2)
            results.append(torch.nn.functional.scaled_dot_product_attention(part, k, v, bias, scale=scaling))
        return torch.cat(results, 2).transpose(1, 2)

    patch.setattr(packing, "_attend_in_blocks", leaky)


def continue_position_ids(patch: pytest.MonkeyPatch) -> None:
    one_row = packing._one_row  # pyright: ignore[reportPrivateUsage]

    def continued(ids: Tensor, positions: Tensor, *given: Any) -> Any:
        return one_row(ids, torch.arange(len(ids)) if len(ids) > LONG else positions, *given)

    patch.setattr(packing, "_one_row", continued)


def forget_the_temperature(patch: pytest.MonkeyPatch) -> None:
    draw: Any = vars(slots)["draw"]

    def plain(logits: Tensor, uniform: Any, settings: Any) -> Any:
        full = logits.log_softmax(-1)
        tokens, logprobs, kept = draw(logits, uniform, settings)
        if settings is not None:
            other = (settings.temperature != 1) & (settings.temperature != 0)
            at_1 = full.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
            logprobs = np.where(other, at_1, logprobs)
        return tokens, logprobs, kept

    patch.setattr(slots, "draw", plain)


def scale_far_positions(patch: pytest.MonkeyPatch) -> None:
    rotations = decoder_fast._rotations  # pyright: ignore[reportPrivateUsage]

    def scaled(rope: Any, positions: Tensor) -> Tensor:
        return rotations(rope, torch.where(positions < 512, positions, 512 + (positions - 512) / 4))

    patch.setattr(decoder_fast, "_rotations", scaled)


def lose_a_token(patch: pytest.MonkeyPatch) -> None:
    deliver = TorchInferenceEngine._deliver  # pyright: ignore[reportPrivateUsage]

    def lossy(self: Any, chunks: list[Any]) -> None:
        for chunk in chunks:
            place = 5 - chunk.position
            if 0 <= place < len(chunk.tokens):
                for name in ("tokens", "logprobs", "versions"):
                    setattr(chunk, name, np.delete(getattr(chunk, name), place))
                if chunk.kept is not None:
                    parts = chunk.kept.part(0, place), chunk.kept.part(place + 1)
                    chunk.kept = type(chunk.kept).concat(parts)
            elif chunk.position > 5:
                chunk.position -= 1
        deliver(self, chunks)

    patch.setattr(TorchInferenceEngine, "_deliver", lossy)


DEPTHS = ["depth 256", "depth 512", "depth 768", "depth 1024"]
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, list[str], str]] = [
    (lose_a_weight, "tiny", [*DEPTHS, "temperature", "greedy", "kept tokens", "swap", "adapter"],
     "other weights, or another function"),
    (leave_out_the_adapter, "tiny", ["adapter"], "without its adapter"),
    (see_one_token_too_many, "tiny", ["packing"], "see each other's tokens"),
    (continue_position_ids, "gpt2", ["packing"], "position ids do not begin again"),
    (forget_the_temperature, "tiny", ["temperature"], "temperature"),
    (keep_a_shard, "tiny", ["swap"], "a swap leaves something of the old version"),
    (scale_far_positions, "tiny", DEPTHS[2:], "beyond a depth of about 512"),
    (lose_a_token, "tiny", [*DEPTHS, "temperature", "greedy", "kept tokens", "swap"],
     "answers have fewer or other tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "model", "rows", "cause"), FAULTS, ids=[each[0].__name__ for each in FAULTS]
)
def test_a_planted_fault_fails_its_rows_and_no_others(
    plant: Callable[[pytest.MonkeyPatch], None],
    model: str,
    rows: list[str],
    cause: str,
    tiny: Path,
    folders: Folders,
    measured: Callable[..., Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    table = measured(tiny if model == "tiny" else folders[model])
    assert (table.status, table.failed) == (1, rows), table.text
    assert cause in table.first


OTHERS = ["qwen2_eos", "llama_dynamic", "qwen3", "mistral", "gpt2", "gemma2", "wide"]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_healthy_model_is_healthy(name: str, folders: Folders, measured: Callable[..., Table]) -> None:
    table = measured(folders[name], *(["training.lora.targets=[c_attn]"] if name == "gpt2" else []))
    assert (table.status, table.failed) == (0, []), table.text
    assert table.first == "healthy: no row is out of its range"
    assert len(table.healthy) == 11, table.text


def test_a_hybrid_the_engine_cannot_serve_is_named(tmp_path: Path, measured: Callable[..., Table]) -> None:
    kinds = ["linear_attention", "full_attention"]
    state = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    sizes = tiny_sizes(32, layers=2, head_dim=16, vocab_size=101)
    state |= {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
    dense = {"num_experts": 0, "mlp_only_layers": [0, 1], "layer_types": kinds}
    config = AutoConfig.for_model("qwen3_next", **sizes, **state, **dense, eos_token_id=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    table = measured(tmp_path)
    assert (table.status, table.failed, table.healthy) == (1, ["engine"], ["packing"]), table.text
    assert "padded" in table.text
    assert table.first.startswith("likely cause: the engine 'torch' stopped: ")
    assert "use vllm or sglang" in table.first


PIPELINE = ["training={use: pipeline, processes: 2, stages: 2}", "training.micro_batch_tokens=64"]


@pytest.mark.parametrize(
    ("model", "overrides", "depth", "message"),
    [
        ("no/such/model", [], None, "no such folder"),
        ("tiny", [], 5000, "--depth 5000: a sample has 1024 tokens at most"),
        ("tiny", ["training.use=mock"], None, "'mock' does not train a model of files"),
        ("tiny", ["inference.slotz=2"], None, "unknown key 'slotz'"),
        ("tiny", PIPELINE, None, "training: cannot be measured in one process: "),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: str, overrides: list[str], depth: int | None, message: str, tiny: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(str(tiny) if model == "tiny" else model, overrides, depth, quick=True)


def test_a_healthy_model_in_bfloat16_is_healthy_at_little_depth(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["training.dtype=bfloat16", "inference.dtype=bfloat16"]
    assert run(str(tiny), overrides, 32, quick=True) == 0, capsys.readouterr().out
    assert "bfloat16" in Table(0, capsys.readouterr().out).healthy


def test_an_engine_without_numbers_is_named(
    tiny: Path, measured: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = Batcher.swap

    def broken(self: Batcher, tensors: dict[str, Tensor], version: int) -> float:
        return swap(self, {**tensors, LOST: tensors[LOST] * torch.nan}, version)

    monkeypatch.setattr(Batcher, "swap", broken)
    table = measured(tiny, quick=True)
    assert table.status == 1
    assert "not numbers" in table.first or "not finite" in table.first, table.text


@pytest.mark.slow
def test_a_run_file_is_measured_by_the_command() -> None:
    command = [sys.executable, "-m", "stretto", "numerics", "examples/quickstart/run.yaml", "--quick"]
    done = subprocess.run([*command, "inference.deterministic=true"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = Table(done.returncode, done.stdout)
    depths = [f"depth {depth}" for depth in (24, 48, 72, 96)]
    sampled = ["temperature", "greedy", "kept tokens", "determinism", "swap"]
    assert table.healthy == ["packing", "weights", *depths, *sampled]
    assert "million parameters" in done.stderr
