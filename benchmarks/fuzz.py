"""Hostile messages with each role's credentials: the run continues, and no process grows.

    python benchmarks/fuzz.py [--messages 100000] [--seed 1]

This starts a run of the mock engines through the command line. For every role it connects with the role's
credentials, and sends to all subjects that the role may publish to: random bytes, truncated messages,
messages with values of other types or with random values of the right types, and payloads of up to a
megabyte, whole and in parts. It reads the memory of each process of the run before and after. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import anyio
import msgspec
import psutil
from msgspec import inspect
from nats.aio.client import Client

from stretto.array import Array
from stretto.bus import messages
from stretto.bus.client import connect
from stretto.bus.messages.base import KernelMessage, Message, Refusal
from stretto.bus.messages.membership import Heartbeat
from stretto.bus.messages.subjects import WORKER_VERBS, Subjects
from stretto.bus.server import Bootstrap
from stretto.launcher import ROLES, Role
from whole_runs import arguments_of, mock_run_file

_STEPS_AFTER = 5
"""The run must complete this many steps after the last hostile message."""
_PART = struct.Struct(">B16sII")
for _module in iter_modules(messages.__path__, f"{messages.__name__}."):
    import_module(_module.name)
_KINDS = [
    kind
    for base in (Message, KernelMessage)
    for kind in base.__subclasses__()
    if kind not in (Refusal, KernelMessage)
]
_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**63 - 1, 1.5, float("nan"), float("inf"), b"", b"\xff" * 9),
    *("", "x", "\x1b[2J[/INST]", "rollout-0\r\nPUB x 0\r\n\r\n", "x" * 9000),
    *([], {}, [[]] * 9, {"a": {"b": 1}}, ["<i4", [2**40], b""]),
]


def run_file(folder: Path) -> Path:
    return mock_run_file(
        folder,
        100,
        """\
name: fuzz
algorithm: {use: grpo, group_size: 4}
training: {use: mock, seconds_per_step: 0.1}
inference: {use: mock, tokens_per_s: 5000, slots: 64, mean_tokens: 24}
queue: {batch_size: 4, max_staleness: 2, max_failures: 1000000}
steps: 100000
""",
    )


async def nonces_of(bootstrap: Bootstrap) -> dict[str, str]:
    """Nonces of the run's workers, by worker: they are parts of their subjects."""
    names, nonces = Subjects(bootstrap.run), dict[str, str]()

    def hear(beat: Heartbeat) -> None:
        nonces[beat.worker] = beat.nonce

    async with connect(bootstrap) as bus:
        for role in ROLES:
            await bus.subscribe(names.kernel(role, "heartbeat"), Heartbeat, hear)
        with anyio.fail_after(30):
            while len(nonces) < len(ROLES):
                await anyio.sleep(0.1)
    return nonces


def subjects_of(role: Role, names: Subjects, nonces: Mapping[str, str]) -> list[str]:
    """Every subject that the role may publish to, for the run's workers."""
    verbs = ("join", "heartbeat", "leaving", "started", "progress")
    own = [names.kernel(role, verb) for verb in verbs]
    asked = [
        names.worker(answerer, f"{answerer}-0", nonces[f"{answerer}-0"], verb)
        for answerer, table in WORKER_VERBS.items()
        for verb, askers in table.items()
        if role in askers
    ]
    answers = [f"{names.answers(party, role)}.x.1" for party in ("kernel", *ROLES)]
    log = [names.groups, names.trajectories, names.records, f"{names.groups}.part"]
    return [*own, *asked, *answers, *(log if role == "rollout" else [])]


def of_wrong_types(kind: type[Message], draw: random.Random) -> bytes:
    """A message with the right tag and number of fields, and with values of any type."""
    fields = [draw.choice(_VALUES) for _ in kind.__struct_fields__]
    return msgspec.msgpack.encode([str(kind.__struct_config__.tag), *fields])


def of_right_types(kind: type[Message], draw: random.Random) -> bytes:
    """A message whose values have the right types, but make no sense."""
    return msgspec.msgpack.encode(value_of(inspect.type_info(kind), draw))


