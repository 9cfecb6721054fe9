"""Runs whose processes are killed or interrupted, and what a resumed run does."""

import json
import re
import shutil
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import write_run_file

from commands import stretto
from fixture_types import Start
from patience import patience
from plugin_files import write_plugin, write_reward
from run_files import TestedRun
from stretto.bus.messages.events import StepTrained, VersionPublished, WeightsServed
from stretto.kernel.fleet.fleet import _SILENT_S as SILENT_S  # pyright: ignore[reportPrivateUsage]
from worlds import in_both_worlds, in_simulation, module_in_both_worlds


def files_of(run: Any) -> dict[str, str]:
    """The files that a refused resume must not change, with their content."""
    paths = [path for path in sorted(run.folder.glob("*")) if path.is_file()]
    return {path.name: path.read_text() for path in paths}


WORKERS = ("rollout-0", "verifier-0", "inference-0", "trainer-0")


@in_both_worlds
def test_a_killed_worker_is_started_again_and_nothing_is_lost(start: Start) -> None:
    run = start("steps=30")
    for worker in WORKERS:
        # More steps than there are finished groups for: the worker before this one is at work again.
        run.until_step(len(run.metrics()) + 4)
        killed = run.until(partial(run.worker, worker))
        killed.kill()
        run.until(lambda worker=worker, pid=killed.pid: (again := run.worker(worker)) and again.pid != pid)
    assert run.assert_completed(30)["restarts"] == len(WORKERS)
    ready = Counter(line["worker"] for line in run.log() if line["event"] == "worker ready")
    assert ready == dict.fromkeys(WORKERS, 2)


