"""Whole runs of the mock engines through the command line: real processes and a real server."""

import json
import re
import stat
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import pytest
from nats.js.errors import NotFoundError

from fixture_types import Start
from plugin_files import write_plugin, write_reward
from processes import arguments_of
from stretto.bus.connection import open_once
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.records.run_folder import RunFolder
from terminals import Terminal
from worlds import in_both_worlds, in_simulation


def test_a_run_goes_through_all_its_processes_and_leaves_plain_files(start: Start, tmp_path: Path) -> None:
    run = start(
        "evaluation.every=3",
        f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}",
        "evaluation.rows=10",
        "checkpoint.every=4",
        "checkpoint.keep=1",
        "samples.keep=all",
    )
    run.until_step(1)
    names = ("trainer-0", "inference-0", "rollout-0", "verifier-0")
    assert all(run.worker(name) for name in names)
    running = [" ".join(arguments_of(process)) for process in run.look()]
    assert any("nats-server" in arguments and "-c" in arguments for arguments in running)
    summary = run.assert_completed(8)
    assert [point["version"] for point in summary["evaluation"]] == [0, 3, 6, 8]
    assert [point["samples"] for point in summary["evaluation"]] == [10, 10, 10, 10]
    assert summary["tokens"]["generated"] >= summary["tokens"]["trained"] > 0
    assert 0 < summary["overlap"] <= 1.05
    assert summary["restarts"] == 0
    assert summary["problems"] == []
    run.assert_audit_is_clean()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-000008"]
    for name in (*names, "kernel"):
        lines = (run.folder / "logs" / f"{name}.jsonl").read_text().splitlines()
        assert all(json.loads(line)["event"] for line in lines)
    assert (run.folder / "config.yaml").exists()
    for path in (run.folder, *run.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path  # nobody else can read it
    assert "step=8" in run.text()  # one line a step in a pipe


@in_both_worlds
def test_training_keeps_its_engine_while_evaluations_have_their_own(start: Start, tmp_path: Path) -> None:
    evaluation = (f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}", "evaluation.every=4")
    slow = "training.seconds_per_step=0.5"  # so that none holds training back
    run = start("steps=12", slow, *evaluation, "evaluation.own_engine=true")
    run.until_step(2)
    run.worker("inference-evaluation").kill()  # it starts again, and the evaluation waits for it
    summary = run.assert_completed(12)
    points = [(point["version"], point["samples"]) for point in summary["evaluation"]]
    assert points == [(0, 40), (4, 40), (8, 40), (12, 40)]
    assert summary["restarts"] == 1
    history = RunFolder(run.folder).history
    lent = [swap.figures for swap in history.swaps if swap.figures.exact]
    end = history.steps[-1].ended
    assert all(event.began > end for event in lent if event.worker == "inference-0")
    assert {event.version for event in lent if event.worker == "inference-evaluation"} >= {4, 8}
    run.assert_audit_is_clean()


@in_both_worlds
def test_synchronous_training_without_any_model_has_no_staleness(start: Start) -> None:
    run = start("model=null", "inference.vocab_size=200", "queue.max_staleness=0", "steps=4")
    summary = run.assert_completed(4, bound=0)
    assert summary["staleness"] == {"0": 4 * 4 * 4}
    assert summary["reasons"] == {}
    assert all(line["wait/publication_s"] > 0 for line in run.metrics())


@in_simulation
def test_late_groups_can_be_dropped_instead_of_waited_for(start: Start) -> None:
    run = start(
        *("queue.on_late=drop", "queue.max_staleness=1", "inference.sigma=1.5", "inference.slots=24"),
        *("inference.tokens_per_s=2000", "training.seconds_per_step=0.02"),
    )
    summary = run.assert_completed(8, bound=1)
    assert summary["ledger"]["expired"] == sum(
        count for reason, count in summary["reasons"].items() if reason.startswith("expired")
    )


@pytest.mark.slow
def test_trackers_follow_a_run(start: Start, tmp_path: Path) -> None:
    body = f"""
        def track(what):
            with open({str(tmp_path / "tracked")!r}, "a") as file:
                print(what, file=file)

        class make:
            def __init__(self, config, context): pass
            def start(self, config, resumed_at): track(f"start {{config['name']}}")
            def step(self, metrics): track(f"step {{metrics['step']}}")
            def evaluation(self, metrics): pass
            def advice(self, advice): pass
            def samples(self, rows): pass
            def finish(self, summary): track(f"end {{summary['status']}}")
    """
    follower = write_plugin(tmp_path, "tracker", body, "stretto.TrackerConfig")
    run = start(f"plugins=[{follower}]", "trackers=[mine]", "steps=2")
    assert run.assert_completed(2)["problems"] == []
    tracked = (tmp_path / "tracked").read_text().splitlines()
    assert tracked == ["start test", "step 1", "step 2", "end completed"]


@pytest.mark.slow
def test_a_repetition_that_differs_begins_a_new_incarnation(start: Start, tmp_path: Path) -> None:
    body = """
        import os
        from stretto_mock.training import MockTraining

        class make(MockTraining):
            noise = 0
            def load(self, folder):
                super().load(folder)
                self.noise = int((folder / "noise").read_text()) if folder else 0
            def save(self, folder, copy_bytes=0):
                super().save(folder)
                (folder / "noise").write_text(str(self.noise))
            def train(self, batch, loss, *, temperature):
                self.noise += os.getpid()  # no two processes train alike
                return super().train(batch, loss, temperature=temperature)
            def weights(self):
                import torch
                yield "noise", torch.tensor([self.noise])
    """
    drifting = write_plugin(tmp_path, "training", body, "stretto_mock.MockTrainingConfig")
    # Steps take much longer than answers, so that a checkpoint has finished groups beyond its batch.
    training = "training={use: mine, seconds_per_step: 0.4}"
    run = start(f"plugins=[{drifting}]", training, "checkpoint.every=3", "steps=14")
    run.until_step(8)
    run.kill("trainer-0")
    resumed = start(resume=run)
    summary = resumed.assert_completed(14)
    assert "repetition differs" in resumed.text()
    assert summary["ledger"]["expired"] > 0
    assert any("incarnation 0" in reason for reason in summary["reasons"])
    assert int(summary["checkpoints"][0][-6:]) % 3  # one of its own where the new incarnation begins


@pytest.mark.slow
def test_a_terminal_shows_the_run_while_it_goes(start: Start, tmp_path: Path) -> None:
    """And shows what a reward raises as plain text. A browser may look on."""
    del start  # it writes the run file
    body = """
        def score(prompt, completion, n=0):
            if n % 5 == 4: raise ValueError('no [/INST] \\x1b]0;x\\x07')
            return len(completion)
    """
    command = [
        *("run", "--ui", f"{tmp_path}/run.yaml", f"out={tmp_path}/tty", "steps=12"),
        *(*write_reward(tmp_path, body), "training.seconds_per_step=0.2"),
        *("queue.max_attempts=1", "queue.max_failures=1000"),
    ]
    in_browser = re.compile(r"in a browser: (http\S+)\r")
    with closing(Terminal(*command)) as terminal:
        terminal.until(lambda: in_browser.search(terminal.shown))
        url = in_browser.findall(terminal.shown)[0]
        assert urlopen(url).status == 200
        terminal.until(lambda: "completed at step 12" in terminal.shown)
        assert terminal.end() == 0
        text = terminal.shown
    with pytest.raises(URLError, match="refused"):
        urlopen(url)
    assert "failed: RewardError: reward raised ValueError: no [/INST] \\x1b]0;x\\x07 (" in text
    assert "\x1b]0;x" not in text
    words = "step 12/12, reward, staleness, tokens/s, tickets, workers, 4 ready, folder, s left, verdict"
    for word in (*words.split(", "), f"{tmp_path}/tty", "stopping the workers"):
        assert word in text, word
    last = text[text.rindex("step 12/12") :]
    assert not any(word in last for word in ("workers", "left", "now"))
    assert "completed at step 12" in last


async def deliver_again(folder: Path) -> int:
    bootstrap = Bootstrap.read(folder / "bus" / "kernel.json")
    user, password = bootstrap.store_user or bootstrap.user, bootstrap.store_password or bootstrap.password
    login = msgspec.structs.replace(bootstrap, user=user, password=password)
    client = await open_once(login, bootstrap.url, 10)
    stream, name, again = client.jetstream(), Subjects(bootstrap.run).tickets_stream, 0
    state = (await stream.stream_info(name)).state
    for sequence in range(state.first_seq, state.last_seq + 1):
        with suppress(NotFoundError):
            message = await stream.get_msg(name, sequence)
            await stream.publish(message.subject or "", message.data or b"")
            again += 1
    await client.close()
    return again


@in_simulation
def test_a_ticket_that_is_delivered_twice_is_worked_on_once(start: Start) -> None:
    """As a server does that was killed before it had stored who has what."""
    run = start("steps=8", "rollout.concurrency=64", "inference.tokens_per_s=800")
    run.until_step(2)
    assert run.call(deliver_again, run.folder) > 0
    summary = run.assert_completed(8)
    assert summary["restarts"] == 0
    assert summary["reasons"] == {}
    assert "KeyError" not in str(run.log("rollout-0"))
