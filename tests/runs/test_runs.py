"""Whole runs of the mock engines through the command line: real processes, a real server, real deaths."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]


# ------------------------------------------------------------------------------------- it works


def test_a_run_goes_through_all_its_processes_and_leaves_plain_files(start: Start, tmp_path: Path) -> None:
    run = start(
        "evaluation.every=3",
        f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}",
        "evaluation.rows=10",
        "checkpoint.every=4",
        "checkpoint.keep=1",
    )
    run.until_step(1)
    names = ("trainer-0", "inference-0", "rollout-0", "verifier-0")
    assert all(run.worker(name) for name in names)
    running = [" ".join(process.cmdline()) for process in run.look()]
    assert any("nats-server" in arguments and "-c" in arguments for arguments in running)
    summary = run.assert_completed(8)
    assert [point["version"] for point in summary["evaluation"]] == [0, 3, 6, 8]
    assert [point["samples"] for point in summary["evaluation"]] == [10, 10, 10, 10]
    assert summary["tokens"]["generated"] >= summary["tokens"]["trained"] > 0
    assert 0 < summary["overlap"] <= 1.05
    assert summary["restarts"] == 0
    assert summary["problems"] == []
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-000008"]
    for name in (*names, "kernel"):
        lines = (run.folder / "logs" / f"{name}.jsonl").read_text().splitlines()
        assert all(json.loads(line)["event"] for line in lines)
    assert (run.folder / "config.yaml").exists()
    assert "step=8" in run.text()  # one line a step in a pipe


def test_the_same_file_runs_in_other_sizes(start: Start) -> None:
    run = start("algorithm.group_size=16", "queue.max_staleness=4", "inference.replicas=2", "steps=5")
    summary = run.assert_completed(5, bound=4)
    assert summary["tokens"]["trained"] > 0


def test_synchronous_training_has_no_staleness(start: Start) -> None:
    assert start("queue.max_staleness=0", "steps=4").assert_completed(4, bound=0)["staleness"] == {
        "0": 4 * 4 * 4
    }


@pytest.mark.slow
def test_late_groups_can_be_dropped_instead_of_waited_for(start: Start) -> None:
    run = start(
        *("queue.on_late=drop", "queue.max_staleness=1", "inference.sigma=1.5", "inference.slots=24"),
        *("inference.tokens_per_s=2000", "training.seconds_per_step=0.02"),
    )
    summary = run.assert_completed(8, bound=1)
    assert summary["ledger"]["expired"] == sum(
        count for reason, count in summary["reasons"].items() if reason.startswith("expired")
    )


def test_a_run_without_any_model_uses_bytes(start: Start) -> None:
    start("model=null", "inference.vocab_size=200", "steps=2").assert_completed(2)


# ------------------------------------------------------------------------------- things that die


@pytest.mark.parametrize("worker", ["rollout-0", "verifier-0", "inference-0"])
def test_a_killed_worker_is_started_again_and_nothing_is_lost(start: Start, worker: str) -> None:
    run = start("steps=25")
    run.until_step(3)
    killed = run.until(lambda: run.worker(worker))
    killed.kill()
    again = run.until(lambda: (other := run.worker(worker)) and other.pid != killed.pid and other)
    assert again.pid != killed.pid
    summary = run.assert_completed(25)
    assert summary["restarts"] == 1


def test_a_worker_that_cannot_live_ends_the_run_with_its_last_words(start: Start, tmp_path: Path) -> None:
    # Fine when the run is checked, and never again.
    body = "def score(prompt, completion):\n    return 1\nopen(__file__ + '.once', 'x')\n"
    (tmp_path / "broken.py").write_text(body)
    run = start("reward=function", f"reward.function={tmp_path}/broken.py:score", "launcher.max_restarts=1")
    assert run.end() == 1
    summary = run.summary()
    assert summary["status"] == "failed"
    assert "verifier-0 ended 2 times" in summary["reason"]
    assert "FileExistsError" in summary["reason"]
    run.assert_balanced()
    run.assert_nothing_is_left()


def test_a_lost_trainer_ends_the_run_which_can_be_resumed(start: Start) -> None:
    run = start("checkpoint.every=2", "steps=12")
    run.until_step(5)
    run.until(lambda: run.worker("trainer-0")).kill()
    assert run.end() == 1
    assert "trainer-0 was lost" in run.summary()["reason"]
    run.assert_balanced()
    run.assert_nothing_is_left()
    start(resume=run).assert_completed(12)


def test_a_killed_kernel_leaves_no_process(start: Start) -> None:
    run = start("steps=500")
    run.until_step(2)
    assert len(run.look()) >= 7  # four workers, a scoring process, guard and server
    run.process.kill()
    run.assert_nothing_is_left(within_s=3 + 5)  # grace_s is 3 here


@pytest.mark.slow
def test_a_killed_kernel_leaves_no_process_even_in_the_middle_of_a_long_step(start: Start) -> None:
    run = start("training.seconds_per_step=60", "queue.max_staleness=0")
    run.until_a_call()
    run.process.kill()
    run.assert_nothing_is_left(within_s=3 + 8)


# ---------------------------------------------------------------------------- interrupt and resume


def test_an_interrupt_drains_and_the_run_goes_on_from_its_checkpoint(start: Start) -> None:
    run = start("steps=40", "training.seconds_per_step=0.2")
    run.until_step(4)
    run.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert run.end() == 130, run.text()
    assert time.monotonic() - began < 15
    summary = run.summary()
    assert summary["status"] == "interrupted"
    assert run.text().endswith(f"\nto continue the run: stretto resume {run.folder}\n")
    run.assert_balanced()
    run.assert_nothing_is_left()
    [checkpoint] = (run.folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{summary['version']:06d}"
    resumed = start(resume=run)
    done = resumed.assert_completed(40)
    assert done["wall_s"] > summary["wall_s"]
    steps = json.loads((run.folder / "checkpoints" / "step-000040" / "mock.json").read_text())
    assert steps == {"steps": 40}


def test_a_second_interrupt_ends_at_once(start: Start) -> None:
    run = start("training.seconds_per_step=30", "queue.max_staleness=0")
    run.until_a_call()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "interrupted" in run.text())
    run.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert run.end() == 130
    assert time.monotonic() - began < 6
    run.assert_nothing_is_left()


def test_an_interrupt_while_starting_ends_it(start: Start) -> None:
    run = start()
    run.until(lambda: (run.folder / "bus" / "kernel.json").exists())
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    run.assert_nothing_is_left()


def test_a_killed_kernels_run_repeats_the_journal_and_trains_every_ticket_once(start: Start) -> None:
    run = start("checkpoint.every=3", "steps=20", "queue.max_staleness=1")
    run.until_step(8)
    run.process.kill()
    run.process.wait()
    before = run.metrics()
    resumed = start(resume=run)  # at once: former workers and server are still within their grace time
    summary = resumed.assert_completed(20, bound=1)
    text = resumed.text()
    assert "step repeated" in text
    assert summary["ledger"]["trained"] == 80
    assert summary["ledger"]["expired"] == summary["ledger"]["failed"] == 0
    # What had been trained stands as it was, and the weights count every step once.
    assert [line["reward"] for line in run.metrics()[:6]] == [line["reward"] for line in before[:6]]
    steps = json.loads((run.folder / "checkpoints" / "step-000020" / "mock.json").read_text())
    assert steps == {"steps": 20}


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_repeated_from_its_beginning(start: Start, tmp_path: Path) -> None:
    evaluation = (f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}", "evaluation.rows=4")
    run = start("steps=12", "checkpoint.every=0", *evaluation, "evaluation.every=3")
    run.until_step(5)
    run.process.kill()
    run.process.wait()
    resumed = start(resume=run)
    summary = resumed.assert_completed(12)
    assert "step repeated" in resumed.text()
    assert [point["version"] for point in summary["evaluation"]][:2] == [0, 3]  # from the journal
    steps = json.loads((run.folder / "checkpoints" / "step-000012" / "mock.json").read_text())
    assert steps == {"steps": 12}


@pytest.mark.slow
def test_an_interrupt_in_the_last_evaluation_leaves_a_run_that_can_be_finished(
    start: Start, tmp_path: Path
) -> None:
    evaluation = (f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}", "evaluation.rows=40")
    run = start("steps=2", *evaluation, "evaluation.samples=8", "inference.tokens_per_s=1500")
    run.until_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert [point["version"] for point in run.summary()["evaluation"]] == [0]
    done = start(resume=run).assert_completed(2)
    assert [point["version"] for point in done["evaluation"]] == [0, 2]


@pytest.mark.slow
def test_an_interrupt_while_a_checkpoint_is_written_leaves_it_whole(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        textwrap.dedent(
            """
            import time
            from stretto import Component, TrainingConfig, hookimpl
            from stretto_mock.training import MockTraining
            from stretto_mock import MockTrainingConfig

            class Slow(MockTraining):
                def save(self, folder):
                    time.sleep(1.5)
                    super().save(folder)

            class SlowConfig(MockTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
                pass

            @hookimpl
            def stretto_training():
                yield Component("slow", Slow, SlowConfig, "saves slowly", needs_model=False)
            """
        )
    )
    run = start(f"plugins=[{tmp_path}/slow.py]", "training.use=slow", "steps=40", "checkpoint.every=2")
    run.until(lambda: list((run.folder / "checkpoints").glob(".step-*")))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    for folder in (run.folder / "checkpoints").iterdir():
        assert {"kernel.json", "manifest.json", "mock.json"} <= {path.name for path in folder.iterdir()}
        hashes = json.loads((folder / "manifest.json").read_text())
        assert set(hashes) == {path.name for path in folder.iterdir()} - {"manifest.json"}


@pytest.mark.slow
def test_a_worker_that_stood_still_does_not_blame_the_kernel(start: Start) -> None:
    run = start("steps=30", "training.seconds_per_step=0.1")
    run.until_step(2)
    trainer = run.worker("trainer-0")
    trainer.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 4.5  # grace_s is 3 here
    run.until(lambda: time.monotonic() > deadline)
    trainer.send_signal(signal.SIGCONT)
    assert run.assert_completed(30)["restarts"] == 0


def test_a_reader_that_goes_away_does_not_end_the_run(start: Start, tmp_path: Path) -> None:
    del tmp_path
    run = start("steps=6", piped=True)
    assert run.process.stdout is not None
    run.process.stdout.readline()
    run.process.stdout.close()
    assert run.process.wait(60) == 0
    assert run.summary()["status"] == "completed"


def test_resuming_passes_over_a_damaged_checkpoint(start: Start) -> None:
    run = start("checkpoint.every=2", "steps=12", "checkpoint.keep=3")
    run.until_step(6)
    run.process.kill()
    run.process.wait()
    newest = max((run.folder / "checkpoints").glob("step-*"))
    (newest / "mock.json").write_text('{"steps": 9999}')
    resumed = start(resume=run)
    resumed.assert_completed(12)
    assert "checkpoint is damaged" in resumed.text()


def test_resuming_what_cannot_be_resumed_is_refused(start: Start, tmp_path: Path) -> None:
    run = start("steps=1")
    run.assert_completed(1)
    again = start(resume=run)
    assert again.end() == 2
    assert "is complete" in again.text()
    second = start("steps=1")
    assert second.end() == 2
    assert "already holds a run" in second.text()


# ------------------------------------------------------------------------------- what users write


def reward(tmp_path: Path, body: str) -> list[str]:
    (tmp_path / "mine.py").write_text(textwrap.dedent(body))
    return ["reward=function", f"reward.function={tmp_path}/mine.py:score"]


def test_a_reward_that_fails_sometimes_fails_its_tickets_only(start: Start, tmp_path: Path) -> None:
    body = """
    import time, math, os
    def score(prompt, completion, n, **columns):
        if n % 7 == 6: raise LookupError(f"row {n}")
        if n % 7 == 1: return math.nan
        if n % 7 == 2: return None
        if n == 3: time.sleep(60)
        if n == 4: os._exit(3)
        return {"reward": float(len(completion)), "accuracy": 0.5}
    """
    run = start(*reward(tmp_path, body), "reward.timeout_s=1", "steps=10", "queue.max_failures=1000")
    summary = run.assert_completed(10)
    reasons = Counter(summary["reasons"])
    assert summary["ledger"]["failed"] == sum(reasons.values()) > 0
    text = json.dumps(summary["reasons"])
    assert "reward raised LookupError: row" in text
    assert "mine.py:4)" in text
    assert "not a finite number" in text
    assert "reward took longer than reward.timeout_s=1" in text
    assert "reward ended its process: exit status 3" in text
    assert run.metrics()[0]["reward/accuracy"] == 0.5


def test_a_reward_that_always_raises_stops_the_run_with_the_reason(start: Start, tmp_path: Path) -> None:
    # It scores what it is tried on before the run, and nothing else.
    body = "def score(prompt, completion):\n    if completion != '0': raise KeyError('gold')\n    return 0"
    run = start(*reward(tmp_path, body))
    assert run.end() == 1
    summary = run.summary()
    assert "8 tickets failed one after the other" in summary["reason"]
    assert "KeyError: 'gold'" in summary["reason"]
    run.assert_balanced()
    run.assert_nothing_is_left()


@pytest.mark.parametrize(
    "body",
    [
        "async def score(prompt, completion, answer):\n    return float(answer.isdigit())",
        # TRL's form
        "def score(completions, answer, prompts, **kwargs):\n"
        "    assert len(prompts) == len(answer) == len(completions) == 4\n"
        "    print('printing is harmless')\n"
        "    return [1.0 for _ in completions]",
        "async def score(prompts, completions, **kwargs):\n    return [1.0] * len(completions)",
    ],
)
def test_rewards_of_every_form_run(start: Start, tmp_path: Path, body: str) -> None:
    run = start(*reward(tmp_path, body), "steps=2")
    run.assert_completed(2)
    assert [line["reward"] for line in run.metrics()] == [1.0, 1.0]


def test_a_workflow_that_raises_or_never_ends_fails_its_tickets(start: Start, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        textwrap.dedent(
            """
            import anyio
            from stretto import Component, WorkflowConfig, hookimpl
            from stretto.workflow import Trajectory

            class Flow:
                def __init__(self, config, context): pass
                async def run(self, prompt, session):
                    if prompt.row["n"] % 5 == 0: raise RuntimeError("no luck")
                    if prompt.row["n"] % 5 == 1: await anyio.sleep_forever()
                    if prompt.row["n"] % 5 == 2: return []
                    first = await session.generate(prompt.ids)
                    answers = await session.generate(prompt.ids, n=session.group_size)
                    scores = await session.score(prompt, answers)
                    return [Trajectory.of(prompt.ids, a, s) for a, s in zip(answers, scores)]

            @hookimpl
            def stretto_workflow():
                yield Component("flow", Flow, WorkflowConfig, "fails")
            """
        )
    )
    run = start(
        f"plugins=[{tmp_path}/flow.py]",
        *("workflow=flow", "workflow.timeout_s=1", "steps=4", "queue.max_failures=1000"),
    )
    summary = run.assert_completed(4)
    text = json.dumps(summary["reasons"])
    assert "RuntimeError: no luck" in text
    assert "took longer than workflow.timeout_s=1" in text
    assert "returned no trajectory" in text


def test_prompts_that_are_too_long_are_filtered_and_counted(start: Start) -> None:
    run = start("dataset.max_prompt_tokens=4", "steps=3", "queue.max_filtered=1")
    summary = run.assert_completed(3)
    log = [json.loads(line) for line in (run.folder / "logs" / "kernel.jsonl").read_text().splitlines()]
    left_out = [line["level"] for line in log if line["event"] == "row left out"]
    assert left_out == ["info"] * summary["ledger"]["filtered"] != []
    assert "ticket failed" not in run.text()
    assert (
        summary["ledger"]["filtered"]
        == summary["reasons"]["filtered: prompt longer than max_prompt_tokens=4"]
    )


def test_a_full_disk_at_a_checkpoint_is_told_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path
            from stretto import Component, TrainingConfig, hookimpl

            def make(config, context):
                from stretto_mock import MockTrainingConfig
                from stretto_mock.training import MockTraining

                class Full(MockTraining):
                    def save(self, folder):
                        super().save(folder)
                        Path("/dev/full").write_text("x" * 100000)

                return Full(MockTrainingConfig(seconds_per_step=0.05), context)

            @hookimpl
            def stretto_training():
                yield Component("full", make, TrainingConfig, "has no room", needs_model=False)
            """
        )
    )
    run = start(f"plugins=[{tmp_path}/full.py]", "training=full", "checkpoint.every=2", "steps=5")
    summary = run.assert_completed(5)
    assert summary["checkpoints"] == []
    assert len(summary["problems"]) == 3
    assert "checkpoint of version 2 not written" in summary["problems"][0]
    assert "No space left on device" in summary["problems"][0]
    assert list((run.folder / "checkpoints").iterdir()) == []


