"""`stretto replay`: the recorded steps of a run, trained again without generation."""

import hashlib
import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commands import output_of
from fixture_types import Start
from stretto.cli.audit.recording import groups_in_samples, read_recording
from stretto.cli.audit.replay import ReplayOptions, replay_run
from stretto.errors import ConfigError
from stretto.runs.life import owned
from stretto.runs.replay import rows_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "model"
REAL = (
    f"model={MODEL}",
    *("training=torch", "training.threads=1", "inference=torch", "inference.threads=1"),
    *("sampling.max_tokens=24", "queue.batch_size=4", "samples.keep=all"),
)


def replay(run: Path, *arguments: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """The comparison in `replay.json` of `stretto replay RUN`, and what the command printed."""
    out = run.with_name(f"{run.name}-replayed-{len(list(run.parent.iterdir()))}")
    text = output_of("replay", run, "--out", out, *arguments, status=status)
    file = out / "replay.json"
    return json.loads(file.read_bytes()) if file.exists() else {}, text


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def last_weights(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_an_asynchronous_quickstart_with_a_killed_engine_is_replayed_bit_for_bit(start: Start) -> None:
    run = start(
        *(f"model={MODEL}", f"dataset.path={QUICKSTART}/train.jsonl", "training={use: torch, lr: 3e-4}"),
        *("training.threads=1", "inference={use: torch, slots: 64, context_length: 96, threads: 1}"),
        *("inference.replicas=2", "queue.batch_size=32", "queue.max_staleness=4", "algorithm.group_size=8"),
        *("sampling.max_tokens=32", "checkpoint.every=4", "samples.keep=all", "steps=10"),
        f"evaluation={{dataset: {{use: jsonl, path: {QUICKSTART}/heldout.jsonl}}, rows: 64, every: 5}}",
    )
    run.until_step(4)
    run.until(lambda: run.worker("inference-1")).kill()
    assert run.end() == 0, run.text()
    assert run.summary()["restarts"] == 1
    assert max(int(each) for each in run.summary()["staleness"]) >= 1
    before = hashes(run.folder)

    report, text = replay(run.folder)
    assert (report["compared"], report["identical"], report["difference"]) == (10, 10, None)
    assert "identical: all 10 steps reached the recorded digests" in text
    [out] = run.folder.parent.glob("out-replayed-*")
    assert last_weights(out) == last_weights(run.folder)
    workers = {line["worker"] for line in events(out) if line["event"] == "worker ready"}
    assert workers == {"trainer-0"}  # nothing that could generate

    report, text = replay(run.folder, "--from", "8")
    assert (report["first"], report["last"], report["identical"]) == (9, 10, 2)

    report, text = replay(run.folder, "algorithm.use=gspo", "training.lr=1e-3")
    assert report["difference"]["step"] == 1
    assert report["overrides"] == ["algorithm.use=gspo", "training.lr=1e-3"]
    last = report["steps"][-1]
    assert last["replayed"]["kl"] > last["recorded"]["kl"] > 0
    assert 0 < last["replayed"]["ess"] < last["recorded"]["ess"] <= 1
    assert "off-policy error: KL(behaviour || replayed)" in text
    assert text.count("not known: ") == len(report["limits"]) == 3
    assert hashes(run.folder) == before


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / "kernel.jsonl").read_text().splitlines()]


@pytest.mark.cluster
def test_a_run_with_a_critic_changed_values_and_a_killed_kernel_is_replayed(start: Start) -> None:
    ppo = ("algorithm={use: ppo, minibatches: 2}", "models.critic.group=critics", "checkpoint.keep=9")
    run = start(*REAL, *ppo, "groups.critics={use: torch}", "checkpoint.every=2", "steps=20")
    run.until_step(5)
    run.kill()
    _, text = replay(run.folder, status=2)
    assert "a kernel that is killed has not written its last ones" in text
    report, _ = replay(run.folder, "--to", text.split("--to ")[1].strip())
    assert report["identical"] == report["compared"] >= 2
    assert start("training.lr=1e-3", "steps=10", resume=run).end() == 0, run.text()
    report, _ = replay(run.folder)
    assert report["identical"] == report["compared"] == report["last"] == 10
    report, text = replay(run.folder, "--to", "4", "seed=2")
    assert report["last"] == 4
    assert report["difference"] is not None, text  # another order of minibatches


