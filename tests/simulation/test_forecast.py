"""Forecasts of the speed of a run: cores that processes share, and service times that are fitted."""

import asyncio
import itertools
import json
import random
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import stretto_plan
from kept_samples import Kept
from kernel_events import issued, write_events
from stretto.bus.messages.events import Evaluation, EvaluationEnded, GroupFigures, OutcomeRead
from stretto.cli.main import app
from stretto.errors import ConfigError, RunError
from stretto.records.run_folder import RunFolder
from stretto.simulation import ServiceTimes, composed, forecast
from stretto.simulation.host import INTERFERENCE, Host
from stretto.simulation.loop import SimulatedLoop
from stretto_plan import plan
from stretto_plan.fitting import fit, shortened
from stretto_plan.measuring import Measured, _steps_at  # pyright: ignore[reportPrivateUsage]
from stretto_plan.recorded import times_of

ROLES = ("kernel", "rollout", "verifier", "inference", "trainer")
TORCH, ONE_THREAD = {"use": "torch", "replicas": 1}, {"use": "torch", "threads": 1}
CHEAP = ServiceTimes(callback_s=dict.fromkeys(ROLES, 1e-6), message_s=1e-6)


def run_file(**sections: Any) -> dict[str, Any]:
    return {
        "name": "forecast",
        "algorithm": {"use": "grpo", "group_size": 4},
        "training": {"use": "mock", "seconds_per_step": 0.2},
        "inference": {"use": "mock", "slots": 64, "tokens_per_s": 20_000, "mean_tokens": 20},
        "reward": "exact",
        "queue": {"batch_size": 8, "max_staleness": 2},
        "checkpoint": {"every": 0},
        "steps": 15,
        **sections,
    }


def write_run(file: Path, **sections: Any) -> Path:
    """Write a run file with its data, and times beside it; return the times."""
    rows, times = file.with_name("rows.jsonl"), file.with_name("times.json")
    rows.write_text("".join(f'{{"prompt": "{row}+1=", "answer": "{row + 1}"}}\n' for row in range(64)))
    file.write_bytes(msgspec.json.encode(run_file(dataset={"use": "jsonl", "path": str(rows)}, **sections)))
    times.write_bytes(msgspec.json.encode(CHEAP))
    return times


# ---------------------------------------------------------------------------------------- the host


@pytest.mark.parametrize(
    ("cores", "jobs", "threads", "seconds", "factor"),
    [
        (2, 1, 1, 1, 1),
        (1, 2, 1, 2, 1),
        (2, 2, 1, 1, 1 + INTERFERENCE),
        (2, 4, 1, 2, 1 + INTERFERENCE),
        (2, 1, 2, 0.5, 1 + INTERFERENCE),
        (3, 2, 1, 1, 1 + INTERFERENCE / 2),
    ],
)
def test_computations_share_cores(cores: int, jobs: int, threads: int, seconds: float, factor: float) -> None:
    """They take `factor` times as much processor time, because cores that are in use interfere."""
    loop = SimulatedLoop(1)
    host = Host(loop, cores, {}, 0.0, sleep_is_work=True)

    async def compute() -> float:
        began = loop.time()
        await asyncio.gather(*(host.computed(1.0, "trainer", threads) for _ in range(jobs)))
        return loop.time() - began

    taken_s = loop.run_until_complete(compute())
    loop.close()
    assert taken_s == pytest.approx(seconds * factor, rel=0.02)
    assert host.used["trainer"] == pytest.approx(jobs * factor, rel=0.02)
    assert host.undisturbed_s["trainer"] == pytest.approx(jobs)


