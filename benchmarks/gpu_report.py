"""What one GPU does, in at most five minutes: `make gpu-report`, with the torch that is there.

    python benchmarks/gpu_report.py [--only PART ...] [--seconds 300] [--deadline SECONDS] [--size tiny]

Models are Qwen2 of random weights with 0.5 and 1.5 B parameters, whose tokenizer has one word for each token,
so nothing is downloaded. Everything computes in bfloat16. A batch has groups of 8 answers of 256 tokens to
prompts of 64. Each part is a process of its own, killed at its deadline, and gives one JSON line at its end.
The most valuable parts come first, since the last ones are left out when the time is over:

- `tests`: `make test-gpu`;
- `training`, `training-large`: the rate of a large product, and steps with attention in a call for each
  sequence and by varlen;
- `lora`: the same with adapters and a base in bfloat16;
- `host`: steps with float32 weights and the optimizer in the host's memory;
- `decoding`: an engine whose slots are full from the first token to the last, without and with CUDA graphs;
- `sleep`: an engine that frees its memory, and takes it again with a version;
- `memory`: what `stretto check` predicts for four trainers, beside the most that torch has allocated;
- `collective`: a run with both on the GPU. `auto` has to choose gloo there, and `nccl` has to be refused.

`peak_share` is 6 operations for each parameter and computed token (4 with adapters, which keep most of them
fixed), and those of attention, over the card's dense bf16 rate. Without a GPU `--size tiny` computes on the
CPU, which only shows that the report works. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import anyio
import numpy as np
import psutil
import structlog
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from decode import Engine, Work
from memory import MODELS, qwen2
from packing import computed, negative
from stretto.algorithm import Loss
from stretto.component import Context
from stretto.engine import HeldModel
from stretto.models.files import parameters_in
from stretto.models.version_files import FolderPublisher, open_version
from stretto.rl.batch import Batch
from stretto.training.config import LoraConfig
from stretto.training.engine import HFTraining
from stretto.weights import WeightUpdate
from stretto_collective.meeting import choose_backend, gpu_for
from stretto_torch import TorchInferenceConfig, TorchTrainingConfig
from stretto_torch.inference import TorchInferenceEngine
from whole_runs import summary_of

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
NO_GPU: dict[str, Any] = {"left_out": "needs CUDA"}
PROMPT, GROUP = 64, 8
ROOM = 64
"""Tokens of a slot beside prompt and answer, for the canary."""
PEAKS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10": 125, "4090": 165}
"""TFLOP/s of dense products in bfloat16, as the maker says, by a word of the device's name."""
COMMON: dict[str, Any] = {"dtype": "bfloat16", "gpus": int(HAS_GPU)}
DECODERS: dict[str, dict[str, Any]] = {"plain": {}, **({"graphs": {"cuda_graphs": True}} if HAS_GPU else {})}
"""Options of the engine whose decoding is compared."""
REWARD = """\
def even(completions, **kwargs):
    return [sum(word[-1] in "02468" for word in text.split()) / (1 + text.count(" ")) for text in completions]
"""

Figures = dict[str, Any]
Rows = dict[str, Callable[[], Figures]]
"""What a part measures, by name, in its order."""


@dataclass(frozen=True)
class Setting:
    """What the parts measure, and the folder that they share."""

    small: Figures  # keys of a configuration
    large: Figures
    groups: int
    answer: int  # tokens
    slots: tuple[int, ...]
    steps: int
    folder: Path = Path()

    def batch(self) -> Batch:
        """Random tokens; the prompt of a group is the same."""
        generator = torch.Generator().manual_seed(0)
        most, length, count = self.small["vocab_size"], PROMPT + self.answer, self.groups * GROUP
        tokens = torch.randint(2, most, (self.groups, GROUP, length), generator=generator)
        tokens[:, :, :PROMPT] = tokens[:, :1, :PROMPT]
        mask = (torch.arange(length) >= PROMPT).repeat(count)
        groups = torch.arange(count) // GROUP
        return Batch([length] * count, {"tokens": tokens.flatten(), "loss_mask": mask}, {"group": groups})

    @property
    def attended(self) -> int:
        """Pairs of a query and a key in a batch, where the prompt of a group is computed once."""
        of_answers = GROUP * ((PROMPT + self.answer) ** 2 - PROMPT**2)
        return self.groups * (PROMPT**2 + of_answers) // 2

    def model(self, name: str) -> Path:
        """Return the folder of the model `small` or `large` with its tokenizer; make it first if needed."""
        folder = self.folder / name
        if not folder.exists():
            making = folder.with_suffix(".new")  # a part that is killed leaves no half of a model
            make_model(getattr(self, name), making)
            making.rename(folder)
        return folder