@in_both_worlds
def test_a_worker_that_cannot_live_ends_the_run_with_its_last_words(start: Start, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    body = "def score(prompt, completion): return 1\nimport os\n"
    body += f"if os.path.exists({str(broken)!r}): raise LookupError('no data')\n"
    run = start(*write_reward(tmp_path, body), "launcher.max_restarts=2")
    run.until_step(1)
    broken.touch()
    run.worker("verifier-0").kill()
    assert run.end() == 1
    summary = run.summary()
    assert summary["status"] == "failed"
    assert "verifier-0 ended 3 times" in summary["reason"]
    assert "LookupError: no data" in summary["reason"]
    run.assert_balanced()
    run.assert_nothing_is_left()


@pytest.fixture(scope="module")
def trainerless(module_start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A run that has ended because its trainer was killed once more than it may, and its dataset's file."""
    write_run_file(folder := tmp_path_factory.mktemp("dataset"))
    rows = folder / "rows.jsonl"
    settings = ("checkpoint.every=2", "launcher.max_restarts=0", f"dataset.path={rows}")
    run = module_start(*settings, "steps=12", out="trainerless")
    run.until_step(5)
    run.until(lambda: run.worker("trainer-0")).kill()
    assert run.end() == 1
    return run, rows


@module_in_both_worlds
def test_a_trainer_that_ends_too_often_ends_a_run_which_can_be_resumed(trainerless: tuple[Any, Path]) -> None:
    run, _ = trainerless
    assert "trainer-0 ended 1 times (launcher.max_restarts=0), at last with" in run.summary()["reason"]
    run.assert_balanced()
    run.assert_nothing_is_left()


@in_simulation
def test_engines_do_not_notice_that_a_trainer_is_replaced(start: Start) -> None:
    run = start("steps=14", "checkpoint.every=5", "inference.replicas=2")
    run.until_step(8)
    run.until(lambda: run.worker("trainer-0")).kill()
    summary = run.assert_completed(14)
    [recovery] = summary["recoveries"]
    assert (recovery["lost"], recovery["how"]) == ("trainer-0", "killed by signal 9")
    assert recovery["repeated"] == recovery["version"] - 5
    events = run.journal()
    published = Counter(event.version for event in events if isinstance(event, VersionPublished))
    trained = Counter(event.version for event in events if isinstance(event, StepTrained))
    assert published == trained == Counter(range(1, 15))
    served = Counter(
        (event.worker, event.version, event.exact) for event in events if isinstance(event, WeightsServed)
    )
    assert set(served.values()) == {1}


@in_simulation
@pytest.mark.parametrize("end", ["steps", "evaluation", "interrupted"])
def test_no_engine_swaps_to_a_version_that_nothing_needs(start: Start, tmp_path: Path, end: str) -> None:
    write_run_file(tmp_path)
    data = f"{{use: jsonl, path: {tmp_path / 'rows.jsonl'}}}"
    rows = f"evaluation={{dataset: {data}, rows: 4, every: 6}}"
    run = start("steps=6", "inference.replicas=2", *([rows] if end == "evaluation" else []))
    if end == "interrupted":
        run.until_step(2)
        run.process.send_signal(signal.SIGINT)
    assert run.end() == (130 if end == "interrupted" else 0)
    served = {event.version for event in run.journal() if isinstance(event, WeightsServed)}
    last = run.summary()["version"]
    assert (last in served, last - 1 in served) == (end == "evaluation", True)
    assert not [line for line in run.log() if line["event"] == "swap failed"]


@pytest.mark.slow
def test_a_batch_that_ends_its_trainers_is_named_and_can_be_left_out(start: Start, tmp_path: Path) -> None:
    body = f"""
        import os
        from pathlib import Path
        from stretto_mock.training import MockTraining

        DEADLY = Path({str(tmp_path / "deadly")!r})

        class make(MockTraining):
            def train(self, batch, loss, *, temperature):
                tokens = str(batch["tokens"].tolist())
                if self._steps == 3 and not DEADLY.exists():
                    DEADLY.write_text(tokens)
                if self._steps == 3 and DEADLY.read_text() == tokens:
                    os.kill(os.getpid(), 9)
                return super().train(batch, loss, temperature=temperature)
    """
    deadly = write_plugin(tmp_path, "training", body, "stretto_mock.MockTrainingConfig")
    engine = (f"plugins=[{deadly}]", "training=mine")
    run = start(*engine, "steps=6", "launcher.max_restarts=2", "checkpoint.every=2")
    assert run.end() == 1
    reason = run.summary()["reason"]
    assert "trainer-0 ended 3 times (launcher.max_restarts=2)" in reason
    assert "trainers were lost 3 times in the batch of step 4, whose longest sequences are " in reason
    assert f"to leave it out: stretto resume {run.folder} --expire-batch" in reason

    summary = start("--expire-batch", resume=run).assert_completed(6)

    assert summary["ledger"]["expired"] > 0
    assert summary["reasons"]["expired: its batch was expired at version 3 (--expire-batch)"] > 0


@module_in_both_worlds
def test_a_run_whose_rows_have_changed_is_resumed_only_when_they_are_accepted(
    module_start: Start, trainerless: tuple[Any, Path]
) -> None:
    run, file = trainerless
    before = files_of(run)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:20]))
    refused = module_start(resume=run)
    assert refused.end() == 2
    last = run.text().splitlines()[-1]
    assert last.startswith("error: dataset: the rows have changed since the run began (fingerprint ")
    assert last.endswith(f"stretto resume {run.folder} --accept-dataset")
    assert files_of(run) == before
    summary = module_start("--accept-dataset", resume=run).assert_completed(12)
    assert "dataset: continued with changed rows" in summary["problems"][0]
    later = module_start("steps=14", resume=run).assert_completed(14)
    assert later["problems"] == summary["problems"]  # a checkpoint has them


@pytest.mark.slow
def test_a_resume_does_not_touch_a_running_run_whose_killed_processes_leave_nothing(start: Start) -> None:
    run = start("steps=500", "training.seconds_per_step=0.5")  # the commands below need the cores
    run.until_step(2)
    config = (run.folder / "config.yaml").read_text()
    seen = len(run.metrics())
    refused = start("seed=3", resume=run), start(resume=run)
    assert [each.end() for each in refused] == [2, 2]
    owner = (run.folder / "bus" / "kernel.lock").read_text().strip()
    assert owner.startswith(f"pid {run.process.pid}, ")
    message = f"owned by {owner}: nothing was changed; wait for its end, or stop it"
    assert run.text().count(f"error: the run in {run.folder} is {message}\n") == 2
    run.until_step(seen + 2)
    assert not (run.folder / "summary.json").exists()
    assert (run.folder / "config.yaml").read_text() == config
    assert len(run.look()) >= 7  # four workers, a scoring process, guard and server
    trainer = run.worker("trainer-0")
    id = json.loads((run.folder / "bus" / "kernel.json").read_text())["run"]
    assert list(Path("/dev/shm").glob(f"stretto-{id}-*"))
    run.process.kill()
    trainer.kill()  # so nobody but the guard can remove the weights
    run.assert_nothing_is_left()  # after grace_s, which is 3 here, and the end of the server