# ----------------------------------------------------------------------------------------- forecasts


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command simulates two thirds of the steps: enough to see which value is faster. With fewer, the
    end of the run counts, after which engines get no weights."""
    monkeypatch.setattr("stretto_plan.fitting.STEPS", 16)


def test_a_run_that_waits_for_training_takes_the_time_of_training() -> None:
    seen = forecast(run_file(), CHEAP, cores=2, computes=False)
    assert seen.step_s == pytest.approx(0.2, rel=0.05)
    assert seen.train_share > 0.95
    assert seen.mean_staleness == pytest.approx(2, abs=0.1)


def test_engines_that_compute_take_the_measured_time() -> None:
    """A step has 32 samples of 20 tokens. If 64 are decoded at once, 20 decode steps of 2 ms are for more
    than one of them; each token adds 0.1 ms."""
    times = msgspec.structs.replace(CHEAP, step_s=0.002, sample_s=0.0001, lengths=(20,), train_s=0.001)
    given = run_file(inference={**TORCH, "slots": 64}, training=ONE_THREAD)
    seen = forecast(given, times, cores=2, computes=True)
    assert seen.sampled_tokens == 640
    assert seen.engine_busy > 0.7
    assert 0.064 < seen.step_s < 0.064 + 20 * 0.002 + 0.03


@pytest.mark.parametrize("costs", [{"fetch_s": 0.3}, {"score_s": 0.3}])
def test_a_synchronous_run_waits_for_versions_and_scores(costs: dict[str, float]) -> None:
    """8 groups are scored by one process, one after the other; a version is fetched once."""
    given = run_file(
        queue={"batch_size": 8, "max_staleness": 0},
        inference={**TORCH, "slots": 64},
        training=ONE_THREAD,
        verifier={"children": 1},
    )
    times = msgspec.structs.replace(CHEAP, step_s=0.002, lengths=(20,), train_s=0.1)
    cheap = forecast(given, times, cores=2, computes=False)
    seen = forecast(given, msgspec.structs.replace(times, **costs), cores=2, computes=False)
    expected_s = 0.3 if "fetch_s" in costs else 8 * 0.3
    assert seen.step_s - cheap.step_s == pytest.approx(expected_s, rel=0.3)


def test_processes_that_cost_more_make_a_run_slower() -> None:
    costly = ServiceTimes(callback_s=dict.fromkeys(ROLES, 2e-3), message_s=2e-3)
    slow = forecast(run_file(), costly, cores=2, computes=False)
    assert slow.step_s > 0.3
    assert sum(slow.cores.values()) > 1


@pytest.mark.slow
def test_the_fitted_times_give_back_what_was_measured() -> None:
    truth = ServiceTimes(
        callback_s=dict.fromkeys(ROLES, 4e-5),
        message_s=8e-5,
        step_s=0.001,
        sample_s=5e-5,
        train_s=0.02,
        token_s=1e-5,
        lengths=(8, 12, 16),
    )

    def measured(slots: int, batch: int, staleness: int) -> Measured:
        queue = {"batch_size": batch, "max_staleness": staleness}
        given = run_file(inference={**TORCH, "slots": slots}, training=ONE_THREAD, queue=queue)
        seen = forecast({**given, "steps": 24}, truth, cores=2, computes=True)
        used = {role: number * 4e-5 for role, number in seen.callbacks.items()}
        used["nats-server"] = seen.callbacks["nats-server"] * 8e-5
        train_s = (0.02 + 1e-5 * batch * 4 * 16) * seen.interference["trainer"]
        used["inference"] += seen.engine_s
        used["trainer"] += train_s
        return Measured(
            run=given,
            step_s=seen.step_s,
            staleness=seen.mean_staleness,
            processor_s=used,
            sampled_tokens=seen.sampled_tokens,
            generate_s=seen.engine_s,
            train_s=train_s,
            lengths=truth.lengths,
            tokens_per_sampled=16 / 12,
        )

    found = fit(measured(32, 16, 2), measured(8, 8, 0), 2)
    assert found.train_s == pytest.approx(truth.train_s, rel=0.1)
    assert found.token_s == pytest.approx(truth.token_s, rel=0.1)
    assert found.step_s == pytest.approx(truth.step_s, rel=0.3)
    assert found.sample_s == pytest.approx(truth.sample_s, rel=0.3)
    assert found.callback_s["rollout"] == pytest.approx(4e-5, rel=0.1)


# --------------------------------------------------------------------------------------- the command


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_the_command_recommends_what_makes_a_run_faster(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    # A rollout worker with one ticket at a time leaves most slots empty.
    times = write_run(file, rollout={"concurrency": 1})
    result = CliRunner().invoke(app, ["plan", str(file), "--times", str(times)])
    assert result.exit_code == 0, result.output
    assert "recommended: " in result.output
    assert "rollout.concurrency=2" in result.output.rpartition("recommended: ")[2]
    assert "queue.max_staleness=0" in result.output
    more = "rollout.concurrency=2"
    only = CliRunner().invoke(app, ["plan", str(file), more, "--times", str(times), "--only", "--cores", "4"])
    assert "On 4 cores" in only.output
    assert "recommended" not in only.output
    without, with_it = only.output.splitlines()[1:3]
    assert (without.split()[2], without.split()[-1]) == ("1.00", "file")
    assert with_it.endswith(f"the run file with {more}")
    assert float(with_it.split()[2]) > 1.1


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(("measured", "is_said"), [(0.9, False), (0.5, True), (2.0, True)])
def test_a_measurement_that_disagrees_with_its_forecast_is_named(
    measured: float, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(file := tmp_path / "run.yaml")
    step_s = forecast(shortened(composed(file)), CHEAP, cores=2, computes=False).step_s

    def known(*given: object) -> tuple[ServiceTimes, float]:
        return CHEAP, measured * step_s

    monkeypatch.setattr(stretto_plan, "_measure_times", known)
    said = CliRunner().invoke(app, ["plan", str(file), "--only", "--cores", "2"]).output
    assert ("from what was measured" in said) is is_said


@pytest.mark.parametrize(("pace", "steps"), [(0.0, 60), (0.1, 60), (1.0, 15), (2.0, 12), (6.0, 6)])
def test_the_number_of_measured_steps_follows_from_their_time(pace: float, steps: int) -> None:
    assert _steps_at(pace) == steps


def test_a_run_is_compared_with_its_forecast(tmp_path: Path) -> None:
    """A step takes 0.5 s there, without 0.25 s of waits for checkpoints, and 1.2 processor seconds."""
    run = tmp_path / "run"
    run.mkdir()
    times = write_run(run / "config.yaml")
    figures = {"step_s": 0.75, "wait/checkpoint_s": 0.25, "train_s": 0.2, "generate_busy_s": 0.4}
    figures |= {"tokens": 100, "staleness": 1.5, "cores/kernel": 0.5, "cores/trainer": 0.3}
    lines = [{"step": step, "time": float(step), **figures} for step in range(1, 31)]
    lines[-1]["step_s"] = 99.0  # no ticket is issued for the last steps
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(
        app, ["plan", str(run), "--times", str(times), "--only", "--compare", "--cores", "2"]
    )
    assert result.exit_code == 0, result.output
    forecast, itself = (line.split() for line in result.output.splitlines()[1:3])
    assert itself == ["0.500", "200", "1.50", "80%", "40%", "2.40", "the", "run", "itself"]
    assert f"{float(forecast[0]) / 0.5 - 1:+.0%} from what the run took" in result.output
    error = float(forecast[0]) * float(forecast[6]) / 1.2 - 1
    shown = re.search(r"and ([+-]\d+)% of its processor seconds", result.output)
    assert shown is not None
    assert int(shown[1]) == pytest.approx(100 * error, abs=2)
    (run / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(RunError, match=r"has 1 steps .*, and 1 of them .* expected at least 12"):
        plan(run, times=times, only=True, compare=True)
    with pytest.raises(ConfigError, match=r"--compare: .* is a file; expected the folder of a run"):
        plan(run / "config.yaml", compare=True)


# ----------------------------------------------------------------------------------------- records

OF_GPUS = """\
from stretto import Component, hookimpl
from stretto_mock import MockInferenceConfig as Inference, MockTrainingConfig as Training