def value_of(kind: inspect.Type, draw: random.Random) -> Any:
    """A random value of a type, as plain data."""
    match kind:
        case inspect.StructType(cls=cls) if cls is Array:
            length = draw.randrange(5)
            return ["<i4", [length], bytes(4 * length + draw.choice([0, 0, 0, 1]))]
        case inspect.StructType(tag=tag, fields=fields):
            return [*([] if tag is None else [tag]), *(value_of(field.type, draw) for field in fields)]
        case inspect.LiteralType(values=values):
            return draw.choice(values)
        case inspect.UnionType(types=types):
            return value_of(draw.choice(types), draw)
        case inspect.IntType():
            return draw.choice([-1, 0, 1, 2, 3, 7, 2**31, 2**62])
        case inspect.FloatType():
            return draw.choice([0.0, 1.0, -1.0, 1e308, float("nan"), float("inf")])
        case inspect.BoolType():
            return draw.random() < 0.5
        case inspect.StrType():
            return draw.choice(["rollout-0", "inference-0", "trainer-0", "x", "0/1/0", "", "[/x]"])
        case inspect.BytesType() | inspect.MemoryViewType():
            return draw.choice([b"", b"\x80", b"\x90", draw.randbytes(9)])
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [value_of(item, draw) for _ in range(draw.choice([0, 1, 1, 2]))]
        case inspect.TupleType(item_types=items):
            return [value_of(item, draw) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {value_of(key, draw): value_of(value, draw)}
        case _:
            return None


def hostile(draw: random.Random) -> Iterator[bytes]:
    """Payloads without end."""
    key = draw.randbytes(16)
    while True:
        match draw.randrange(100):
            case number if number < 30:
                yield draw.randbytes(draw.randrange(200))
            case number if number < 55:
                yield of_wrong_types(draw.choice(_KINDS), draw)
            case number if number < 80:
                yield of_right_types(draw.choice(_KINDS), draw)
            case number if number < 90:
                whole = of_right_types(draw.choice(_KINDS), draw)
                yield whole[: draw.randrange(len(whole) + 1)]
            case number if number < 98:
                key = key if draw.random() < 0.5 else draw.randbytes(16)
                count = draw.choice([0, 1, 2, 3, 64, 4096, 2**31, 2**32 - 1])
                head = _PART.pack(0xC1, key, draw.choice([0, 1, 2, 2**32 - 1]), count)
                yield head + draw.randbytes(draw.randrange(400))
            case 98:
                sequences = [draw.choice([0, -1, 1, 2, 10**9])] * draw.choice([1, 9, 9000])
                yield b"\xc1" + msgspec.msgpack.encode(sequences)
            case _:
                # Rare, but most of the bytes: about a megabyte each, as one message or as a part of one.
                head = draw.choice([b"", _PART.pack(0xC1, draw.randbytes(16), 0, 9)])
                yield head + bytes(draw.randrange(2**20))


async def attack(login: dict[str, Any], role: Role, nonces: Mapping[str, str], count: int, seed: int) -> int:
    """Send the messages with one role's credentials. Returns the bytes sent."""
    draw = random.Random(f"{seed} {role}")
    subjects = subjects_of(role, Subjects(login["run"]), nonces)
    client = Client()
    await client.connect(login["url"], user=login["user"], password=login["password"], error_cb=_ignore)
    sent = 0
    payloads = hostile(draw)
    for index in range(count):
        payload, subject = next(payloads), draw.choice(subjects)
        reply = draw.choice(["", "", draw.choice(subjects), "$JS.API.STREAM.PURGE.LOG", "x"])
        await client.publish(subject, payload, reply)
        sent += len(payload)
        if index % 200 == 0:
            await client.flush(60)
    await client.flush(60)
    await client.close()
    return sent


async def _ignore(error: Exception) -> None:
    del error


def memory(run: psutil.Process) -> dict[str, int]:
    """RSS in bytes of each process of the run, by name."""
    found: dict[str, int] = {}
    for process in [run, *run.children(recursive=True)]:
        try:
            arguments = arguments_of(process)
            name = "kernel" if process.pid == run.pid else Path(arguments[-1]).stem or Path(arguments[0]).name
            found[f"{name} {process.pid}"] = process.memory_info().rss
        except (psutil.NoSuchProcess, IndexError):
            continue
    return found


def steps(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for_steps(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while steps(out) < count:
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline, f"no step after step {steps(out)}"
        time.sleep(0.05)


def fuzz(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Run, attack, and return the figures."""
    out = folder / "out"
    command = [sys.executable, "-m", "stretto", "run", str(run_file(folder)), f"out={out}"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for_steps(process, out, 10)
        run = psutil.Process(process.pid)
        before, at = memory(run), steps(out)
        sent = {}
        nonces = anyio.run(nonces_of, Bootstrap.read(out / "bus" / "kernel.json"))
        for role in ROLES:
            login = json.loads((out / "bus" / f"{role}.json").read_text())
            sent[role] = anyio.run(attack, login, role, nonces, count, seed)
            wait_for_steps(process, out, steps(out) + _STEPS_AFTER)
        after = memory(run)
        grown = {name: (after[name] - before[name]) / 2**20 for name in before if name in after}
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        if process.poll() is None:
            process.kill()
    summary = json.loads((out / "summary.json").read_text())
    return {
        "messages": count * len(ROLES),
        "bytes": sum(sent.values()),
        "refused": summary["refused_messages"],
        "steps": steps(out) - at,
        "restarts": summary["restarts"],
        "grown_mb": {name: round(each, 1) for name, each in grown.items()},
        "ended": sorted(set(before) - set(after)),
        "status": summary["status"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="messages for each role")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(Path(folder), arguments.messages, arguments.seed)
    for name, grown in result["grown_mb"].items():
        print(f"{name:<30} {grown:>8.1f} MiB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