def test_malformed_messages_in_mid_run_are_refused_and_counted(start: Start) -> None:
    run = start("steps=25")
    run.until_step(2)
    code = """
import asyncio, json, sys, nats
login = json.load(open(sys.argv[1]))
async def main():
    client = await nats.connect(login["url"], user=login["user"], password=login["password"])
    root = "st." + login["run"]
    for subject in ("kernel.heartbeat", "kernel.progress", "kernel.join", "log.groups", "beacon",
                    "worker.inference.inference-0.generate", "worker.trainer.trainer-0.call",
                    "worker.verifier.verifier-0.score", "abort"):
        for payload in (b"", b"garbage", b"\\xc1\\x00", b"\\x91\\xa3X/1"):
            await client.publish(f"{root}.{subject}", payload)
    await client.flush()
    await client.close()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code, str(run.folder / "bus" / "kernel.json")], check=True)
    summary = run.assert_completed(25)
    assert summary["refused_messages"] > 0
    assert "message refused" in (run.folder / "logs" / "kernel.jsonl").read_text()


# ----------------------------------------------------------------------------- what is around a run


def test_a_server_of_ones_own_carries_a_run(start: Start, server: Any, tmp_path: Path) -> None:
    """Here another bundled server plays it; the run starts none, and its credentials serve every role."""
    login = json.loads((tmp_path / "bus" / "kernel.json").read_text())
    credentials = tmp_path / "login.json"
    credentials.write_text(json.dumps({"user": login["user"], "password": login["password"]}))
    run = start(f"bus.url={server.url}", f"bus.credentials={credentials}", "steps=3")
    run.assert_completed(3)
    assert not (run.folder / "bus" / "nats.conf").exists()
    second = start(f"bus.url={server.url}", f"bus.credentials={credentials}", "steps=2", out="second")
    second.assert_completed(2)  # beside what the first has left there


@pytest.mark.slow
def test_a_run_goes_on_after_its_server_was_killed(start: Start) -> None:
    run = start("steps=30")
    run.until_step(4)
    os.kill(int((run.folder / "bus" / "nats.pid").read_text()), signal.SIGKILL)
    summary = run.assert_completed(30)
    assert summary["restarts"] == 0
    assert "bus reconnected" in (run.folder / "logs" / "kernel.jsonl").read_text()


@pytest.mark.slow
def test_a_worker_started_by_hand_joins_and_works(start: Start) -> None:
    run = start("steps=30", "rollout.concurrency=2")
    run.until_step(2)
    bootstrap = run.folder / "bus" / "rollout.json"
    extra = subprocess.Popen(
        [sys.executable, "-m", "stretto.workers", str(bootstrap), "--id", "rollout-extra"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    run.assert_completed(30)
    assert extra.wait(10) == 0  # it leaves with the others
    log = (run.folder / "logs" / "rollout-extra.jsonl").read_text()
    assert "the run is over" in log
    assert "worker ready worker=rollout-extra" in run.text()


def test_plugins_and_trackers_follow_a_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "follower.py").write_text(
        textwrap.dedent(
            f"""
            from stretto import Component, TrackerConfig, hookimpl

            def note(what):
                with open({str(tmp_path / "notes")!r}, "a") as file:
                    print(what, file=file)

            class Notes:
                def __init__(self, config, context): pass
                def step(self, metrics): note(f"tracked {{metrics['step']}}"); assert metrics["step"] != 2
                def finish(self, summary): note(f"tracked the end: {{summary['status']}}")

            @hookimpl
            def stretto_tracker():
                yield Component("notes", Notes, TrackerConfig, "writes notes")

            @hookimpl
            def stretto_run_started(config): note(f"started {{config.name}}")
            @hookimpl
            def stretto_step_finished(metrics): note(f"finished {{metrics['step']}}")
            @hookimpl
            def stretto_checkpoint_saved(folder): note(f"saved {{folder.name}}")
            @hookimpl
            def stretto_run_finished(summary): note(f"ended {{summary['version']}}")
            """
        )
    )
    run = start(f"plugins=[{tmp_path}/follower.py]", "trackers=[notes]", "steps=2")
    summary = run.assert_completed(2)
    assert (tmp_path / "notes").read_text().splitlines() == [
        *("started test", "tracked 1", "finished 1", "tracked 2", "finished 2", "saved step-000002"),
        *("tracked the end: completed", "ended 2"),
    ]
    assert summary["problems"] == ["tracker Notes: AssertionError: "]


@pytest.mark.slow
def test_a_repetition_that_differs_begins_a_new_incarnation(start: Start, tmp_path: Path) -> None:
    (tmp_path / "drift.py").write_text(
        textwrap.dedent(
            """
            import json, os
            from stretto import Component, TrainingConfig, hookimpl

            def make(config, context):
                import torch
                from stretto_mock import MockTrainingConfig
                from stretto_mock.training import MockTraining

                class Drifting(MockTraining):
                    noise = 0
                    def load(self, folder):
                        super().load(folder)
                        self.noise = int((folder / "noise").read_text()) if folder else 0
                    def save(self, folder):
                        super().save(folder)
                        (folder / "noise").write_text(str(self.noise))
                    def train(self, batch, loss, *, temperature):
                        self.noise += os.getpid()  # no two processes train alike
                        return super().train(batch, loss, temperature=temperature)
                    def weights(self):
                        yield "noise", torch.tensor([self.noise])

                return Drifting(MockTrainingConfig(seconds_per_step=0.1), context)

            @hookimpl
            def stretto_training():
                yield Component("drift", make, TrainingConfig, "never the same", needs_model=False)
            """
        )
    )
    run = start(f"plugins=[{tmp_path}/drift.py]", "training=drift", "checkpoint.every=3", "steps=14")
    run.until_step(8)
    run.process.kill()
    run.process.wait()
    resumed = start(resume=run)
    summary = resumed.assert_completed(14)
    assert "repetition differs" in resumed.text()
    assert summary["ledger"]["expired"] > 0
    assert any("incarnation 0" in reason for reason in summary["reasons"])
    assert int(summary["checkpoints"][0][-6:]) % 3  # one of its own where the new incarnation begins


@pytest.mark.slow
def test_a_terminal_shows_the_run_while_it_goes(start: Start, tmp_path: Path) -> None:
    start("steps=1").assert_completed(1)  # writes the run file
    parent, child = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stretto",
            "run",
            str(tmp_path / "run.yaml"),
            f"out={tmp_path}/tty",
            "steps=12",
            "training.seconds_per_step=0.2",
        ],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(child)
        while True:
            try:
                shown += os.read(parent, 4096)
            except OSError:  # the other end is closed
                break
        assert process.wait(30) == 0
    os.close(parent)
    text = shown.decode(errors="replace")
    for word in ("step 12/12", "reward", "staleness", "tokens/s", "tickets", "workers", "4 ready", "folder"):
        assert word in text, word
    for word in (f"{tmp_path}/tty", " s left", "bottleneck", "training works ", "stopping the workers"):
        assert word in text, word
    last = text[text.rindex("step 12/12") :]
    assert not any(word in last for word in ("workers", "bottleneck", "left", "now"))
    assert "completed at step 12" in last


def test_a_ticket_that_is_delivered_twice_is_worked_on_once(start: Start) -> None:
    """As a server does that was killed before it had stored who has what."""
    run = start("steps=8", "rollout.concurrency=64", "inference.tokens_per_s=800")
    run.until_step(2)
    code = """
