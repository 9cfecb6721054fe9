"""Training over several processes gives the numbers of one: FSDP2, copies, tensor parallel, pipeline."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fixture_types import Models
from patience import patience
from stretto.algorithm import AlgorithmConfig
from stretto.bus.server import free_port
from stretto.config import RunConfig
from stretto.dataset import DatasetConfig
from stretto.errors import EngineError
from stretto.user_code.importable import load_module
from stretto_fsdp2.tensor_parallel import check_splits
from tiny_sizes import IDS, tiny_sizes
from training_engines import off

PROGRAM = Path(__file__).with_name("layout_ranks.py")


layout_ranks: Any = load_module(str(PROGRAM))
"""The program of a rank as a module, to measure a single process with."""
SGD = {"optimizer": "sgd", "lr": 0.1}
ADAM = {"lr": 1e-3, "eps": 1e-6}
SIZES = {
    **tiny_sizes(64, layers=3, heads=4, key_heads=2, head_dim=16, vocab_size=layout_ranks.VOCABULARY),
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
    **IDS,
}
TIED = {"qwen2": True, "llama": False, "gemma": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"use": "pipeline", "processes": 2, "stages": 2},
    "fsdp2": {"use": "fsdp2", "processes": 2},
    "copies": {"use": "fsdp2", "processes": 2, "shard": False},
    "tensor_parallel": {"use": "fsdp2", "processes": 2, "tensor_parallel": 2},
}


@dataclass
class Measured:
    """What `layout_ranks.measure` left, of all ranks."""

    folder: Path
    ranks: int
    width: int

    def of(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(self.ranks)]

    def said(self, name: str) -> Tensor:
        return torch.tensor([number for rank in self.of(name)[:: self.width] for number in rank["said"]])

    def steps(self, name: str) -> list[dict[str, float]]:
        """The statistics, which must be the same in all ranks."""
        found = self.of(name)
        assert all(rank["steps"] == found[0]["steps"] for rank in found)
        return found[0]["steps"]

    def update(self, name: str) -> dict[str, Tensor]:
        tensors = load_file(self.folder / f"{name}.safetensors")
        names = sorted(key.removeprefix("after.") for key in tensors if key.startswith("after."))
        return {key: tensors[f"after.{key}"] - tensors[f"before.{key}"] for key in names}


def run_ranks(folder: Path, ranks: int, *, meeting: str = "", **case: Any) -> None:
    """Run a case in processes of its own, all ended after 15 minutes. The ranks find each other through a
    file, or as `meeting` says."""
    (folder / "case.json").write_text(json.dumps(case))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEETING": meeting}
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + patience(900)
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.txt").open("wb") as output:
                command = [sys.executable, str(PROGRAM), str(folder), str(rank)]
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = "\n".join((folder / f"{rank}.txt").read_text()[-3000:] for rank in range(ranks))
    assert [process.returncode for process in processes] == [0] * ranks, told


Runs = list[dict[str, Any]]


def run_layouts(
    folder: Path, layouts: Mapping[str, tuple[Mapping[str, Any], Runs]], meeting: str = ""
) -> dict[str, Measured]:
    """Measure layouts of the same number of ranks, by name options and runs. They share the processes, which
    take longer to import their libraries than to train."""
    [ranks] = {int(options["processes"]) for options, _ in layouts.values()}
    runs: Runs = []
    found: dict[str, Measured] = {}
    for name, (options, own) in layouts.items():
        (folder / name).mkdir(parents=True)
        found[name] = Measured(folder / name, ranks, ranks // layout_ranks.config_of(options).data_parallel)
        runs += [
            {**run, "name": f"{name}/{run['name']}", "options": {**options, **run["options"]}} for run in own
        ]
    run_ranks(folder, ranks, meeting=meeting, runs=runs)
    return found


# ------------------------------------------------------------------------------- what is measured


def runs_of(models: Mapping[str, Path], saved: Path, loads: Mapping[str, Path]) -> Runs:
    """The measurements of each layout; those with `loads` begin from checkpoints of others."""
    runs: Runs = []
    for model, folder in models.items():
        common = {"model": str(folder)}
        runs.append({**common, "name": f"{model}-sgd", "options": SGD})
        runs.append({**common, "name": f"{model}-drawn", "options": SGD, "drawn": True})
        runs.append({**common, "name": f"{model}-kept", "options": SGD, "drawn": True, "whole": False})
        adam = {"seeds": [0, 1], "save": str(saved / model), "more": [2]}
        runs.append({**common, "name": f"{model}-adam", "options": ADAM, **adam})
    qwen2, llama = str(models["qwen2"]), str(models["llama"])
    clipped = {**SGD, "lr": 10.0, "clip_norm": 0.1}
    runs.append({"name": "clipped", "model": qwen2, "options": clipped})
    runs.append({"name": "value", "model": qwen2, "options": SGD, "head": "value", "seeds": [0, 1]})
    padded = {**SGD, "packing": "padded"}
    runs.append({"name": "reward", "model": llama, "options": padded, "head": "reward", "seeds": [0, 1]})
    runs.append({"name": "frozen", "model": qwen2, "options": {}, "trainable": False, "seeds": []})
    for name, folder in loads.items():
        model = folder.name
        load = {"load": str(folder), "seeds": [2]}
        runs.append({"name": name, "model": str(models[model]), "options": ADAM, **load})
    return runs


ADAPTERS = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"], "send": "merged"}
LORA: dict[str, Any] = {"name": "lora", "options": {**ADAM, "lr": 1e-2, "lora": ADAPTERS}}


@pytest.fixture(scope="session")
def models(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for architecture, tied in TIED.items():
        folders[architecture] = tmp_path_factory.mktemp("models") / architecture
        shutil.copytree(tiny_models("qwen2"), folders[architecture])
        torch.manual_seed(3)
        config = AutoConfig.for_model(architecture, **SIZES, tie_word_embeddings=tied)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folders[architecture])
    return folders


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all layouts put what they find, and their checkpoints under `saved/<layout>/<model>`."""
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="session")
def single(models: dict[str, Path], work: Path) -> Measured:
    folder = work / "torch"
    folder.mkdir()
    runs = runs_of(models, work / "saved/torch", {})
    runs.append({**LORA, "model": str(models["qwen2"])})
    for run in runs:
        layout_ranks.measure(folder, **{**run, "options": {"use": "torch", **run["options"]}})
    return Measured(folder, 1, 1)


