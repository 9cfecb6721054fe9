"""The cost of 512 tickets at once for one rollout worker, with a mock engine of 10,000 tokens/s.

    python benchmarks/rollout.py [dotted.key=value ...]

This is a real run through the command line, with 8 answers per ticket and long-tailed lengths around 64
tokens; arguments override its run file. At each heartbeat the benchmark reads the rollout worker's CPU
seconds (user and system) and memory, and the engine's busy seconds. It uses the steady part, in which the
worker has 512 tickets in progress. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil

from stretto.bus.client import connect
from stretto.bus.messages.membership import Heartbeat
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from whole_runs import arguments_of, mock_run_file

EPISODES, GROUP, BATCH, STEPS = 512, 8, 128, 16


def run_file(folder: Path) -> Path:
    return mock_run_file(
        folder,
        1000,
        f"""\
name: rollout
algorithm: {{use: grpo, group_size: {GROUP}}}
training: {{use: mock, seconds_per_step: 0.1}}
inference: {{use: mock, tokens_per_s: 10000, slots: {EPISODES}, mean_tokens: 64, sigma: 0.6}}
rollout: {{concurrency: {EPISODES}}}
queue: {{batch_size: {BATCH}, max_staleness: {2 * EPISODES // BATCH - 1}}}
steps: {STEPS}
""",
    )


@dataclass
class Beat:
    """The rollout worker at one of its heartbeats, and the engine at its latest."""

    episodes: int
    cpu_s: float
    rss_mb: float
    busy_s: float
    tokens: int


class Watch:
    """Collects the heartbeats of a run, as its kernel receives them."""

    def __init__(self, run: int) -> None:
        self._run = psutil.Process(run)
        self._rollout: psutil.Process | None = None
        self._busy_s = 0.0
        self._tokens = 0
        self.beats: list[Beat] = []

    def engine(self, beat: Heartbeat) -> None:
        """Keep the engine's figures for the next heartbeat of the rollout worker."""
        if beat.load is not None:
            self._busy_s, self._tokens = beat.load.busy_s, beat.load.generated_tokens

    def rollout(self, beat: Heartbeat) -> None:
        """Add a heartbeat of the rollout worker."""
        if self._rollout is None:
            workers = self._run.children(recursive=True)
            name = f"{beat.worker}.json"
            self._rollout = next(each for each in workers if Path(arguments_of(each)[-1]).name == name)
        cpu, rss = self._rollout.cpu_times(), self._rollout.memory_info().rss
        self.beats.append(Beat(beat.tickets, cpu.user + cpu.system, rss / 2**20, self._busy_s, self._tokens))

    def steady(self) -> list[Beat]:
        """Return the heartbeats from the first to the last one with all tickets in progress."""
        full = [index for index, beat in enumerate(self.beats) if beat.episodes == EPISODES]
        assert full, f"never {EPISODES} episodes at once, but {max(beat.episodes for beat in self.beats)}"
        return self.beats[full[0] : full[-1] + 1]


async def watched(command: list[str], out: Path) -> list[Beat]:
    """Run a command, collect its workers' heartbeats, and return the steady ones."""
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL) as run:
        watch = Watch(run.pid)
        login = await bootstrap_of(out)
        names = Subjects(login.run)
        async with connect(login) as bus:
            await bus.subscribe(names.kernel("inference", "heartbeat"), Heartbeat, watch.engine)
            await bus.subscribe(names.kernel("rollout", "heartbeat"), Heartbeat, watch.rollout)
            assert await run.wait() == 0, "the run failed"
    return watch.steady()


async def bootstrap_of(out: Path) -> Bootstrap:
    """Wait for a run to start, and return the access to its bus."""
    with anyio.fail_after(60):
        while not (out / "logs").exists() or not list((out / "logs").glob("rollout-0*")):
            await anyio.sleep(0.1)
    return Bootstrap.read(out / "bus" / "kernel.json")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = [sys.executable, "-m", "stretto", "run", str(run_file(Path(folder))), f"out={out}"]
        began = time.monotonic()
        steady = anyio.run(watched, [*command, *sys.argv[1:]], out)
        wall_s = time.monotonic() - began
        summary = json.loads((out / "summary.json").read_text())
    first, quarter, last = steady[0], steady[len(steady) // 4], steady[-1]
    cpu_s, busy_s = last.cpu_s - first.cpu_s, last.busy_s - first.busy_s
    result = {
        "cpu_ratio": round(cpu_s / busy_s, 4),
        "rss_growth_mb": round(last.rss_mb - quarter.rss_mb, 1),
        "episodes": EPISODES,
        "cpu_s": round(cpu_s, 2),
        "busy_s": round(busy_s, 2),
        "rss_mb": {"25%": round(quarter.rss_mb, 1), "end": round(last.rss_mb, 1)},
        "tokens_per_s": round((last.tokens - first.tokens) / busy_s),
        "tickets": summary["ledger"]["trained"],
        "failed": summary["ledger"]["failed"],
        "wall_s": round(wall_s, 1),
    }
    for name, value in result.items():
        print(f"{name:>14}  {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
