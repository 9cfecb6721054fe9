"""The kernel's side of trackers: processes that fail or hang cost the run neither its time nor its end."""

import time
from pathlib import Path

import psutil
import pytest

from bus_testing import until
from kernel_setup import write_run
from patience import patience
from plugin_files import write_plugin
from processes import arguments_of
from stretto.assembly.compose import compose
from stretto.kernel.durable.changes import write_values
from stretto.observe.trackers import Trackers
from stretto.records.metrics_file import MetricsFile

PLUGIN = """
import time, os
from pathlib import Path
from stretto.tracker import tracker_folder

class make:
    def __init__(self, config, context): self.folder = tracker_folder(config, context)
    def start(self, config, resumed_at): pass
    def step(self, metrics):
        (self.folder / "reached").touch()
        if self.folder.name == "mine": {deed}
    def evaluation(self, metrics): pass
    def advice(self, advice): pass
    def samples(self, rows): pass
    def finish(self, summary): (self.folder / "finished").touch()
"""


class Run:
    """A run with the tracker `mine`, which does a deed at its first step, and `other`, which does not."""

    def __init__(self, folder: Path, deed: str, **section: float) -> None:
        plugin = write_plugin(folder, "tracker", PLUGIN.format(deed=deed), "stretto.TrackerConfig")
        (folder / "bus").mkdir()
        sections = [{"use": "mine", **section}, {"use": "mine", "folder": "other", "finish_s": patience(60)}]
        composed = compose(write_run(folder, steps=1, plugins=[plugin], trackers=sections))
        write_values(folder, composed)
        MetricsFile(folder).append({"step": 1, "time": 1.0, "reward": 0.5})
        self.folder = folder
        self.problems: list[str] = []
        self.trackers = Trackers(folder, composed.config.trackers, self.problems)
        self.trackers.start()

    async def until(self, tracker: str, what: str) -> None:
        await until((self.folder / "trackers" / tracker / what).exists)

    async def finish(self, *, forced: bool = False) -> None:
        (self.folder / "summary.json").write_text('{"status": "completed", "wall_s": 1.0}')
        await self.trackers.finish(lambda: forced)


@pytest.mark.parametrize("forced", [False, True])
async def test_a_tracker_that_hangs_is_killed_at_the_end(tmp_path: Path, forced: bool) -> None:
    run = Run(tmp_path, "time.sleep(3600)", finish_s=3600 if forced else 0.5)
    await run.until("mine", "reached")
    await run.until("other", "reached")
    children = psutil.Process().children()
    [child] = [each for each in children if "stretto.observe.tracker_process" in arguments_of(each)]
    start = time.monotonic()
    await run.finish(forced=forced)
    assert time.monotonic() - start < patience(30)
    child.wait(patience())
    late = "tracker {!r}: it has not sent everything in time; metrics.jsonl has all figures".format
    assert run.problems[:1] == [late("mine")]
    assert forced or (tmp_path / "trackers/other/finished").exists()


async def test_a_tracker_whose_call_takes_too_long_is_dropped_and_the_others_continue(tmp_path: Path) -> None:
    waits = "[time.sleep(0.1) for _ in iter((self.folder / 'go').exists, True)]"
    run = Run(tmp_path, f"{waits}; (self.folder / 'returned').touch()", call_s=0.5)
    await until(lambda: bool(run.problems))
    fault = "`step` takes more than 0.5 s (`call_s`); nothing more is sent"
    assert run.problems == [f"tracker 'mine': {fault}; metrics.jsonl has all figures"]
    (tmp_path / "trackers/mine/go").touch()
    await run.until("mine", "returned")
    await run.finish()
    assert (tmp_path / "trackers/other/finished").exists()
    assert not (tmp_path / "trackers/mine/finished").exists()
    assert not (tmp_path / "trackers/mine/cursor.json").exists()


async def test_a_tracker_that_ends_the_process_ends_all(tmp_path: Path) -> None:
    run = Run(tmp_path, "os.write(2, b'out of memory'); os._exit(3)")
    await until(lambda: bool(run.problems))
    await run.finish()
    fault = "the process of all trackers ended with status 3: out of memory; metrics.jsonl has all figures"
    assert run.problems == [f"tracker {name!r}: {fault}" for name in ("mine", "other")]


@pytest.mark.parametrize("error", ["OSError", "SystemExit"])
async def test_a_tracker_that_fails_is_tried_again_and_given_up_at_last(tmp_path: Path, error: str) -> None:
    run = Run(tmp_path, f"raise {error}('no network')", finish_s=patience(60))
    await until(lambda: bool(run.problems))
    await run.finish()
    fault = f"tracker 'mine': {error}: no network"
    assert run.problems == [f"{fault}; it was started again", f"{fault}; metrics.jsonl has all figures"]
    assert (tmp_path / "trackers/other/finished").exists()