SETTINGS = {
    "full": Setting(MODELS["0.5 B"], MODELS["1.5 B"], 16, 256, (64, 128, 256), 3),
    "tiny": Setting(
        qwen2(64, 256, 2, 4, 2, vocab_size=2048), qwen2(96, 256, 3, 4, 2, vocab_size=2048), 2, 16, (4, 8), 2
    ),
}


def make_model(keys: Any, folder: Path) -> None:
    words = {"<pad>": 0, "<end>": 1} | {f"w{token}": token for token in range(2, keys["vocab_size"])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**keys, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def collect() -> None:
    """Free unused memory, and reset the peak."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(call: Callable[[], object], times: int) -> float:
    """Return the mean seconds of a call, after one that does not count."""
    call()
    finish = torch.cuda.synchronize if HAS_GPU else int
    finish()
    began = perf_counter()
    for _ in range(times):
        call()
    finish()
    return (perf_counter() - began) / times


def peak_memory() -> Figures:
    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if HAS_GPU else {}


def card_gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if HAS_GPU else 0.0


def card() -> Figures:
    name = torch.cuda.get_device_name() if HAS_GPU else "cpu"
    return {"name": name, "gib": card_gib(), "product_tflops": product_rate() / 1e12}


def product_rate() -> float:
    """Operations per second of large products in bfloat16."""
    size = 8192 if HAS_GPU else 256
    matrix = torch.randn(size, size, device=DEVICE).bfloat16()
    return 2 * size**3 / timed(lambda: matrix @ matrix, 8)


def peak_rate() -> float:
    """The card's operations per second: those of its maker, or measured for an unknown device."""
    words = re.split(r"\W+", torch.cuda.get_device_name()) if HAS_GPU else []
    return next((1e12 * PEAKS[word] for word in words if word in PEAKS), None) or product_rate()


def tested() -> Figures:
    if not HAS_GPU:
        return NO_GPU
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-m", "gpu", "tests/gpu"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    reasons = re.findall("^(?:FAILED|ERROR).*", done.stdout, re.MULTILINE)
    outcome = {"outcome": done.stdout.strip().rpartition("\n")[2]}
    return {**outcome, "failed": reasons} if done.returncode else outcome


def training(name: str, setting: Setting) -> Rows:
    measure = partial(train, setting, name)
    return {
        "card": card,
        "calls": measure,
        "varlen": partial(measure, varlen_attention=True) if HAS_GPU else lambda: NO_GPU,
    }


def lora(setting: Setting) -> Rows:
    return {name: partial(train, setting, name, lora=LoraConfig()) for name in ("small", "large")}


def host(setting: Setting) -> Rows:
    return {name: partial(train, setting, name, state="host") for name in ("small", "large")}


def train_config(**options: Any) -> TorchTrainingConfig:
    tokens = 16_384 if card_gib() > 100 else 4096  # 1.5 B parameters take 84 or 43 GiB
    section: Figures = {"micro_batch_tokens": tokens, **COMMON, **options}
    return TorchTrainingConfig(**section)


def train(setting: Setting, name: str, **options: Any) -> Figures:
    """The figures of an engine's steps, after two others."""
    model, config, batch = setting.model(name), train_config(**options), setting.batch()
    collect()
    trainer = HFTraining(config, Context(run="b", name="b", seed=0, model=str(model)))
    with capture_logs() as logs:
        trainer.load(None)
    if refusals := [line.get("reason", line["event"]) for line in logs if line["log_level"] == "warning"]:
        return {"failed": refusals[0]}
    tokens = computed(trainer, [batch])
    seconds = timed(lambda: trainer.train(batch, Loss(negative, "token"), temperature=1.0), setting.steps)
    keys, parameters = getattr(setting, name), parameters_in(str(model))
    of_weights = (6 if config.lora is None else 4) * parameters * tokens
    of_attention = 12 * keys["num_hidden_layers"] * keys["hidden_size"] * setting.attended
    return {
        **peak_memory(),
        "parameters_m": parameters / 1e6,
        "step_s": seconds,
        "tokens_per_s": batch.num_tokens / seconds,
        "computed_tokens_per_s": tokens / seconds,
        "peak_share": (of_weights + of_attention) / seconds / peak_rate(),
        "micro_batch_tokens": config.micro_batch_tokens,
    }


def memory(setting: Setting) -> Rows:
    few = replace(setting, groups=4)  # two full micro-batches
    adapters: Figures = {"lora": LoraConfig()}
    less: Figures = {"gradient_checkpointing": True}
    files = [("small", Figures()), ("small", adapters | less), ("large", adapters), ("small", less)]
    for name in ("small", "large"):
        setting.model(name)
    with ThreadPoolExecutor() as pool:  # each count is a process of its own
        counts = list(pool.map(partial(predicted, setting), files))
    return {
        ", ".join((name, *options)): partial(beside, few, name, options, count)
        for (name, options), count in zip(files, counts, strict=True)
    }


def predicted(setting: Setting, file: tuple[str, Figures]) -> float:
    """The GiB that `stretto check` counts for a trainer."""
    held = HeldModel(str(setting.model(file[0])), "policy", trainable=True)
    found = train_config(micro_batch_tokens=4096, **file[1]).memory([held], PROMPT + setting.answer)
    assert found is not None
    assert "not known" not in found.settings, found.settings
    return found.size / 2**30


def beside(setting: Setting, name: str, options: Figures, count: float) -> Figures:
    """The predicted size, and the measured one on a GPU."""
    if HAS_GPU and count > card_gib():
        return {"predicted_gib": count, "left_out": "does not fit on this card"}
    peak = train(setting, name, micro_batch_tokens=4096, **options).get("peak_gib")
    return {"predicted_gib": count, **({"peak_gib": peak, "ratio": count / peak} if peak else NO_GPU)}


def decoding(setting: Setting) -> Rows:
    return {
        f"{slots} slots, {name}": partial(anyio.run, partial(decode, setting, slots, options))
        for slots in setting.slots
        for name, options in DECODERS.items()
    }


async def decode(setting: Setting, slots: int, options: Mapping[str, Any]) -> Figures:
    tokens = setting.answer
    async with served(setting, slots, options) as (engine, *_):
        prompts = [*np.random.default_rng(0).integers(2, 100, (slots, PROMPT), np.int32)]
        await engine.generate(Work(prompts, [tokens] * slots))  # captures all graphs
        began = perf_counter()
        await engine.generate(Work(prompts, [tokens] * slots))
        seconds = perf_counter() - began
    return {"tokens_per_s": slots * tokens / seconds, "step_ms": 1000 * seconds / tokens, **peak_memory()}


def sleeping(setting: Setting) -> Rows:
    return {f"{setting.slots[-1]} slots": partial(anyio.run, partial(sleep_and_wake, setting))}


async def sleep_and_wake(setting: Setting) -> Figures:
    """The seconds of both, and what the process has of the device while the engine is awake and asleep."""
    async with served(setting, setting.slots[-1], {}) as (_, torch_engine, version):
        awake, asleep, times = held_gib(), 0.0, list[float]()
        for _ in range(2):
            began = perf_counter()
            await torch_engine.sleep()
            slept, asleep = perf_counter(), held_gib()
            await torch_engine.swap(version())
            times = [slept - began, perf_counter() - slept]
    return {"awake_gib": awake, "asleep_gib": asleep, "sleep_s": times[0], "wake_s": times[1]}


def held_gib() -> float:
    if not HAS_GPU:
        return psutil.Process().memory_full_info().pss / 2**30
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 2**30


@asynccontextmanager
async def served(
    setting: Setting, slots: int, options: Mapping[str, Any]
) -> AsyncGenerator[tuple[Engine, TorchInferenceEngine, Callable[[], WeightUpdate]]]:
    """An engine that serves a version, and what gives the version."""
    model, folder = setting.model("small"), setting.folder / "decoding"
    collect()
    room = PROMPT + setting.answer + ROOM
    section: Figures = {"slots": slots, "context_length": room, **COMMON, **options}
    context = Context(run="b", name="b", seed=0, model=str(model), folder=str(folder), worker="inference-0")
    torch_engine = TorchInferenceEngine(TorchInferenceConfig(**section), context)
    engine = Engine(torch_engine)
    publisher = FolderPublisher(folder / "versions", keep=1, shard_gb=1.0)
    note = publisher.publish(0, load_file(model / "model.safetensors").items())
    version = partial(open_version, note, Path(note.address))
    async with anyio.create_task_group() as tasks:
        await engine.start(version(), tasks)
        yield engine, torch_engine, version
        await engine.stop()
        tasks.cancel_scope.cancel()


def collective(setting: Setting) -> Rows:
    return {"auto": partial(whole_run, setting), "nccl": partial(refused_run, setting)}


def run_file(setting: Setting) -> Path:
    """Write the run file, its rows and its reward."""
    folder, rng, words = setting.folder, random.Random(0), setting.small["vocab_size"]
    rows = [{"prompt": " ".join(f"w{rng.randrange(2, words)}" for _ in range(PROMPT))} for _ in range(512)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    shared = "gpus: 1, share: {}" if HAS_GPU else "gpus: 0"
    slots, length = setting.groups * GROUP, PROMPT + setting.answer + ROOM
    run = f"""\
name: gpu
model: {setting.model("small")}
algorithm: {{use: grpo, group_size: {GROUP}}}
training: {{use: torch, lr: 1.0e-5, dtype: bfloat16, micro_batch_tokens: 4096, {shared.format(0.5)}}}
inference: {{use: torch, dtype: bfloat16, slots: {slots}, context_length: {length}, {shared.format(0.4)}}}
sampling: {{max_tokens: {setting.answer}}}
reward: {{use: function, function: "{folder}/reward.py:even"}}
dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
queue: {{batch_size: {setting.groups}, max_staleness: 2}}
steps: {setting.steps + 2}
"""
    (folder / "run.yaml").write_text(run)
    return folder / "run.yaml"


def whole_run(setting: Setting) -> Figures:
    """The medians of a run's steps, but for its first two."""
    run, gpu = setting.folder / "run", gpu_for("auto")
    summary_of(run_file(setting), run, "weights={use: collective, backend: auto}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "ledger" in line][2:]
    return {
        "backend": choose_backend("auto", gpu, gpu),
        "step_s": median(line["step_s"] for line in steps),
        "train_tokens_per_s": median(line["train_tokens_per_s"] for line in steps),
        "swap_pause_s": max(line.get("swap_pause_s", 0.0) for line in steps),
        "mismatch_max": max(line["mismatch_max"] for line in lines if "mismatch_max" in line),
    }


def refused_run(setting: Setting) -> Figures:
    options = "weights={use: collective, backend: nccl}", "launcher.max_restarts=0"
    try:
        summary_of(run_file(setting), setting.folder / "refused", *options)
    except subprocess.CalledProcessError as error:
        if reason := re.search(r"weights\.backend is `nccl`, but [^;]*", error.stdout):
            return {"refused": reason.group()}
        raise
    return {"failed": "the run with NCCL was not refused"}


PARTS: dict[str, tuple[Callable[[Setting], Rows], float]] = {
    "tests": (lambda _: {"pytest": tested}, 100),
    "training": (partial(training, "small"), 60),
    "training-large": (partial(training, "large"), 75),
    "lora": (lora, 60),
    "host": (host, 75),
    "decoding": (decoding, 90),
    "sleep": (sleeping, 40),
    "memory": (memory, 90),
    "collective": (collective, 110),
}
"""What each part measures, and its deadline in seconds."""


def measure(part: str, setting: Setting) -> None:
    """Write the part's figures into a file, row by row."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with (setting.folder / f"{part}.jsonl").open("w") as file:
        for name, row in PARTS[part][0](setting).items():
            try:
                figures = row()
            except Exception as error:  # noqa: BLE001 - the rows after it are worth as much
                of_run = error.stdout[-300:] if isinstance(error, subprocess.CalledProcessError) else ""
                figures = {"failed": of_run or f"{type(error).__name__}: {error}"[:300]}
            rounded = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in figures.items()}
            file.write(json.dumps({name: rounded}) + "\n")
            file.flush()


def in_process(name: str, arguments: argparse.Namespace, folder: Path, deadline_s: float) -> Figures:
    """Measure a part in a process, and kill it with all that it has started if it passes its deadline."""
    log, file, fault = folder / f"{name}.log", folder / f"{name}.jsonl", ""
    command = [sys.executable, __file__, "--size", arguments.size, "--part", name, "--folder", str(folder)]
    began = perf_counter()
    with log.open("w") as output:
        child = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            if child.wait(deadline_s):
                fault = log.read_text().strip().rpartition("\n")[2] or "it ended without a word"
        except psutil.TimeoutExpired:
            fault = f"killed at its deadline of {deadline_s:.3g} s"
            for process in [child, *child.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            child.wait()
    lines = file.read_bytes().splitlines() if file.exists() else ()
    rows = {name: row for line in lines for name, row in json.loads(line).items()}
    return {"seconds": round(perf_counter() - began, 1), **({"failed": fault} if fault else {}), "rows": rows}


def report(arguments: argparse.Namespace, folder: Path) -> dict[str, Figures]:
    """Measure the parts one after another; print each one's line."""
    end, found = perf_counter() + arguments.seconds, dict[str, Figures]()
    for name in arguments.only:
        deadline_s = min(end - perf_counter(), arguments.deadline or PARTS[name][1])
        if deadline_s > 0:
            found[name] = in_process(name, arguments, folder, deadline_s)
        else:
            found[name] = {"left_out": f"the {arguments.seconds:g} s are over"}
        print(json.dumps({"part": name, "device": DEVICE, **found[name]}), flush=True)
    return found


def table(found: Mapping[str, Figures]) -> None:
    for part, figures in found.items():
        outcome = figures.get("failed") or figures.get("left_out") or f"{figures['seconds']} s"
        print(f"\n{part}: {outcome}")
        for name, row in figures.get("rows", {}).items():
            print(f"  {name:28}", "  ".join(f"{key} {value}" for key, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="what one GPU does, part by part")
    parser.add_argument("--size", choices=SETTINGS, default="full")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--seconds", type=float, default=300.0, help="of all parts together")
    parser.add_argument("--deadline", type=float, help="seconds of each part, instead of its own")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.part, replace(SETTINGS[arguments.size], folder=arguments.folder))
        return
    if not HAS_GPU and arguments.size != "tiny":
        parser.error("torch finds no GPU with CUDA; --size tiny computes on the CPU")
    with tempfile.TemporaryDirectory() as name:
        found = report(arguments, Path(name))
    table(found)
    print(json.dumps({"size": arguments.size, "device": DEVICE, "torch": torch.__version__, "parts": found}))


if __name__ == "__main__":
    main()
