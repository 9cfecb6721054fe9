"""What a new version of the weights costs: bytes, seconds to publish and to receive, whole and as deltas.

    python benchmarks/weights.py [--parameters 100] [--versions 30] [--lr 1e-6] [--use bus]

A trainer's end publishes versions of bfloat16 weights, with the shapes of a Transformer of `--parameters`
million. From version to version the float32 weights move as Adam moves them: each by the learning rate times
a draw whose size is about 1. An engine's end, in a process of its own, receives each over a real nats-server,
hashes every tensor, and reports the digest of what it has. Both forms take turns. `bytes` are those of the
files that the engine's end asked for. An engine that starts in the middle and one whose copy was damaged are
tried at the end. The last line is one JSON object; seconds are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from stretto import Context
from stretto.bus.client import Bus, connect
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.config import BusConfig
from stretto.launcher import Role
from stretto.models.digest import digest_of
from stretto.models.version_receiver import VersionReceiver
from stretto.weights import WeightsNote
from stretto.workers.weights_wire import BusWire

WIDTH, VOCABULARY = 768, 32_000
FORMS = ("whole", "deltas")


def shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model with about that number of parameters."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    left, layer = parameters - VOCABULARY * WIDTH, 0
    while left > 0:
        rows = min(4 * WIDTH, max(1, left // (3 * WIDTH)))
        for name in ("gate", "up", "down"):
            found[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (rows, WIDTH)
        found[f"model.layers.{layer}.norm.weight"] = (WIDTH,)
        left, layer = left - 3 * rows * WIDTH - WIDTH, layer + 1
    return found


def published(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        yield name, tensor.bfloat16()


def transport(use: str, form: str, folder: Path, worker: str) -> Any:
    """Return a weight transport as a worker has it."""
    [component] = list(import_module(f"stretto_{use}").stretto_weights())
    config = component.config(use=use, deltas=form == "deltas", folder=str(folder / form))
    context = Context(run="b", name="b", seed=0, worker=worker, folder=str(folder))
    return component.factory(config, context)


async def open_bus(stack: AsyncExitStack, folder: Path, role: Role) -> tuple[Bus, Subjects]:
    login = Bootstrap.read(folder / "bus" / f"{role}.json")
    return await stack.enter_async_context(connect(login)), Subjects(login.run)


def wire_of(bus: Bus, names: Subjects, role: Role, form: str) -> BusWire:
    def subject(verb: str) -> str:
        return names.worker(role, f"{role}-0", form, verb)

    context = SimpleNamespace(bus=bus, names=names, worker=f"{role}-0", nonce=form, subject=subject)
    return BusWire(cast(Any, context))


# ----------------------------------------------------------------------------- the engine's end


async def receive_all(folder: Path, use: str) -> None:
    """Receive the versions that standard input names, and write what that took."""
    count = _counted_bytes()
    async with AsyncExitStack() as stack:
        bus, names = await open_bus(stack, folder, "inference")
        subscribers: dict[str, Any] = {}
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            order = json.loads(line)
            form, note = order.pop("form"), WeightsNote(**order.pop("note"))
            name = f"{form}{order['engine']}"
            if name not in subscribers:
                made = transport(use, form, folder, f"inference-{name}")
                subscribers[name] = made.subscriber(wire_of(bus, names, "inference", form))
            count.clear()
            began = time.perf_counter()
            update = await subscribers[name].receive(note)
            seconds = time.perf_counter() - began
            if order.get("damage"):
                file = next(update.folder.glob("*.safetensors"))
                with file.open("r+b") as opened:
                    opened.seek(-2, 2)
                    opened.write(b"??")
            digest = digest_of(update.hashes().items())
            update.close()
            print(json.dumps({"seconds": seconds, "bytes": sum(count), "digest": digest}), flush=True)
        for subscriber in subscribers.values():
            subscriber.close()


def _counted_bytes() -> list[int]:
    """Return a list that gets the bytes of each file that a version's receiver asks for."""
    count: list[int] = []
    real = VersionReceiver.__init__

    def make(self: VersionReceiver, root: Path, source: Any) -> None:
        fetch = source.fetch

        async def counting(note: WeightsNote, files: dict[Path, int]) -> None:
            count.extend(files.values())
            await fetch(note, files)

        source.fetch = counting
        real(self, root, source)

    VersionReceiver.__init__ = make
    return count


