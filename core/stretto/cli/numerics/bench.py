"""Prepare the comparison of a model's two sides: the run, its texts and engines; then measure and print."""

import argparse
import inspect
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
import typer

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.chat.prompts import prompt_ids
from stretto.cli.numerics.causes import cause_of
from stretto.cli.numerics.measures import Kind, Measurement, NumericsRow, measure
from stretto.cli.numerics.sides import Tokens, Trainer
from stretto.cli.start.acceptance import accepted, print_notice
from stretto.cli.start.check_chat import chat_lines
from stretto.cli.start.check_models import source_problems
from stretto.dataset import Dataset
from stretto.engine import InferenceEngine
from stretto.errors import ConfigError, EngineError, one_error
from stretto.machine.scratch import scratch_folder
from stretto.models.files import folder_of_model, parameters_in, positions_of
from stretto.models.hub import download
from stretto.models.tokenizer import load_tokenizer
from stretto.training.config import LoraConfig, ModelTrainingConfig

_DEPTH, _DEPTH_ON_GPU, _DEPTH_QUICK = 1024, 4096, 256
_TEXTS = 6
_SLOTS = 8
_MOST_ROWS = 5000  # of a dataset that are read
_LR = 1e-3  # of the first step of `Trainer.move`, along a gradient of norm 1 at most
_STEPS = 500  # decode steps of all rows together, at most


