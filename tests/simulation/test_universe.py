"""Universes repeat themselves, show planted faults, and run from the command line."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import called
from stretto.component import Context
from stretto.errors import ConfigError, RunError
from stretto.simulation import Fault, Outcome, Tape, describe, run_tape, search, shrink, tapes_of
from stretto.simulation.oracles import PLANTED
from stretto_mock import MockInferenceConfig
from stretto_mock.inference import MockInference
from stretto_mock.training import MockTraining
from universes import small

RUN = """\
name: tiny
steps: 3
algorithm: {use: grpo, group_size: 2}
training: {use: fsdp2, lr: 1.0e-5}
inference: {use: vllm, slots: 8}
sampling: {max_tokens: 16}
reward: exact
dataset: {use: jsonl, path: rows.jsonl}
queue: {batch_size: 2}
"""
FAILING_REWARD = """\
count = 0
def score(prompt, completion):
    global count
    count += 1
    if count % 30 >= 10:  # for all answers of some groups
        raise ValueError("no answer to " + prompt)
    return 1.0
"""
RANDOM_REWARD = """\
import datetime, os, random, secrets, time, uuid
import numpy as np
from random import Random, SystemRandom
def score(prompt, completion):
    drawn = [
        os.urandom(4), uuid.uuid4(), uuid.uuid1(), secrets.choice(range(99)), secrets.token_hex(4),
        Random().random(), SystemRandom().random(), random.random(), np.random.default_rng().random(),
        np.random.rand(), np.random.RandomState().rand(), datetime.datetime.now(), datetime.date.today(),
        datetime.datetime.now(datetime.UTC), time.time_ns(), time.monotonic_ns(), time.perf_counter_ns(),
        time.gmtime(), time.localtime(),
    ]
    assert isinstance(datetime.datetime(2026, 1, 1), datetime.datetime)
    return Random(repr(drawn)).random()
"""
SPAWNING_REWARD = """\
import os
def score(prompt, completion): os.system("true")
"""
DIGEST = """\
import sys
import msgspec
from stretto.simulation import Tape, run_tape
print(run_tape(msgspec.json.decode(sys.stdin.read(), type=Tape)).digest)
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def reward_of(run_file: Path, text: str) -> str:
    (run_file.parent / "rewards.py").write_text(text)
    return "reward={use: function, function: rewards.py:score}"


def simulate(folder: Path, *arguments: str, status: int = 0) -> str:
    done = called("simulate", *arguments, cwd=folder)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def few_steps(tape: Tape) -> Tape:
    return msgspec.structs.replace(tape, run={**tape.run, "steps": 2})


def completed(tape: Tape, *faults: Fault, **changed: Any) -> Outcome:
    tape = msgspec.structs.replace(tape, faults=faults, run=tape.run | changed)
    outcome = run_tape(tape)
    assert not outcome.failed, "\n".join(describe(tape, outcome))
    return outcome


def digest_of_another_process(tape: Tape) -> str:
    command = [sys.executable, "-c", DIGEST]
    env = os.environ | {"PYTHONHASHSEED": "1"}
    output = subprocess.check_output(command, env=env, input=msgspec.json.encode(tape))
    return output.decode().strip()


def test_a_universe_is_the_same_in_each_process() -> None:
    tape = few_steps(small(3))
    [(_, warm)] = search([tape])

    assert warm.messages > 100
    assert digest_of_another_process(tape) == warm.digest


def test_a_search_continues_with_the_universes_that_its_record_does_not_name(tmp_path: Path) -> None:
    tapes, record = [few_steps(small(seed, 1)) for seed in (1, 2)], tmp_path / "record"

    assert [tape.seed for tape, _ in search(tapes[:1], record=record)] == [1]
    assert [tape.seed for tape, _ in search(tapes, record=record)] == [2]
    other = few_steps(small(1, 2))  # the same seed, but not the same universe
    assert [tape.seed for tape, _ in search([*tapes, other], record=record)] == [1]


def test_each_step_renews_the_limit_of_a_universe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allow(seconds: float) -> None:
        with (tmp_path / "limits").open("a") as file:  # a universe is a process of its own
            file.write(f"{seconds}\n")

    monkeypatch.setattr(import_module("stretto.simulation.search"), "allow", allow)
    tape = msgspec.structs.replace(few_steps(small(0, faults=0)), limit_s=77.0)
    assert run_tape(tape).steps == 2
    limits = (tmp_path / "limits").read_text().split()
    assert limits[0] == "60.0"
    assert limits.count("77.0") > 4  # a batch and a version for each step