import asyncio, json, sys, nats
login = json.load(open(sys.argv[1]))
async def main():
    client = await nats.connect(login["url"], user=login["user"], password=login["password"])
    stream = client.jetstream()
    again = 0
    state = (await stream.stream_info("TICKETS_" + login["run"])).state
    for sequence in range(state.first_seq, state.last_seq + 1):
        try:
            message = await stream.get_msg("TICKETS_" + login["run"], sequence)
        except nats.js.errors.NotFoundError:
            continue
        await stream.publish(message.subject, message.data)
        again += 1
    print(again)
    await client.close()
asyncio.run(main())
"""
    login = str(run.folder / "bus" / "kernel.json")
    output = subprocess.run([sys.executable, "-c", code, login], check=True, capture_output=True, text=True)
    assert int(output.stdout) > 0
    summary = run.assert_completed(8)
    assert summary["restarts"] == 0
    assert summary["reasons"] == {}
    assert "KeyError" not in (run.folder / "logs" / "rollout-0.jsonl").read_text()


# --------------------------------------------------------------------------- many models, many groups

SEVERAL = '''
    from stretto import AlgorithmConfig, Component, hookimpl
    from stretto.algorithm import Loss, Model, forward, function, generate, score, train

    class Several:
        """Three models; `check` fails the run if rows of any rank are not where they belong."""

        models = {"actor": Model(), "critic": Model(head="value"), "reference": Model(trainable=False)}

        def __init__(self, config, context):
            pass

        def calls(self):
            return [
                generate("actor", samples=4),
                score(),
                forward("critic", writes="values"),
                forward("reference", writes="reference_logprobs"),
                function(
                    self.check,
                    reads=("values", "reference_logprobs", "behaviour_logprobs", "rewards"),
                    writes=("advantages", "scores"),
                    name="check",
                ),
                train("actor", Loss(self.loss, "token"), reads=("advantages", "scores"), minibatches=2),
                train("critic", Loss(self.loss, "token"), reads=("advantages",)),
            ]

        def keep(self, group):
            return True

        def check(self, batch):
            import torch

            assert torch.equal(batch["values"], batch["behaviour_logprobs"])
            assert torch.equal(batch["reference_logprobs"], batch["behaviour_logprobs"])
            return {"advantages": batch["tokens"].float(), "scores": batch["group"] * 2}

        def loss(self, logprobs, batch):
            import torch

            assert torch.equal(batch["advantages"], batch["tokens"].float())
            if "scores" in batch:
                assert torch.equal(batch["scores"], batch["group"] * 2)
            return logprobs, {}

    @hookimpl
    def stretto_algorithm():
        yield Component("several", Several, AlgorithmConfig, "three models")
'''


@pytest.fixture
def several(tmp_path: Path) -> list[str]:
    """Overrides for a run of three models, on three worker groups of two ranks each or fewer."""
    (tmp_path / "several.py").write_text(textwrap.dedent(SEVERAL))
    slow = "{use: mock, seconds_per_forward: 0.4, seconds_per_step: 0.1, calls_loss: true}"
    return [
        *(f"plugins=[{tmp_path}/several.py]", "algorithm=several", "steps=3"),
        *(f"groups={{critics: {slow}, references: {slow}}}", "training.calls_loss=true"),
        *("models.critic.group=critics", "models.reference.group=references"),
        *("training.processes=2", "groups.critics.processes=2"),
    ]


def test_calls_of_different_groups_overlap_and_rows_move_between_ranks(
    start: Start, several: list[str]
) -> None:
    run = start(*several)
    summary = run.assert_completed(3)
    assert summary["restarts"] == 0
    for line in run.metrics():
        times = {call["call"]: (call["start_s"], call["end_s"]) for call in line["calls"]}
        critic, reference = times["forward(critic)"], times["forward(reference)"]
        assert max(critic[0], reference[0]) < min(critic[1], reference[1]) - 0.2
        assert times["check"][0] >= max(critic[1], reference[1])
        assert line["critic/lr"] == line["lr"]
    for worker in (
        "trainer-0",
        "trainer-1",
        "trainer-critics-0",
        "trainer-critics-1",
        "trainer-references-0",
    ):
        assert (run.folder / "logs" / f"{worker}.jsonl").exists()
    assert sorted(path.name for path in (run.folder / "checkpoints" / "step-000003").iterdir()) == [
        *("kernel.json", "manifest.json", "mock.json", "models")
    ]


@pytest.mark.slow
def test_a_run_of_many_groups_is_resumed(start: Start, several: list[str]) -> None:
    run = start(*several, "steps=6", "checkpoint.every=2")
    run.until_step(3)
    os.kill(run.worker("trainer-critics-1").pid, signal.SIGKILL)
    assert run.process.wait(60) == 1
    assert "trainer-critics-1 was lost" in run.summary()["reason"]
    again = start(resume=run)
    again.assert_completed(6)
    assert [line["step"] for line in again.metrics()] == [1, 2, 3, 4, 5, 6]


def test_supervised_runs_start_trainers_only(start: Start) -> None:
    supervised = ["algorithm=sft", "algorithm.completion_column=answer", "training.calls_loss=true"]
    run = start(*supervised, "training.processes=2", "steps=40", "checkpoint.every=5")
    run.until_step(7)
    roles = {arguments[-1] for process in run.look() if "--id" in (arguments := process.cmdline())}
    assert roles == {"trainer-0", "trainer-1"}
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    run.assert_nothing_is_left(within_s=15)
    again = start(resume=run)
    summary = again.assert_completed(40, bound=0)
    assert summary["tokens"] == {"generated": 0, "trained": sum(line["tokens"] for line in again.metrics())}
    assert summary["tokens"]["trained"] >= 40 * 4
    assert "reward" not in again.metrics()[0]


def test_a_supervised_run_may_sample_for_its_evaluation(start: Start, tmp_path: Path) -> None:
    evaluated = f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}"
    run = start("algorithm=sft", "algorithm.completion_column=answer", evaluated, "evaluation.rows=10")
    summary = run.assert_completed(8, bound=0)
    assert [point["version"] for point in summary["evaluation"]] == [0, 8]


def test_rows_that_cannot_be_trained_on_are_refused_or_end_the_run(start: Start, tmp_path: Path) -> None:
    supervised = ["algorithm=sft", "algorithm.completion_column=solution"]
    run = start(*supervised)
    assert run.end() == 2
    assert (
        "the first row: column 'solution': is not there; the row's columns: answer, n, prompt" in run.text()
    )
    rows = [{"prompt": "1+1=", "solution": "2"}, {"prompt": "1+2="}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start(*supervised, out="later")
    assert run.end() == 1
    reason = run.summary()["reason"]
    assert "row 1 of the dataset: column 'solution'" in reason
    assert "correct the row, then resume the run" in reason
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "solution": "3"}) + "\n" for row in rows))
    start(resume=run).assert_completed(8, bound=0)


# ---------------------------------------------------------------------------- resumed with changes


def journal(run: Any) -> list[dict[str, Any]]:
    """What the journal of a run that has ended holds, in order: its server is started for it."""
    code = """