def run(model: str, overrides: Sequence[str], depth: int | None, *, quick: bool) -> int:
    """Measure and print the table. Return the exit status."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with scratch_folder("stretto-numerics-") as (folder, _):
        assembly = _assembly(model, overrides, folder)
        accepted(assembly, starting=False, show=lambda level, text: None)
        plan = _plan(assembly, folder, depth, quick=quick)
        rows: list[NumericsRow] = []
        try:
            with one_error():
                anyio.run(measure, plan, rows.append)
        except (MemoryError, RuntimeError) as error:  # torch has no other class for a lack of memory
            raise EngineError(f"{type(error).__name__}: {str(error).partition('.')[0]}") from error
        except EngineError as error:
            if not rows:
                raise
            signs = [f"{plan.inference.use!r} stopped: {error}"]
            rows.append(NumericsRow("engine", "it stopped", "serves the model", ok=False, signs=signs))
        cause = cause_of(rows)
        typer.echo(f"likely cause: {cause}" if cause else "healthy: no row is out of its range")
        for line in (*_table(rows), "", *chat_lines(assembly)):
            typer.echo(line)
    return 1 if cause else 0


def _assembly(model: str, overrides: Sequence[str], folder: Path) -> Assembly:
    """Compose a run file; or a run that has this model, and rows of plain text."""
    own = f"out={folder / 'run'}"
    if Path(model).suffix in (".yaml", ".yml"):
        return Assembly(compose(Path(model), [*overrides, own]))
    for problem in source_problems("MODEL", model):
        if problem.severity == "error":
            raise ConfigError(f"MODEL: {problem.message}")
    if not Path(model).is_dir():
        download(model, print_notice)
    rows = folder / "rows.jsonl"
    texts = _paragraphs(chat=load_tokenizer(model).form.has_template)
    rows.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    document = {
        "name": "numerics",
        "model": model,
        "steps": 1,
        "algorithm": "grpo",
        "reward": "exact",
        "dataset": {"use": "jsonl", "path": str(rows)},
        "sampling": {"max_tokens": 32},
    }
    return Assembly(compose(Path("numerics"), [*overrides, own], document=document))


def _paragraphs(*, chat: bool) -> list[Any]:
    """Return prompts of a text that every machine has: the source of a module of Python."""
    texts = [part.strip() for part in inspect.getsource(argparse).split("\n\n") if part.strip()]
    return [[{"role": "user", "content": text}] for text in texts] if chat else texts


def _plan(assembly: Assembly, folder: Path, depth: int | None, *, quick: bool) -> Measurement:
    config, section = assembly.config, assembly.placement.lead.section
    if config.model is None:
        raise ConfigError("model: the run has none, so there is nothing to compare", path="model")
    if not Path(config.model).is_dir():
        download(config.model, print_notice)
    source = folder_of_model(config.model)
    if source is None:
        raise ConfigError(f"model: {config.model} is not on this machine", path="model")
    if not isinstance(section, ModelTrainingConfig):
        raise ConfigError(f"training.use: {section.use!r} does not train a model of files", path="training")
    inference = config.inference
    most = _DEPTH_QUICK if quick else _DEPTH_ON_GPU if section.gpus or inference.gpus else _DEPTH
    rooms = (positions_of(config.model), getattr(inference, "context_length", None))
    room = min([each for each in rooms if each is not None], default=max(most, depth or 0))
    if depth is not None and depth > room:
        raise ConfigError(f"--depth {depth}: a sample has {room} tokens at most")
    depth = min(depth or most, room)
    plan = Measurement(
        texts=_texts(assembly, depth),
        depth=depth,
        training=section,
        inference=inference,
        model=Path(source),
        folder=folder,
        say=lambda text: print(f"  {text}", file=sys.stderr),
        make_trainer=lambda kind: _trainer(assembly, section, kind),
        make_engine=lambda: _engine(assembly, depth),
        quick=quick,
    )
    plan.say(_estimate(plan, parameters_in(source) or 0))
    return plan


def _trainer(assembly: Assembly, section: ModelTrainingConfig, kind: Kind) -> Trainer:
    group = assembly.placement.lead
    changes: dict[str, Any] = {
        "processes": 1,
        "optimizer": "sgd",
        "lr": _LR,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "warmup_steps": 0,
        "schedule": "constant",
        "lora": None,
    }
    if kind == "adapter":
        changes["lora"] = section.lora or LoraConfig()
    elif kind == "bfloat16":
        changes["dtype"] = "bfloat16"
    elif kind == "plain":
        changes |= {"dtype": "float32", "packing": "padded", "micro_batch_tokens": 1, "compile": False}
    context = msgspec.structs.replace(assembly.context, head="policy", trainable=True)
    try:
        section = msgspec.structs.replace(section, **changes)
    except ValueError as error:
        raise ConfigError(f"{group.path}: cannot be measured in one process: {error}") from error
    return Trainer(assembly.composed.make(group.path, context, section))


def _engine(assembly: Assembly, depth: int) -> InferenceEngine:
    section = assembly.config.inference
    changes = {
        name: value
        for name, value in (("slots", _SLOTS), ("context_length", depth))
        if hasattr(section, name)
    }
    section = msgspec.structs.replace(section, replicas=1, sleep=False, **changes)
    return assembly.composed.make("inference", assembly.context, section)


def _texts(assembly: Assembly, depth: int) -> list[Tokens]:
    """Return texts of `depth` tokens: the dataset's prompts end to end, each starting at another place."""
    dataset: Dataset = assembly.composed.make("dataset", assembly.trial_context)
    tokens: list[int] = []
    for index in range(min(len(dataset), _MOST_ROWS)):
        tokens.extend(prompt_ids(dataset[index], assembly.tokenizer).tolist())
        if len(tokens) >= _TEXTS * depth:
            break
    if not tokens:
        raise ConfigError("dataset: its prompts have no tokens", path="dataset")
    stream = np.resize(np.array(tokens, np.int32), _TEXTS * depth)
    return [np.resize(np.roll(stream, -number * len(tokens) // _TEXTS), depth) for number in range(_TEXTS)]


def _estimate(plan: Measurement, parameters: int) -> str:
    """Return what the measurement takes, from the speed of this machine's processors."""
    import torch

    one = torch.ones(768, 768)
    began = time.monotonic()
    for _ in range(4):
        torch.mm(one, one)
    flop_s = (time.monotonic() - began) / (4 * 2 * 768**3)
    tokens = plan.depth * (12 if plan.quick else 30) + 6000
    seconds = 2 * parameters * (tokens * flop_s + _STEPS * 2e-10 * (0.5 if plan.quick else 1))
    gib = 16 * parameters / 2**30 + 0.8
    return (
        f"{parameters / 1e6:,.1f} million parameters, depth {plan.depth}: about {10 + seconds:.0f} s on "
        f"processors, and {gib:.1f} GiB"
    )


def _table(rows: Sequence[NumericsRow]) -> Iterator[str]:
    yield "\nmean/largest difference of logprobs, in nats a token:"
    cells = [(row.name, row.measured, f"(healthy: {row.healthy})" if row.healthy else "") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marks = {True: "ok", False: "FAIL", None: ""}
    for row, cell in zip(rows, cells, strict=True):
        name, measured, healthy = (text.ljust(width) for text, width in zip(cell, widths, strict=True))
        yield f"{marks[row.ok]:4}  {name}  {measured}  {healthy}".rstrip()