@pytest.fixture(scope="session")
def measured(single: Measured, models: dict[str, Path], work: Path) -> dict[str, Measured]:
    """The figures of each layout. The ranks meet over TCP, as those of several machines do; in the other
    tests they meet through a file."""
    del single  # it has saved the checkpoints that others begin from
    saved = work / "saved"
    loads = {
        "pipeline": {"from-torch": saved / "torch/qwen2"},
        "fsdp2": {"from-torch": saved / "torch/llama", "from-pipeline": saved / "pipeline/qwen2"},
        "copies": {},
        "tensor_parallel": {"from-fsdp2": saved / "fsdp2/qwen2"},
    }
    layouts: dict[str, tuple[Mapping[str, Any], Runs]] = {}
    for layout, options in LAYOUTS.items():
        runs = runs_of(models, saved / layout, loads[layout])
        if layout in ("fsdp2", "pipeline"):
            runs.append({**LORA, "model": str(models["qwen2"]), "save": str(saved / layout / "lora")})
        layouts[layout] = options, runs
    return run_layouts(work / "ranks", layouts, f"tcp://127.0.0.1:{free_port()}")


# ------------------------------------------------------------------------------------------ tests


def test_two_ranks_give_the_numbers_of_one_process(models: dict[str, Path], tmp_path: Path) -> None:
    """One layout of one model. The slow tests have all of both."""
    run = {"name": "sgd", "model": str(models["qwen2"]), "options": SGD}
    found = run_layouts(tmp_path / "ranks", {"fsdp2": (LAYOUTS["fsdp2"], [run])})["fsdp2"]
    alone = Measured(tmp_path, 1, 1)
    layout_ranks.measure(tmp_path, **{**run, "options": {"use": "torch", **SGD}})
    assert float((found.said("sgd") - alone.said("sgd")).abs().max()) < 1e-4
    assert found.steps("sgd")[0]["loss"] == pytest.approx(alone.steps("sgd")[0]["loss"], rel=1e-5)
    assert off(found.update("sgd"), alone.update("sgd")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_process(
    layout: str, single: Measured, measured: dict[str, Measured]
) -> None:
    found = measured[layout]
    for model in TIED:
        adam = f"{model}-adam"
        # From the whole vocabulary, and from parts of it with and without a loss over the whole one.
        for sgd in (f"{model}-sgd", f"{model}-drawn", f"{model}-kept"):
            assert float((found.said(sgd) - single.said(sgd)).abs().max()) < 1e-4
            for name, value in single.steps(sgd)[0].items():
                if name != "micro_batches":
                    assert found.steps(sgd)[0][name] == pytest.approx(value, rel=1e-5), name
            assert off(found.update(sgd), single.update(sgd)) < 1e-5
        assert found.steps(adam)[2]["loss"] == pytest.approx(single.steps(adam)[2]["loss"], rel=1e-3)
        assert off(found.update(adam), single.update(adam)) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_and_clipping_are_those_of_one_process(
    layout: str, single: Measured, measured: dict[str, Measured]
) -> None:
    found = measured[layout]
    for name in ("value", "reward", "clipped"):
        for mine, theirs in zip(found.steps(name), single.steps(name), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5), name
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), name
        assert off(found.update(name), single.update(name)) < 1e-5, name
    assert float((found.said("frozen") - single.said("frozen")).abs().max()) < 1e-4
    assert found.update("frozen").keys() == single.update("qwen2-sgd").keys()
    assert single.steps("clipped")[0]["grad_norm"] > 0.1
    assert "entropy" not in single.steps("value")[0]