@pytest.mark.slow
def test_a_killed_kernel_leaves_no_process_even_in_the_middle_of_a_long_step(start: Start) -> None:
    run = start("training.seconds_per_step=60", "queue.max_staleness=0")
    run.until_a_call()
    run.until(lambda: "kernel waits for trainer-0 (call) since" in stretto("status", run.folder).stdout)
    assert "trainer-0: ready, heard" in stretto("status", run.folder).stdout
    run.kill()
    assert "no kernel owns the run" in stretto("status", run.folder).stdout
    run.assert_nothing_is_left()


@in_both_worlds
def test_an_interrupt_drains_and_the_run_goes_on_from_its_checkpoint(start: Start) -> None:
    run = start("steps=16", "training.seconds_per_step=0.2")
    run.until_step(4)
    run.process.send_signal(signal.SIGINT)
    began = run.clock()
    assert run.end() == 130, run.text()
    assert run.clock() - began < patience(15)
    summary = run.summary()
    assert summary["status"] == "interrupted"
    assert run.text().endswith(f"\nto continue the run: stretto resume {run.folder}\n")
    run.assert_balanced()
    run.assert_nothing_is_left()
    [checkpoint] = (run.folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{summary['version']:06d}"
    resumed = start(resume=run)
    done = resumed.assert_completed(16)
    assert done["wall_s"] > summary["wall_s"]
    steps = json.loads((run.folder / "checkpoints" / "step-000016" / "mock.json").read_text())
    assert steps["steps"] == 16


@in_both_worlds
def test_a_second_interrupt_ends_at_once(start: Start) -> None:
    run = start("training.seconds_per_step=30", "queue.max_staleness=0")
    run.until_a_call()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "interrupted" in run.text())
    run.process.send_signal(signal.SIGINT)
    began = run.clock()
    assert run.end() == 130
    assert run.clock() - began < patience(6)
    run.assert_nothing_is_left()


@in_both_worlds
def test_a_run_whose_last_checkpoint_cannot_be_written_fails_and_goes_on_when_it_can(start: Start) -> None:
    run = start("steps=3", "checkpoint.every=0")
    run.until_step(1)
    checkpoints = run.folder / "checkpoints"
    checkpoints.touch()  # no folder can be made there
    assert run.end() == 1, run.text()
    summary = run.summary()
    assert (summary["status"], summary["version"]) == ("failed", 3)
    assert "the checkpoint of version 3 was not written" in summary["reason"]
    assert run.text().count("checkpoint failed") > 1
    run.assert_nothing_is_left()
    checkpoints.unlink()
    start(resume=run).assert_completed(3)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000003"]
    run.assert_audit_is_clean()


@in_both_worlds
def test_an_interrupt_while_starting_ends_it(start: Start) -> None:
    run = start()
    run.until(lambda: (run.folder / "bus" / "kernel.json").exists())
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    run.assert_nothing_is_left()


@in_both_worlds
@pytest.mark.parametrize("trainer_lives", [True, False])
def test_a_killed_kernels_run_goes_on_and_trains_every_ticket_once(start: Start, trainer_lives: bool) -> None:
    patient = f"bus.grace_s={patience(60)}"  # workers wait for the next kernel however busy the machine is
    run = start("checkpoint.every=3", "steps=20", "queue.max_staleness=1", "samples.keep=all", patient)
    run.until_step(8)
    run.kill(*([] if trainer_lives else ["trainer-0"]))
    before = run.metrics()
    resumed = start(resume=run)
    summary = resumed.assert_completed(20, bound=1)
    text = resumed.text()
    assert ("step repeated version=8" in text) == (not trainer_lives)
    assert "workers of the former kernel live on" in text
    assert summary["ledger"]["expired"] == summary["ledger"]["failed"] == 0
    resumed.assert_audit_is_clean()
    # What had been trained stands as it was, and the weights count every step once.
    assert [line["reward"] for line in run.metrics()[:6]] == [line["reward"] for line in before[:6]]
    steps = json.loads((run.folder / "checkpoints" / "step-000020" / "mock.json").read_text())
    assert steps["steps"] == 20


