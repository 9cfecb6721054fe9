"""The kernel's side of trackers: processes that fail or hang cost the run neither its time nor its end."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from bus_testing import until
from kernel_setup import write_run
from patience import patience
from plugin_files import write_plugin
from processes import arguments_of
from stretto.assembly.compose import Composed, compose
from stretto.kernel.durable.changes import write_values
from stretto.observe.trackers import Trackers
from stretto.records.metrics_file import MetricsFile

PLUGIN = """
import time
from pathlib import Path

class make:
    def __init__(self, config, context): self.folder = Path(context.folder)
    def start(self, config, resumed_at): pass
    def step(self, metrics):
        (self.folder / "reached").touch()
        {deed}
    def evaluation(self, metrics): pass
    def advice(self, advice): pass
    def samples(self, rows): pass
    def finish(self, summary): pass
"""


def run_with(tmp_path: Path, deed: str, finish_s: float) -> Composed:
    plugin = write_plugin(tmp_path, "tracker", PLUGIN.format(deed=deed), "stretto.TrackerConfig")
    (tmp_path / "bus").mkdir()
    trackers = [{"use": "mine", "finish_s": finish_s}]
    composed = compose(write_run(tmp_path, steps=1, plugins=[plugin], trackers=trackers))
    write_values(tmp_path, composed)
    MetricsFile(tmp_path).append({"step": 1, "time": 1.0, "reward": 0.5})
    return composed


@pytest.mark.parametrize("forced", [False, True])
async def test_a_tracker_that_hangs_is_killed_at_the_end(tmp_path: Path, forced: bool) -> None:
    composed = run_with(tmp_path, "time.sleep(3600)", finish_s=3600 if forced else 0.5)
    problems: list[str] = []
    trackers = Trackers(tmp_path, composed.config.trackers, problems)
    trackers.start()
    await until((tmp_path / "reached").exists)
    [child] = [
        each for each in psutil.Process().children() if "stretto.children.tracker" in arguments_of(each)
    ]
    start = time.monotonic()
    await trackers.finish(lambda: forced)
    assert time.monotonic() - start < patience(10)
    child.wait(patience())
    assert problems == ["tracker 'mine': it has not sent everything in time; metrics.jsonl has all figures"]


async def test_a_tracker_that_fails_is_tried_again_and_given_up_at_the_end(tmp_path: Path) -> None:
    composed = run_with(tmp_path, "raise OSError('no network')", finish_s=patience(60))
    problems: list[str] = []
    trackers = Trackers(tmp_path, composed.config.trackers, problems)
    trackers.start()
    await until(lambda: bool(problems))
    (tmp_path / "summary.json").write_text('{"status": "failed", "wall_s": 1.0}')
    await trackers.finish(lambda: False)
    fault = "tracker 'mine': it ended with status 1: OSError: no network"
    assert problems == [
        f"{fault}; it was started again",
        f"{fault}; metrics.jsonl has all figures",
    ]