@pytest.mark.slow
def test_checkpoints_go_from_any_layout_to_any_other(
    single: Measured, models: dict[str, Path], measured: dict[str, Measured], work: Path
) -> None:
    for layout, name, source, model in (
        ("pipeline", "from-torch", "torch", "qwen2"),
        ("fsdp2", "from-torch", "torch", "llama"),
        ("fsdp2", "from-pipeline", "pipeline", "qwen2"),
        ("tensor_parallel", "from-fsdp2", "fsdp2", "qwen2"),
    ):
        saver = single if source == "torch" else measured[source]
        expected = saver.steps(f"{model}-adam")[2]
        assert measured[layout].steps(name)[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert measured[layout].steps(name)[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for source in ("fsdp2", "pipeline", "tensor_parallel"):
        layout_ranks.measure(
            single.folder,
            f"from-{source}",
            str(models["gemma"]),
            {"use": "torch", **ADAM},
            seeds=[2],
            load=str(work / "saved" / source / "gemma"),
        )
        expected = measured[source].steps("gemma-adam")[2]
        assert single.steps(f"from-{source}")[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize("layout", ["fsdp2", "pipeline"])
def test_adapters_train_alike_and_can_be_loaded_by_peft(
    layout: str, single: Measured, models: dict[str, Path], measured: dict[str, Measured], work: Path
) -> None:
    found = measured[layout]
    assert found.steps("lora")[0]["loss"] == pytest.approx(single.steps("lora")[0]["loss"], rel=1e-5)
    changed = {name for name, update in found.update("lora").items() if update.abs().max() > 0}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    assert off(found.update("lora"), single.update("lora")) < 1e-2

    folder = work / "saved" / layout / "lora"
    tokens = torch.arange(2, 12)[None]
    base = AutoModelForCausalLM.from_pretrained(models["qwen2"])
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, folder / "adapter")(input_ids=tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(folder / "model")(input_ids=tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(models["qwen2"])(input_ids=tokens).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-5)
    assert float((adapted - plain).abs().max()) > 1e-3


# ------------------------------------------------------------------------------------ slow: more ranks


OTHERS: dict[str, dict[str, Any]] = {
    "-".join(f"{key}={value}" for key, value in options.items()): options
    for options in (
        {"use": "fsdp2", "processes": 4, "tensor_parallel": 2},
        {"use": "fsdp2", "processes": 4, "tensor_parallel": 2, "shard": False},
        {"use": "pipeline", "processes": 4, "stages": 2},
        {"use": "pipeline", "processes": 3, "stages": 3},
        {"use": "fsdp2", "processes": 2, "state": "host"},
        {"use": "fsdp2", "processes": 2, "gradient_checkpointing": True},
        {"use": "pipeline", "processes": 2, "gradient_checkpointing": True},
        {"use": "fsdp2", "processes": 2, "compile": True},
    )
}


@pytest.fixture(scope="session")
def others(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Measured]]:
    """`others(4)`: the figures of the other layouts of four ranks."""

    @cache
    def of(ranks: int) -> dict[str, Measured]:
        folder = tmp_path_factory.mktemp("others")
        layouts: dict[str, tuple[Mapping[str, Any], Runs]] = {}
        for name, options in OTHERS.items():
            if options["processes"] == ranks:
                every = runs_of(models, folder / "saved" / name, {})
                runs = [run for run in every if run["name"] in ("qwen2-adam", "llama-sgd", "value")]
                layouts[name] = options, runs
        return run_layouts(folder / "ranks", layouts)

    return of


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_give_the_numbers_of_one_process(
    name: str, single: Measured, others: Callable[[int], dict[str, Measured]]
) -> None:
    found = others(OTHERS[name]["processes"])[name]
    assert float((found.said("llama-sgd") - single.said("llama-sgd")).abs().max()) < 1e-4
    for run in ("llama-sgd", "value"):
        assert found.steps(run)[0]["grad_norm"] == pytest.approx(single.steps(run)[0]["grad_norm"], rel=1e-5)
        assert off(found.update(run), single.update(run)) < 1e-5, run
    assert off(found.update("qwen2-adam"), single.update("qwen2-adam")) < 1e-2


@pytest.mark.nightly
def test_gradients_in_bfloat16_are_close(single: Measured, models: dict[str, Path], tmp_path: Path) -> None:
    run = {"name": "low", "model": str(models["llama"]), "options": SGD}
    low = {"use": "fsdp2", "processes": 2, "reduce_dtype": "bfloat16"}
    layouts = {f"shard={shard}": ({**low, "shard": shard}, [run]) for shard in (True, False)}
    for found in run_layouts(tmp_path / "ranks", layouts).values():
        assert 1e-6 < off(found.update("low"), single.update("llama-sgd")) < 1e-2


@pytest.mark.nightly
def test_two_ranks_need_less_memory_each(models: dict[str, Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 20, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes, **heads})
    model = AutoModelForCausalLM.from_config(config).float()
    assert model.num_parameters() >= 60e6
    model.save_pretrained(tmp_path / "large")
    del model
    figures: dict[str, list[dict[str, float]]] = {}
    for use, ranks in (("torch", 1), ("fsdp2", 2)):
        (tmp_path / use).mkdir()
        weigh = {"tiny": str(models["llama"]), "large": str(tmp_path / "large")}
        options = {"use": use, "processes": ranks, "micro_batch_tokens": 64}
        run_ranks(tmp_path / use, ranks, weigh={**weigh, "options": options})
        figures[use] = Measured(tmp_path / use, ranks, 1).of("memory")
    [alone] = figures["torch"]
    for shared in figures["fsdp2"]:
        for name in ("after", "peak"):
            assert shared[name] < 0.65 * alone[name], (name, figures)


# ---------------------------------------------------------------------------------------- bad input


def refusals(options: dict[str, Any], model: Path) -> list[str]:
    check = layout_ranks.ENGINES[options["use"]].check
    algorithm = AlgorithmConfig(use="grpo")
    dataset = DatasetConfig(use="jsonl")
    run = RunConfig(name="n", steps=1, algorithm=algorithm, dataset=dataset, model=str(model))
    return [f"{problem.path} {problem.message}" for problem in check(layout_ranks.config_of(options), run)]


def test_layouts_that_the_processes_do_not_fill_are_refused() -> None:
    two_parts = LAYOUTS["tensor_parallel"]
    for options, message in (
        ({"use": "fsdp2", "processes": 3, "tensor_parallel": 2}, r"processes \(3\) must be a multiple"),
        ({"use": "pipeline", "processes": 3}, r"processes \(3\) must be a multiple of stages \(2\)"),
        ({**two_parts, "lora": {}}, "lora and tensor_parallel"),
        ({"use": "fsdp2", "shard": False, "state": "host"}, "state: host needs the engine torch, or fsdp2"),
        ({"use": "pipeline", "state": "host"}, "state: host needs the engine torch"),
    ):
        with pytest.raises(msgspec.ValidationError, match=message):
            layout_ranks.config_of(options)


def test_layouts_that_a_model_does_not_divide_into_are_refused(models: dict[str, Path]) -> None:
    three = {"use": "fsdp2", "processes": 3, "tensor_parallel": 3}
    assert refusals(three, models["llama"]) == [
        "training.tensor_parallel is 3; it must divide the model's num_attention_heads, 4",
        "training.tensor_parallel is 3; it must divide the model's num_key_value_heads, 2",
    ]
    [refusal] = refusals({"use": "pipeline", "processes": 4, "stages": 4}, models["llama"])
    assert refusal == "training.stages is 4, but the model has 3 layers; at most 3"
    assert refusals(LAYOUTS["tensor_parallel"], models["llama"]) == []
    refusal, *_ = refusals({"use": "torch", "processes": 2}, models["llama"])
    assert refusal.startswith("training.processes is 2")


@pytest.mark.parametrize(
    ("options", "architecture", "message"),
    [
        ({"use": "fsdp2", "lora": {"targets": ["to_q"]}}, "qwen2", "'to_q' is no linear"),
        ({"use": "torch", "lora": {"targets": ["lm_head"]}}, "qwen2", "'lm_head' is no linear"),  # tied
        ({"use": "pipeline", "processes": 1, "stages": 1}, "gpt2", "it has no embed_tokens, layers, norm"),
        ({"use": "torch", "compile": True}, "mamba", "has no layers with a module 'mlp'"),
    ],
    ids=["lora", "tied", "pipeline", "compile"],
)
def test_models_that_an_engine_cannot_train_are_refused(
    options: dict[str, Any], architecture: str, message: str, tiny_models: Models, tmp_path: Path
) -> None:
    if architecture == "mamba":
        config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=20)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = tmp_path if architecture == "mamba" else tiny_models(architecture)
    engine = layout_ranks.engine_of(tmp_path, str(model), options)
    try:
        with pytest.raises(EngineError, match=message):
            engine.load(None)
    finally:
        engine.stop()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_a_model_that_cannot_be_split_by_tensor_is_refused(architecture: str) -> None:
    config = AutoConfig.for_model(architecture, **(SIZES if architecture == "qwen3" else {"n_layer": 1}))
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(EngineError, match="does not know how to split"):
        check_splits(model, 2)