# ---------------------------------------------------------------------------- the trainer's end


class Engine:
    """The process with the engine's end."""

    def __init__(self, folder: Path, use: str) -> None:
        command = [sys.executable, __file__, "--engine", str(folder), "--use", use]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def receive(self, form: str, note: WeightsNote, engine: str = "", **more: Any) -> dict[str, Any]:
        """Let an engine receive a version, and return what that took."""
        order = {
            "form": form,
            "engine": engine,
            "note": {"version": note.version, "address": note.address, "digest": note.digest},
            **more,
        }
        return json.loads(await anyio.to_thread.run_sync(self._ask, json.dumps(order)))

    def _ask(self, order: str) -> str:
        into, out = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        into.write(order + "\n")
        into.flush()
        return out.readline()

    def end(self) -> None:
        """Let the process end."""
        cast("IO[str]", self._process.stdin).close()
        self._process.wait()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = {name: 0.02 * torch.randn(shape) for name, shape in shapes(options.parameters * 10**6).items()}
    whole = sum(2 * tensor.numel() for tensor in weights.values())
    names_of = [f"{what} {form}" for what in ("publish", "receive") for form in FORMS]
    taken: dict[str, list[float]] = {name: [] for name in names_of}
    shares: list[float] = []
    async with AsyncExitStack() as stack:
        bus, names = await open_bus(stack, folder, "trainer")
        engine = Engine(folder, options.use)
        publishers: dict[str, Any] = {}
        for form in FORMS:
            wire = wire_of(bus, names, "trainer", form)
            publishers[form] = transport(options.use, form, folder, "trainer-0").publisher(wire)
            await wire.open()
        late: dict[str, Any] = {}
        for version in range(options.versions):
            digests, notes = set[str](), dict[str, WeightsNote]()
            for form in FORMS if version % 2 else reversed(FORMS):
                began = time.perf_counter()
                note = await anyio.to_thread.run_sync(publishers[form].publish, version, published(weights))
                seconds = time.perf_counter() - began
                result = await engine.receive(form, note)
                notes[form] = note
                digests |= {note.digest, result["digest"]}
                if version > 1:
                    taken[f"publish {form}"].append(seconds)
                    taken[f"receive {form}"].append(result["seconds"])
                    shares += [result["bytes"] / whole] if form == "deltas" else []
            assert len(digests) == 1, f"version {version} is not the same everywhere"
            if version == options.versions - 3:
                late["late"] = await engine.receive("deltas", notes["deltas"], "late", damage=True)
            elif version > options.versions - 3:
                late[f"after damage {version}"] = await engine.receive("deltas", notes["deltas"], "late")
            for tensor in weights.values():
                tensor.add_(torch.randn_like(tensor), alpha=options.lr)
        engine.end()
        for publisher in publishers.values():
            publisher.close()
    figures = {name: round(statistics.median(values), 4) for name, values in taken.items()}
    return {
        **figures,
        "bytes share": round(statistics.median(shares), 4),
        "largest share": round(max(shares), 4),
        "receive ratio": round(figures["receive deltas"] / figures["receive whole"], 3),
        "publish ratio": round(figures["publish deltas"] / figures["publish whole"], 3),
        **{name: round(each["bytes"] / whole, 4) for name, each in late.items()},
    }


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bus = Path(folder, "bus")
        lock = lock_run(bus)
        server = await NatsServer.start(bus, "bench", BusConfig(), Path(folder))
        result = await measure(Path(folder), options)
        await server.stop()
        lock.close()
    for name, value in result.items():
        print(f"{name:20} {value:>10}")
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100, help="million parameters")
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--use", choices=("bus", "file", "collective"), default="bus")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.engine is not None:
        anyio.run(receive_all, chosen.engine, chosen.use)
    else:
        anyio.run(main, chosen)
