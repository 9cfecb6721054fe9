"""One rank of a layout under test, as a program: `python layout_ranks.py FOLDER RANK`, and what it measures.

`FOLDER/case.json` says what to do. `measure` is also what a single process is measured by.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

import stretto_fsdp2
import stretto_pipeline
import stretto_torch
from stretto.algorithm import WHOLE, Loss
from stretto.array import KeptTokens
from stretto.component import Component, Context, Head
from stretto.rl.batch import Batch, Drawn

LOOK_S = 0.002
VOCABULARY = 259  # odd, so that no number of ranks divides it
LENGTHS = [9, 5, 1, 14, 6, 11, 8]
# Sequences of each part: uneven in number, in tokens and in micro-batches.
PARTS = {1: [range(7)], 2: [range(5), range(5, 7)]}
ENGINES: dict[str, Component[Any]] = {
    component.name: component
    for plugin in (stretto_torch, stretto_fsdp2, stretto_pipeline)
    for component in plugin.stretto_training()
}


def config_of(options: Mapping[str, Any]) -> Any:
    """The struct of an engine's section; micro-batches are fewer tokens than the batch."""
    defaults = {"micro_batch_tokens": 24, "clip_norm": None, "warmup_steps": 0}
    return msgspec.convert({**defaults, **options}, ENGINES[options["use"]].config)


def whole_batch(seed: int, *, drawn: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = torch.randint(2, VOCABULARY, (total,), generator=generator)
    groups = torch.repeat_interleave(torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor(LENGTHS))
    # The sequences of a group begin with the same tokens.
    tokens = torch.where(positions < 4, 2 + seed + 10 * groups + positions, tokens)
    return Batch(
        LENGTHS,
        {"tokens": tokens, "loss_mask": positions >= 3, "targets": torch.randn(total, generator=generator)},
        {"group": torch.tensor([0, 0, 1, 1, 1, 2, 2])},
        drawn=drawn_of(tokens, positions >= 3, seed) if drawn else None,
    )


def drawn_of(tokens: Tensor, mask: Tensor, seed: int) -> Drawn:
    """Each trained token was drawn from itself and some others, with a bias for three ids."""
    rng = np.random.default_rng(seed)
    kept: list[KeptTokens] = []
    for own, trained in zip(tokens.split(LENGTHS), mask.split(LENGTHS), strict=True):
        sets = [
            np.union1d(rng.choice(VOCABULARY, rng.integers(0, 6)), token) if is_trained else np.empty(0)
            for token, is_trained in zip(own.tolist(), trained.tolist(), strict=True)
        ]
        counts = np.array([len(each) for each in sets], np.uint16)
        kept.append(KeptTokens(counts, np.concatenate(sets).astype(np.int32)))
    return Drawn({3: 0.5, 7: -1.0, int(tokens[-1]): 2.0}, kept)


def squared(said: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """(said - target)^2: positive, so that rounding does not hide in a sum near 0. Tokens that were not drawn
    from the whole vocabulary count with both logprobs."""
    losses = (said - batch["targets"]) ** 2
    if WHOLE in batch:
        losses = losses + 0.5 * (batch[WHOLE] + batch["targets"]) ** 2
    return losses, {"said": said, "said_max": said}


def engine_of(
    folder: Path, model: str, options: Mapping[str, Any], *, rank: int = 0, head: Head = "policy", **more: Any
) -> Any:
    """An engine of one rank; `more` are fields of its context."""
    meeting = os.environ.get("MEETING") or str(folder / "rendezvous")
    context = Context(
        run="r", name="n", seed=1, model=model, head=head, rank=rank, rendezvous=meeting, **more
    )
    return ENGINES[options["use"]].make(config_of(options), context)


def measure(
    folder: Path,
    name: str,
    model: str,
    options: Mapping[str, Any],
    *,
    rank: int = 0,
    head: Head = "policy",
    trainable: bool = True,
    seeds: Sequence[int] = (0,),
    load: str | None = None,
    save: str | None = None,
    more: Sequence[int] = (),
    drawn: bool = False,
    whole: bool = True,
) -> Any:
    """Load, ask, train on a batch of each seed, save, train on more; returns the engine.

    What was found is written to `<name>-<rank>.json` and, by rank 0, to `<name>.safetensors`.
    """
    config = config_of(options)
    part = PARTS[config.data_parallel][rank // (config.processes // config.data_parallel)]
    coef = 0.3 if drawn else 0.0
    loss = Loss(squared, "sequence", unit="group", whole_vocabulary=whole, entropy_coef=coef)
    engine = engine_of(folder, model, options, rank=rank, head=head, trainable=trainable)

    def train(seed: int) -> dict[str, float]:
        return dict(engine.train(whole_batch(seed, drawn=drawn).select(part), loss, temperature=0.7))

    engine.load(None)
    if load:
        engine.load(Path(load))
    before = {f"before.{key}": value.clone() for key, value in engine.weights()}
    said = engine.forward(whole_batch(9, drawn=drawn).select(part), temperature=0.7).tolist()
    steps = [train(seed) for seed in seeds]
    if save:
        Path(save).mkdir(parents=True, exist_ok=True)
        engine.save(Path(save))
    steps += [train(seed) for seed in more]
    after = {f"after.{key}": value.clone() for key, value in engine.weights()}
    (folder / f"{name}-{rank}.json").write_text(json.dumps({"said": said, "steps": steps}))
    if rank == 0:
        save_file({**before, **after}, folder / f"{name}.safetensors")
    return engine


def weigh(folder: Path, tiny: str, large: str, options: Mapping[str, Any], *, rank: int) -> None:
    """What training a large model adds to a process that has trained a tiny one: `memory-<rank>.json` gives
    the bytes resident after three steps, and the most there were in them."""
    process, batch, loss = psutil.Process(), whole_batch(0), Loss(squared, "token")
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            peak[0] = max(peak[0], process.memory_info().rss)

    small, engine = (engine_of(folder, model, options, rank=rank) for model in (tiny, large))
    small.load(None)
    small.train(batch, loss, temperature=1.0)
    idle = process.memory_info().rss
    engine.load(None)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        engine.train(batch, loss, temperature=1.0)
    after = process.memory_info().rss
    ended.set()
    watcher.join()
    figures = {"after": after - idle, "peak": peak[0] - idle}
    (folder / f"memory-{rank}.json").write_text(json.dumps(figures))
    for each in (small, engine):
        each.stop()


def main(folder: Path, rank: int) -> None:
    """Run all of a case's measurements; the engines share the process and its group."""
    case = json.loads((folder / "case.json").read_text())
    if "weigh" in case:
        weigh(folder, **case["weigh"], rank=rank)
    engines = [measure(folder, rank=rank, **run) for run in case.get("runs", ())]
    for engine in engines:
        engine.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