@hookimpl
def stretto_training():
    yield Component("large", "stretto_mock.training:MockTraining", Training, "", needs_model=False)

@hookimpl
def stretto_inference():
    yield Component("large", "stretto_mock.inference:MockInference", Inference, "", needs_model=False)
"""


SHARES = dict(zip((*ROLES, "nats-server", "other"), (0.1, 0.2, 0.05, 0.3, 0.1, 0.03, 0.02), strict=True))


def record(
    folder: Path, *, gpus: int, steps: int = 63, evaluation: tuple[float, float] | None = None
) -> Path:
    """Make the folder of a run. A step of its two engines and two trainers takes 1 s of the clock: 0.5 s of
    work for each engine, and 0.05 s of training and half a millisecond for each of 100 sampled tokens, more
    or less. Each has one token of a prompt beside it. No event says how many samples the engines decoded."""
    (folder / "engines.py").write_text(OF_GPUS)
    run = folder / "run"
    run.mkdir(parents=True)
    write_run(
        run / "config.yaml",
        plugins=[str(folder / "engines.py")],
        training={"use": "large", "gpus": gpus, "processes": 2},
        inference={"use": "large", "gpus": gpus, "replicas": 2, "slots": 20},
        rollout={"concurrency": {"min": 8, "max": 64}},
    )
    same = {"step_s": 1.0, "generate_busy_s": 0.5, "swap_pause_s": 0.05}
    same |= {"staleness": 1.0, "verify_busy_s": 0.2, "publish_s": 0.3, "receive_s": 0.1}
    same |= {f"cores/{role}": share for role, share in SHARES.items()}
    lines = [
        {"step": step, "time": 100.0 + step, "tokens": tokens, "train_s": 0.05 + tokens / 2000, **same}
        for step, tokens in zip(range(1, steps + 1), itertools.cycle((90, 100, 110)), strict=False)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluation is not None:
        began, ended = evaluation
        ticket, result = issued(0, purpose="eval", version=1), EvaluationEnded(Evaluation(1, 0.5, 8, 0))
        write_events(run, [(began, ticket), (ended, result)])
    kept = Kept(run)
    kept.trained_group(1)
    kept.flush()
    return run


def test_service_times_are_read_from_the_records_of_a_run(tmp_path: Path) -> None:
    """An engine works 1 s for 100 tokens, 20 at a time: a step without samples is as long as 20 of them."""
    folder = record(tmp_path, gpus=1)
    times = times_of(RunFolder(folder), composed(folder / "config.yaml"), 2)
    assert times.sample_s == pytest.approx(1 / 100 / 2, rel=0.01)
    assert times.step_s == pytest.approx(20 / 100 / 2, rel=0.01)
    assert not times.knows_slots
    assert times.knows_tokens
    assert times.train_s == pytest.approx(0.05)
    assert times.token_s == pytest.approx(2 * 0.0005 / 2), "two processes, two tokens for each sampled one"
    assert times.swap_s == pytest.approx(0.05)
    assert times.fetch_s == pytest.approx(0.3 + 0.1)
    assert times.score_s == pytest.approx(0.2 / 8), "a batch has 8 groups"
    assert times.lengths == (2, 2)


def write_groups(run: Path, step_s: float, sample_s: float, slots: int, at_once: int, waves: int = 8) -> None:
    """Write the groups of one engine that decodes as `ServiceTimes` say: in each wave groups of 2 samples
    arrive together, `at_once` or half as many, and a group's request ends with its longest answer."""
    rng, now, ticket = random.Random(1), 1000.0, 2
    events: list[tuple[float, Any]] = []
    kept = Kept(run)
    kept.sequence = 1000  # behind those of `record`
    for wave in range(waves):
        lengths = [(rng.randint(5, 60), rng.randint(5, 60)) for _ in range(at_once // (1 + wave % 2))]
        left = dict(enumerate(itertools.chain(*lengths)))
        began, at = now, [now] * len(left)
        while left:
            running = list(left)[:slots]
            now += step_s + sample_s * len(running)
            for sample in running:
                left[sample] -= 1
                if not left[sample]:
                    at[sample] = now
                    del left[sample]
        for group, answers in enumerate(lengths):
            ended = max(at[2 * group : 2 * group + 2])
            figures = GroupFigures(
                *("train", ticket, 1, "rollout-0", ended - began, ended - began, 0.0, 2, 0.5, sum(answers), 0)
            )
            events += [(began, issued(ticket)), (ended, OutcomeRead(1, figures))]
            kept.trained_group(ticket, lengths=answers)
            ticket += 1
    kept.flush()
    write_events(run, sorted(events, key=itemgetter(0)))


@pytest.mark.parametrize(
    ("step_s", "sample_s", "slots", "at_once"),
    [(0.01, 1e-5, 200, 40), (0.01, 2e-4, 200, 40), (0.001, 2e-4, 200, 40), (0.01, 2e-4, 40, 80)],
)
def test_groups_show_what_the_samples_of_a_decode_step_cost(
    tmp_path: Path, step_s: float, sample_s: float, slots: int, at_once: int
) -> None:
    """The two engines of the run share the groups. In the last case half of the waves wait for slots."""
    folder = record(tmp_path, gpus=1)
    run = composed(folder / "config.yaml", [f"inference.slots={slots}"])
    write_groups(folder, step_s, sample_s, slots=2 * slots, at_once=at_once)
    times = times_of(RunFolder(folder), run, 2)
    assert times.knows_slots
    decoding = times.step_s / (1 / 100 - times.sample_s)
    ratio = sample_s * 2 * decoding / step_s  # of the samples' part to the rest
    assert times.sample_s * 100 == pytest.approx(ratio / (1 + ratio), abs=0.12)


def test_groups_that_waited_for_slots_do_not_show_it(tmp_path: Path) -> None:
    folder = record(tmp_path, gpus=1)
    write_groups(folder, 0.01, 2e-4, slots=40, at_once=60)
    times = times_of(RunFolder(folder), composed(folder / "config.yaml"), 2)
    assert not times.knows_slots
    assert times.sample_s * 100 == pytest.approx(0.5, abs=0.03), "nearly all slots are taken"


@pytest.mark.usefixtures("few_steps")
def test_a_forecast_uses_the_processor_time_of_each_role(tmp_path: Path) -> None:
    """The run used 0.8 of 4 cores, in steps of one second."""
    folder = record(tmp_path, gpus=0)
    run = composed(folder / "config.yaml")
    times = times_of(RunFolder(folder), run, 4)
    seen = forecast(shortened(run), times, cores=4, computes=True)
    used = SHARES | {"nats-server": SHARES["nats-server"] + SHARES["other"]}
    for role in (*ROLES, "nats-server"):
        assert seen.cores[role] * seen.step_s == pytest.approx(4 * used[role], rel=0.1), role
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines.replace("cores/", "old/"))
    with pytest.raises(RunError, match=r"lack `cores/kernel` .*; expected a run of this version"):
        times_of(RunFolder(folder), run, 4)


def test_steps_with_evaluations_tell_nothing_of_training(tmp_path: Path) -> None:
    folder = record(tmp_path, gpus=1, evaluation=(110.0, 155.5))
    with pytest.raises(RunError, match="and 5 of them after the first third and without an evaluation"):
        times_of(RunFolder(folder), composed(folder / "config.yaml"), 2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_gpus_are_split_between_training_and_inference(tmp_path: Path) -> None:
    """Generation takes longer than training, so three GPUs for training are too many."""
    folder = record(tmp_path, gpus=1)
    split = ["training.processes=3", "inference.replicas=1"]
    result = CliRunner().invoke(app, ["plan", str(folder), *split, "--gpus", "4"])
    assert result.exit_code == 0, result.output
    assert "training.processes=2 inference.replicas=2" in result.output
    assert "inference.slots" not in result.output, "this record does not tell what they cost"
    assert "guessed: a decode step" in result.output
    assert "guessed: a train step" not in result.output, "its batches had different numbers of tokens"
    recommended = result.output.partition("recommended: training.processes=")[2]
    assert recommended.startswith(("1 inference.replicas=3: 1.", "2 inference.replicas=2: 1."))
    assert "not checked: " in result.output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inference.gpus=2", "inference.gpus is 1 in the run, and 2 here"),
        ("inference.gpus=0", "a process of training 1 GPUs and one of inference 0"),
    ],
)
def test_records_of_other_engines_are_refused(tmp_path: Path, override: str, message: str) -> None:
    folder = record(tmp_path, gpus=1)
    with pytest.raises(ConfigError, match=message):
        plan(folder, [override], gpus=4)


@pytest.mark.parametrize(
    "override", ["inference.use=sglang", "inference.gpus=1", "algorithm.use=sft", "launcher.use=slurm"]
)
def test_what_has_no_forecast_is_refused(override: str) -> None:
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart" / "run.yaml"
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}: a forecast"):
        plan(quickstart, [override])