import asyncio, sys
from pathlib import Path
import msgspec
from stretto.bus.client import connect
from stretto.bus.messages import *
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.config import BusConfig
folder = Path(sys.argv[1])
async def main():
    lock = lock_run(folder)
    boot = Bootstrap.read(folder / "kernel.json")
    server = await NatsServer.start(folder, boot.run, BusConfig(), folder)
    names = Subjects(boot.run)
    async with connect(Bootstrap.read(folder / "kernel.json"), names.inbox("kernel")) as bus:
        last = await bus.last_sequence(names.journal_stream, names.journal)
        kinds = JournalBatch | JournalStep | JournalEvaluation | JournalChange
        async for sequence, entry in bus.follow(names.journal_stream, names.journal, kinds, start=1):
            whole = {"kind": type(entry).__name__, **msgspec.structs.asdict(entry)}
            print(msgspec.json.encode(whole).decode())
            if sequence >= last:
                break
    await server.stop()
    lock.close()
asyncio.run(main())
"""
    arguments = [sys.executable, "-c", code, str(run.folder / "bus")]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60).stdout
    return [json.loads(line) for line in lines.splitlines()]


def assert_each_ticket_trained_once(entries: list[dict[str, Any]]) -> None:
    """By the last batch that the journal has of each version."""
    batches = {entry["version"]: entry["tickets"] for entry in entries if entry["kind"] == "JournalBatch"}
    tickets = [ticket for batch in batches.values() for ticket in batch]
    assert len(tickets) == len(set(tickets))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_a_smaller_bound_and_batch(start: Start) -> None:
    run = start("checkpoint.every=3", "steps=30", "queue.max_staleness=4", "inference.sigma=1.2")
    run.until_step(8)
    run.process.kill()
    run.process.wait()
    changed = ("queue.max_staleness=1", "queue.batch_size=2", "steps=14", "algorithm.temperature=1")
    refused = start(*changed, resume=run)
    assert refused.end() == 2
    assert "unknown key 'temperature'" in refused.text()
    resumed = start(*changed[:-1], resume=run)
    assert resumed.end() == 0, resumed.text()
    summary = resumed.assert_balanced()
    assert (summary["status"], summary["version"], summary["ledger"]["in_flight"]) == ("completed", 14, 0)
    entries = journal(run)
    [change] = [entry for entry in entries if entry["kind"] == "JournalChange"]
    at = change["version"]
    assert at >= 8
    assert change["changed"] == {
        "queue.batch_size": ["4", "2"],
        "queue.max_staleness": ["4", "1"],
        "steps": ["30", "14"],
    }
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert all(line["staleness_max"] <= 1 for line in lines[at:])
    assert summary["ledger"]["trained"] == 4 * at + 2 * (14 - at)
    expired = sum(count for reason, count in summary["reasons"].items() if "does not fit" in reason)
    assert expired == summary["ledger"]["expired"] > 0
    assert_each_ticket_trained_once(entries)
    assert "batch_size: 2" in (run.folder / "config.yaml").read_text()
    assert "batch_size: 4" in (run.folder / "config-1.yaml").read_text()


def test_a_completed_run_is_extended_by_steps_and_what_refers_to_them(start: Start) -> None:
    run = start("steps=3", "name=run-${steps}", "queue.max_failures=${steps}")
    run.assert_completed(3)
    same = start("steps=3", resume=run)
    assert same.end() == 2
    assert "steps: is 3, and the run is complete: give it more" in same.text()
    start("steps=6", resume=run).assert_completed(6)
    config = (run.folder / "config.yaml").read_text()
    assert "steps: 6" in config
    assert "max_failures: 6" in config  # a reference follows
    assert "name: run-3" in config  # a text that only contains one is a value
    assert "max_failures: 3" in (run.folder / "config-1.yaml").read_text()


def test_what_makes_it_another_run_cannot_change_on_a_resume(
    start: Start, tiny_models: Callable[[str], Path], tmp_path: Path
) -> None:
    run = start("steps=3")
    run.assert_completed(3)
    config = (run.folder / "config.yaml").read_text()
    (tmp_path / "others.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "n": 1}\n')
    refused = start(
        *("seed=7", "dataset.shuffle=false", f"dataset.path={tmp_path}/others.jsonl", "steps=2"),
        *("algorithm.group_size=8", f"model={tiny_models('qwen2')}", f"out={tmp_path}/other"),
        resume=run,
    )
    assert refused.end() == 2
    text = refused.text()
    assert "override seed: cannot change from 1 to 7 in a resumed run: the order of the rows" in text
    assert "override dataset.shuffle: cannot change from True to False" in text
    assert "override dataset: has other rows (1, fingerprint" in text
    assert "override algorithm.group_size: cannot change from 4 to 8" in text
    assert "override model: cannot change from None to" in text
    assert "override out: cannot change" in text
    assert "override steps: is 2, and the run is at version 3 already" in text
    assert (run.folder / "config.yaml").read_text() == config
    other = start("algorithm=sft", "algorithm.completion_column=answer", resume=run)
    assert other.end() == 2
    assert "algorithm" in other.text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resume_with_changes_survives_a_kill_at_any_moment(start: Start) -> None:
    options = ("checkpoint.every=4", "checkpoint.keep=9", "steps=60", "training.seconds_per_step=0.2")
    run = start(*options)
    run.until_step(7)
    run.process.kill()
    run.process.wait()

    repeating = start("queue.batch_size=2", "queue.max_staleness=1", "steps=30", resume=run)
    repeating.until(lambda: "step repeated" in repeating.text())
    repeating.process.kill()
    repeating.process.wait()
    changed = run.text().count("values changed")
    changing = start(resume=run)  # what was decided holds
    changing.until(lambda: changing.text().count("values changed") > changed)
    changing.process.kill()
    changing.process.wait()
    [change] = [entry for entry in journal(run) if entry["kind"] == "JournalChange"]
    at = change["version"]

    training = start(resume=run)
    training.until_step(at + 5)
    training.process.kill()
    training.process.wait()
    for folder in (run.folder / "checkpoints").glob("step-*"):
        if folder.name >= f"step-{at:06d}":
            (folder / "mock.json").write_text('{"steps": 9999}')
    offset = len(run.text())
    last = start(resume=run)
    assert last.end() == 0, last.text()
    text = last.text()[offset:]
    assert (
        text.count("step repeated") >= 5
    )  # those before the change with the old values, those after with the new
    assert "repetition differs" not in text
    summary = last.assert_balanced()
    assert summary["version"] == 30
    assert summary["ledger"]["trained"] == 4 * at + 2 * (30 - at)
    entries = journal(run)
    assert len([entry for entry in entries if entry["kind"] == "JournalChange"]) == 1
    assert all(
        len(entry["tickets"]) == (4 if entry["version"] < at else 2)
        for entry in entries
        if entry["kind"] == "JournalBatch"
    )
    assert_each_ticket_trained_once(entries)
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(line["staleness_max"] <= 1 for line in lines[at:])
    last.assert_nothing_is_left(within_s=5)