@in_simulation
def test_twenty_deaths_of_the_kernel_change_nothing_that_people_see(start: Start, tmp_path: Path) -> None:
    """The observers live and die with their kernel: the next one's go on where the files end, without a gap
    and without a double line."""

    def begin(name: str) -> Any:
        rows = f"{{use: jsonl, path: {tmp_path}/rows.jsonl}}"
        evaluation = f"evaluation={{dataset: {rows}, rows: 4, every: 5}}"
        return start("steps=30", "checkpoint.every=4", "queue.max_staleness=0", evaluation, out=name)

    def seen(run: TestedRun) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl without what depends on time."""
        names = (
            *("step", "reward", "reward_std", "length", "staleness"),
            *("tokens", "loss", "zero_variance_groups"),
        )
        return [
            {key: value for key, value in line.items() if key in names or key.startswith("evaluation/")}
            for line in [*run.metrics(), *run.evaluations()]
        ]

    calm, run = begin("calm"), begin("killed")
    expected = calm.assert_completed(30, bound=0)
    for deaths in range(20):
        run.until_step(deaths + 1)
        run.kill()
        run = start(resume=run)
    summary = run.assert_completed(30, bound=0)
    assert sorted(map(str, seen(run))) == sorted(map(str, seen(calm)))
    assert len(seen(run)) == 30 + len(summary["evaluation"])
    same = ("status", "steps", "version", "evaluation", "best", "staleness", "canary", "lost", "problems")
    assert {key: summary[key] for key in same} == {key: expected[key] for key in same}
    assert summary["tokens"]["trained"] == expected["tokens"]["trained"]


@in_simulation
def test_a_run_without_a_checkpoint_is_repeated_from_its_beginning(start: Start, tmp_path: Path) -> None:
    evaluation = (f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}", "evaluation.rows=4")
    run = start("steps=12", "checkpoint.every=0", *evaluation, "evaluation.every=3")
    run.until_step(5)
    run.kill()
    resumed = start(resume=run)
    summary = resumed.assert_completed(12)
    assert "step repeated" in resumed.text()
    assert [point["version"] for point in summary["evaluation"]][:2] == [0, 3]  # from the journal
    steps = json.loads((run.folder / "checkpoints" / "step-000012" / "mock.json").read_text())
    assert steps["steps"] == 12


@in_simulation
def test_after_an_interrupt_in_the_last_evaluation_a_run_can_finish(start: Start, tmp_path: Path) -> None:
    evaluation = (f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}", "evaluation.rows=40")
    run = start("steps=2", *evaluation, "evaluation.samples=8", "inference.tokens_per_s=1500")
    run.until_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert [point["version"] for point in run.summary()["evaluation"]] == [0]
    done = start(resume=run).assert_completed(2)
    assert [point["version"] for point in done["evaluation"]] == [0, 2]


@in_both_worlds
def test_an_interrupt_while_a_checkpoint_is_written_beside_the_steps_leaves_it_whole(
    start: Start, tmp_path: Path
) -> None:
    body = """
        import time
        from stretto_mock.training import MockTraining

        class make(MockTraining):
            def save(self, folder, copy_bytes=0):
                write = super().save(folder, copy_bytes)
                return lambda: (time.sleep(1.5), write())
    """
    slow = write_plugin(tmp_path, "training", body, "stretto_mock.MockTrainingConfig")
    run = start(f"plugins=[{slow}]", "training=mine", "steps=40", "checkpoint.every=5")
    run.until(lambda: list((run.folder / "checkpoints").glob(".step-000005*")))
    run.until_step(7)
    assert not list((run.folder / "checkpoints").glob("step-*")), "the steps waited for the checkpoint"
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    for folder in (run.folder / "checkpoints").iterdir():
        assert {"kernel.json", "manifest.json", "mock.json"} <= {path.name for path in folder.iterdir()}
        hashes = json.loads((folder / "manifest.json").read_text())
        assert set(hashes) == {path.name for path in folder.iterdir()} - {"manifest.json"}


@in_both_worlds
def test_a_worker_that_stood_still_does_not_blame_the_kernel(start: Start) -> None:
    """It stands still for longer than it waits for a kernel, and not as long as the kernel waits for it."""
    run = start("steps=30", "training.seconds_per_step=0.1", f"bus.grace_s={SILENT_S / 4}")
    run.until_step(2)
    trainer = run.worker("trainer-0")
    trainer.send_signal(signal.SIGSTOP)
    deadline = run.clock() + SILENT_S / 2
    run.until(lambda: run.clock() > deadline)
    trainer.send_signal(signal.SIGCONT)
    assert run.assert_completed(30)["restarts"] == 0


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(start: Start) -> None:
    run = start("steps=2", piped=True)
    run.process.stdout.readline()
    run.process.stdout.close()
    run.assert_completed(2)


@pytest.mark.slow
def test_a_run_that_has_lost_its_store_goes_on_from_its_checkpoint_or_is_refused(
    start: Start, tmp_path: Path
) -> None:
    # Kept samples would hold back the purge of the log, so the run could begin again from version 0.
    run = start("checkpoint.every=3", "steps=14", "samples.keep=none")
    run.until_step(8)
    run.kill()
    run.assert_nothing_is_left()
    before = files_of(run)
    store, checkpoints = run.folder / "bus" / "store", run.folder / "checkpoints"
    version = int(max(path.name for path in checkpoints.iterdir())[-6:])
    steps = run.metrics()[-1]["step"]
    checkpoints.rename(tmp_path / "checkpoints")
    for _ in ("the log was purged before the checkpoint", "the store is lost"):
        refused = start(resume=run)
        assert refused.end() == 2
        expected = f"error: the run was at version {steps}, but it has no intact checkpoint"
        assert run.text().splitlines()[-1].startswith(expected)
        assert files_of(run) == before
        shutil.rmtree(store)
    (tmp_path / "checkpoints").rename(checkpoints)
    resumed = start(resume=run)
    summary = resumed.assert_completed(14)
    assert summary["lost"]["steps"] == steps - version
    assert summary["lost"]["journals"] == 1
    assert "the store was damaged" in summary["problems"][0]
    run.assert_audit_is_clean()


@pytest.mark.slow
def test_a_run_whose_folder_is_removed_ends_with_one_line_that_says_so(start: Start) -> None:
    run = start("steps=1000")
    run.until_step(3)
    moved = run.folder.rename(run.folder.with_name("moved"))
    assert run.process.wait(patience(90)) == 1
    assert "Traceback" not in run.text()
    assert f"error: the run's folder {run.folder} is gone" in run.text().splitlines()[-1]
    moved.rename(run.folder)
    run.assert_nothing_is_left()


@in_both_worlds
def test_a_run_on_a_full_disk_ends_with_the_disk_and_its_room_and_can_be_resumed(start: Start) -> None:
    run = start("checkpoint.every=3", "steps=14")
    run.until_step(5)
    metrics = run.folder / "metrics.jsonl"
    metrics.rename(run.folder / "metrics")
    metrics.symlink_to("/dev/full")
    assert run.end() == 1
    assert re.match(
        rf"cannot write {metrics}: .*No space left on device; the run writes to the disk at /.*"
        rf"has [0-9,]+ MiB free of [0-9,]+ MiB; make room, then: stretto resume {run.folder}",
        run.summary()["reason"],
    )
    run.assert_nothing_is_left()
    metrics.unlink()
    (run.folder / "metrics").rename(metrics)
    start(resume=run).assert_completed(14)


@pytest.mark.slow
def test_a_run_outlives_its_guard_a_silent_server_and_a_kernel_that_stood_still(start: Start) -> None:
    run = start("steps=60")
    run.until_step(2)
    psutil.Process(int((run.folder / "bus" / "guard.pid").read_text().split()[0])).kill()
    run.until(lambda: "starting it again" in run.text())
    run.until_step(len(run.metrics()) + 5)
    server = psutil.Process(int((run.folder / "bus" / "nats.pid").read_text()))
    for process, seconds in ((server, 20), (psutil.Process(run.process.pid), 8)):  # grace_s is 3 here
        process.suspend()
        deadline = time.monotonic() + seconds
        run.until(lambda deadline=deadline: time.monotonic() > deadline)
        process.resume()
        # A ticket that was on its way to the rollout worker is delivered again after 20 s.
        run.until_step(len(run.metrics()) + 5)
    assert run.assert_completed(60)["restarts"] == 0


@in_both_worlds
def test_an_outage_beyond_its_limit_ends_the_run_and_names_the_bus(start: Start) -> None:
    run = start("steps=40", f"bus.outage_s={patience(4)}", "checkpoint.every=2")
    run.until_step(4)
    run.stop_server()
    assert run.end() == 1
    # A server that stands still looks like a store without answers before the connection looks dead.
    sign = r"no (connection to|answer from the store of) nats-server at nats://(127\.0\.0\.1|simulated):"
    assert re.match(sign + r"\d+ for [\d.]+ s .*stretto resume", run.summary()["reason"])
    run.assert_nothing_is_left()
    start(resume=run).assert_completed(40)


@pytest.mark.slow
def test_a_worker_that_loads_for_long_on_its_event_loop_is_not_lost(start: Start, tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text(
        "import sys, time\nfrom stretto import hookimpl\n"
        "end = time.monotonic() + 20 * ('rollout-0' in sys.argv)  # longer than a silent worker may take\n"
        "while time.monotonic() < end: pass\n"
        "@hookimpl\ndef stretto_reward(): return []\n"
    )
    assert start(f"plugins=[{tmp_path}/heavy.py]", "steps=3").assert_completed(3)["restarts"] == 0