FAULTS = [
    *(Fault(kind=kind, at=2.0, who="inference", seconds=3.0) for kind in ("cut", "stop", "kill")),
    *(Fault(kind=kind, at=2.0, seconds=3.0) for kind in ("slow", "full store", "outage", "hang")),
    *(
        Fault(kind=kind, at=2.0, share=0.2, seconds=3.0)
        for kind in ("late", "lose", "double", "busy store", "late ack")
    ),
    Fault(kind="fail", at=2.0, share=0.2),
    Fault(kind="scale", at=2.0, who="training", pick=0.5),
]


@pytest.mark.slow
def test_a_fault_of_each_kind_changes_what_happens_and_no_result() -> None:
    calm = small(0, faults=0)
    with_faults = (msgspec.structs.replace(calm, faults=(fault,)) for fault in FAULTS)

    [(_, undisturbed), *found] = search([calm, *with_faults])

    for tape, outcome in found:
        assert not outcome.failed, "\n".join(describe(tape, outcome))
        assert outcome.digest != undisturbed.digest, tape.faults


@pytest.mark.parametrize(("processes", "seconds"), [(1, 0.05), (1, 0.7), (1, 1.1), (2, 0.9)])
def test_a_trainer_that_is_lost_in_a_takeover_is_replaced(processes: int, seconds: float) -> None:
    """While it joins again, loads, and repeats a step."""
    tape = small(6, 0)
    faults = [Fault(kind="kill", at=3.3, who="trainer")] if seconds > 0.5 else []
    faults += [Fault(kind="takeover", at=3.3, who="trainer", pick=0.9, seconds=seconds)]
    training = {**tape.run["training"], "processes": processes}
    assert completed(tape, *faults, training=training, steps=6).kernels == 2


def test_a_signal_to_all_processes_saves_without_a_repetition() -> None:
    """As a cluster that wants its machines back sends it. The run is continued."""
    roles = ("trainer", "inference", "rollout", "verifier", "kernel")
    outcome = completed(small(6, 0), *(Fault(kind="term", at=3.3, who=role) for role in roles))
    assert outcome.kernels == 2
    assert not any("lost=trainer" in line for line in outcome.log)


@pytest.mark.slow
def test_a_replaced_kernel_that_wakes_up_while_the_next_one_starts_changes_nothing() -> None:
    for seconds in (1.0, 1.1, 1.25, 1.5, 1.9, 2.3):
        completed(small(5, 0), Fault(kind="rival", at=2.3, who="kernel", seconds=seconds))


def test_workers_go_on_under_the_next_kernel(run_file: Path) -> None:
    seeds = [7, 10, 13]  # there the next kernel comes in time
    for tape in tapes_of(run_file, seeds, overrides=["queue.max_staleness=0", "steps=6"]):
        outcome = completed(tape, Fault(kind="kill", at=2.3, who="kernel"))
        assert outcome.kernels == 2
        lines = "\n".join(outcome.log)
        assert lines.count("joined the next kernel") == lines.count("worker joined") // 2 > 3
        assert "repeated=0" in lines or "repeated=1" in lines


def test_a_run_without_staleness_ends_with_one_model(run_file: Path) -> None:
    tapes = tapes_of(run_file, range(9), overrides=["queue.max_staleness=0"])
    tape = next(tape for tape in tapes if not any(fault.changes_model for fault in tape.faults))
    assert run_tape(tape).violations == []
    violations = run_tape(msgspec.structs.replace(tape, model="another")).violations
    assert violations == [f"the last version is {tape.model}, and without faults another"]


def test_a_reward_that_draws_what_it_likes_repeats_itself(run_file: Path) -> None:
    [tape] = tapes_of(run_file, [0], overrides=[reward_of(run_file, RANDOM_REWARD)], num_faults=0)

    [(_, warm)] = search([tape])

    assert warm.status == "completed"
    assert run_tape(tape).digest == run_tape(tape).digest == warm.digest
    assert run_tape(msgspec.structs.replace(tape, seed=1)).digest != warm.digest


def test_a_reward_that_leaves_the_simulation_is_refused(run_file: Path) -> None:
    with pytest.raises(RunError, match="processes are not there in the simulation"):
        tapes_of(run_file, [0], overrides=[reward_of(run_file, SPAWNING_REWARD)])