@pytest.mark.cluster
def test_a_replay_has_the_number_of_trainers_that_each_step_had(start: Start) -> None:
    fsdp2 = ("training={use: fsdp2, shard: false}", "training.dtype=float32", "queue.batch_size=16")
    run = start(*REAL, *fsdp2, "steps=5000")
    run.until_step(3)
    assert "training: 1 -> 2" in output_of("scale", run.folder, "training=2")
    run.until(lambda: any(line.get("worker") == "trainer-1" for line in events(run.folder)))
    run.until_step(len(run.metrics()) + 5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    report, _ = replay(run.folder)
    assert report["identical"] == report["compared"] == len(run.metrics())
    [out] = run.folder.parent.glob("out-replayed-*")
    joined = Counter(line["worker"] for line in events(out) if line["event"] == "worker joined")
    assert joined == {"trainer-0": 2, "trainer-1": 1}


# --------------------------------------------------------------------- refusals, on the mock engines


@pytest.fixture(scope="module")
def finished(module_start: Start) -> Any:
    keep = ("samples.keep=all", "checkpoint.every=1", "checkpoint.keep=2")
    run = module_start("steps=4", *keep, out="finished")
    assert run.end() == 0, run.text()
    return run


def refusal(run: Path, *overrides: str, start: str | None = None, stop: int | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        replay_run(run, ReplayOptions(start, stop, run.with_name("never")), overrides)
    assert not run.with_name("never").exists()
    return str(refused.value)


@pytest.mark.slow
def test_a_replay_is_a_run_of_its_own_that_cannot_be_continued(finished: Any) -> None:
    report, text = replay(finished.folder, "inference.slots=3")
    assert (report["identical"], report["difference"]) == (4, None)
    assert "inference.slots changes nothing" in text
    [out] = finished.folder.parent.glob("finished-replayed-*")
    summary = json.loads((out / "summary.json").read_bytes())
    assert (summary["status"], summary["ledger"]["trained"], summary["version"]) == ("completed", 16, 4)
    assert "is a replay itself" in refusal(out)
    with pytest.raises(ConfigError, match="is a replay, and generates nothing"), owned(out):
        pass


@pytest.mark.cluster
def test_a_run_that_has_kept_too_little_says_what_is_missing(start: Start) -> None:
    run = start("steps=3", "samples.keep=none", "checkpoint.every=1")
    assert run.end() == 0, run.text()
    _, text = replay(run.folder, status=2)
    assert "has not kept the trajectories of 3 of the steps, the first of them step 1" in text
    assert "(samples.keep: none); a run that is to be replayed from its beginning needs" in text
    assert "--" not in text, "nothing is kept"


@pytest.mark.slow
def test_what_does_not_fit_the_recording_is_refused(finished: Any) -> None:
    run = finished.folder
    assert "--from 1: no checkpoint 'step-000001'" in refusal(run, start="1")
    assert "the run has no step after version 4" in refusal(run, start="4")
    assert "--to 9: expected a step from 1 to 4" in refusal(run, stop=9)
    assert "the run has trained on samples; this algorithm does not" in refusal(run, "algorithm=sft")
    text = refusal(run, "algorithm=ppo", start="3")
    assert "checkpoint step-000003 has no model 'critic'" in text
    assert "training.lr" in refusal(run, "training.lr=fast")


@pytest.mark.slow
def test_a_sample_that_differs_from_its_digest_is_not_trained(finished: Any, tmp_path: Path) -> None:
    from pyarrow import parquet as pq

    folder = tmp_path / "doctored"
    shutil.copytree(finished.folder, folder)
    rows = rows_of(read_recording(folder).batches.values())
    intact = {(group.ticket, group.attempt) for group in groups_in_samples(folder, rows)}
    assert intact == rows.keys()
    [*_, segment] = sorted((folder / "samples").glob("train-*.parquet"))
    table = pq.read_table(segment)
    changed = table.set_column(table.schema.get_field_index("reward"), "reward", [[0.25] * len(table)])
    pq.write_table(changed, segment)
    kept = {(group.ticket, group.attempt) for group in groups_in_samples(folder, rows)}
    doctored = {(row["ticket"], row["attempt"]) for row in table.to_pylist()}
    assert kept == rows.keys() - doctored