def test_a_model_that_no_hub_answers_for_is_one_error(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    with pytest.raises(ConfigError, match=r"'org/none' not verified: .* the hub cannot be reached") as error:
        tapes_of(run_file, [0], overrides=["model=org/none"])
    assert error.value.path == "model"


def test_tickets_fail_only_for_a_cause(run_file: Path) -> None:
    overrides = [reward_of(run_file, FAILING_REWARD), "queue.max_attempts=1", "queue.max_failures=1000"]
    [tape] = tapes_of(run_file, [0], overrides=overrides, kinds=["fail"])  # rows may fail: they do in calm

    assert not run_tape(tape).failed
    [violation] = run_tape(msgspec.structs.replace(tape, may_fail=False)).violations
    assert "tickets have failed without a cause" in violation
    assert "no answer to 1+1=" in violation
    assert PLANTED not in violation


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(kind="kill", at=0.0, point="before a checkpoint is renamed", who="kernel"), "killed"),
        (Fault(kind="tear", at=3.0, who="kernel"), "killed"),
        (Fault(kind="full disk", at=3.0, seconds=5.0), "No space left on device"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_run_continues_after_a_fault_of_a_file(fault: Fault, reason: str) -> None:
    outcome = completed(small(0, faults=0), fault, checkpoint={"every": 3})
    [resumed] = [line for line in outcome.log if " RESUME " in line]
    assert reason in resumed


def test_a_planted_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a worker that ended is never started again."""

    async def never(*args: object) -> None:
        raise RuntimeError("planted")

    calm = small(0, faults=0)
    noise = Fault(kind="clock", at=1.0, seconds=3.0)
    cause = Fault(kind="kill", at=2.0, who="rollout")
    tape = msgspec.structs.replace(calm, faults=(noise, cause, noise))
    assert not run_tape(tape).failed
    monkeypatch.setattr("stretto.kernel.fleet.fleet.Fleet._restart", never)

    fewest, outcome = shrink(tape)

    assert fewest.faults == (cause,)
    assert "planted" in "\n".join(describe(fewest, outcome))


def test_a_run_file_runs_with_simulated_parts(run_file: Path) -> None:
    output = simulate(run_file.parent, str(run_file), "--seeds", "1", "--number", "4")

    assert output.startswith("1 universes, 4 faults, ")
    assert "no failure" in output


def test_a_tape_is_replayed(tmp_path: Path) -> None:
    tape = few_steps(small(5))
    file = tmp_path / "tape.json"
    file.write_bytes(msgspec.json.encode(tape))

    assert "seed 5: completed" in simulate(tmp_path, "--replay", str(file))
    assert msgspec.json.decode(file.read_bytes(), type=Tape) == tape


def test_what_cannot_be_simulated_is_refused(run_file: Path) -> None:
    run_file.write_text(RUN + "workflow: {use: online}\n")

    with pytest.raises(ConfigError, match="the workflow 'online' cannot be simulated"):
        tapes_of(run_file, [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "kill,hunger"], "there is no kind 'hunger'; the kinds are kill, stop,"),
        (["--replay", "run.yaml"], "run.yaml is no tape of `stretto simulate`"),
    ],
)
def test_wrong_arguments(run_file: Path, arguments: list[str], message: str) -> None:
    file = [str(run_file)] if "--replay" not in arguments else []

    assert message in simulate(run_file.parent, *file, *arguments, status=2)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_engine_has_weights_during_a_step_if_engines_sleep(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: dict[str, MockInference] = {}
    """Worker -> its engine, the last one if it has started again."""
    train, make = MockTraining.train, MockInference.__init__

    def watched(self: MockTraining, *args: Any, **kwargs: Any) -> Any:
        with (tmp_path / "steps").open("a") as file:  # a universe is a process of its own
            file.write(f"{sum(engine.load().version >= 0 for engine in engines.values())} awake\n")
        return train(self, *args, **kwargs)

    def made(self: MockInference, config: MockInferenceConfig, context: Context) -> None:
        engines[context.worker] = self
        make(self, config, context)

    monkeypatch.setattr(MockTraining, "train", watched)
    monkeypatch.setattr(MockInference, "__init__", made)
    tape, evaluation = small(3), {"every": 2, "rows": 4, "own_engine": True}
    queue = {**tape.run["queue"], "max_staleness": staleness}
    models, seen = list[str](), list[set[str]]()
    kills = [Fault(kind="kill", at=at, who=who) for at, who in ((8.3, "trainer"), (12.0, "kernel"))]
    for sleep, faults in ((True, kills), (False, ())):  # steps are repeated
        inference = {**tape.run["inference"], "sleep": sleep}
        changed = {
            "queue": queue,
            "inference": inference,
            "evaluation": evaluation,
            "checkpoint": {"every": 0},
        }
        models.append(completed(tape, *faults, **changed).model)
        seen.append(set((tmp_path / "steps").read_text().splitlines()))
        (tmp_path / "steps").unlink()

    assert seen[0] == {"0 awake"}
    assert seen[1] <= {"2 awake", "3 awake"}
    if not staleness:
        assert models[0] == models[1]
