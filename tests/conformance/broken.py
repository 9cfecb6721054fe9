"""Components that break their contract, each in one way, and the tests that must find it.

`test_faults.py` runs this file. `finds` says which tests fail, and words of the message.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import anyio

from stretto import Component, DatasetConfig, RewardConfig, WorkflowConfig, hookimpl
from stretto.algorithm import AlgorithmConfig, Loss, Model, function, generate, score, train
from stretto.errors import EngineError, WeightsError
from stretto.launcher import LauncherConfig
from stretto.models.digest import digest_of, tensor_hash
from stretto.testing import (
    AlgorithmConformance,
    DatasetConformance,
    LauncherConformance,
    RewardConformance,
    TrackerConformance,
    WeightsConformance,
    WorkflowConformance,
)
from stretto.tracker import Sent, TrackerConfig
from stretto.weights import WeightsConfig, WeightsNote
from stretto.workflow import Score, Trajectory
from stretto_local import LocalHandle, LocalLauncher

HERE = (__file__,)

# ----------------------------------------------------------------------------------------- rewards


class LooseConfig(RewardConfig, frozen=True, forbid_unknown_fields=False):
    pass


CALLS = itertools.count(os.getpid())  # so that another process begins with another number


def counting(config: Any, context: Any) -> Any:
    def score(prompt: str, completion: str) -> Any:
        return float(next(CALLS))

    return score


def silent(config: Any, context: Any) -> Any:
    def score(prompt: str, completion: str) -> Any:
        return float(len(completion)) if completion.strip() else None

    return score


@hookimpl
def stretto_reward() -> Iterable[Component[Any]]:
    yield Component("counting", counting, LooseConfig, "")
    yield Component("silent", silent, RewardConfig, "")


class TestCounting(RewardConformance):
    use, plugins = "counting", HERE
    right, wrong = "right", "wrong"
    finds = {
        "its_config_is_frozen_and_refuses_unknown_keys": "LooseConfig accepts unknown keys",
        "the_same_answers_get_the_same_scores": "gets another score when the reward is made again",
        "an_answers_score_is_its_own": "after other answers",
        "the_right_answer_scores_higher_than_the_wrong_one": "'right' scores ",
        "a_scoring_process_gives_the_same_rewards": "in a scoring process",
    }


class TestSilent(RewardConformance):
    use, plugins = "silent", HERE
    finds = dict.fromkeys(
        (
            "every_answer_gets_a_finite_number",
            "the_same_answers_get_the_same_scores",
            "an_answers_score_is_its_own",
            "the_right_answer_scores_higher_than_the_wrong_one",
            "a_scoring_process_gives_the_same_rewards",
        ),
        "the reward of completion 0 is None, not a finite number",
    )


# ---------------------------------------------------------------------------------------- datasets


class Shuffled:
    """Its rows are in the order of a set of texts, which is another one in each process."""

    fingerprint = ""

    def __init__(self, config: Any, context: Any) -> None:
        self.rows = list({f"question {n}" for n in range(50)})

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": self.rows[index % 50]}


class Consumed:
    """Reads on from where it is, and has no prompts."""

    fingerprint = "f"

    def __init__(self, config: Any, context: Any) -> None:
        self.count = itertools.count(int(getattr(config, "max_prompt_tokens", 0) or 0))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": "?", "n": [next(self.count)][: 3 - index][0]}


@hookimpl
def stretto_dataset() -> Iterable[Component[Any]]:
    yield Component("shuffled", Shuffled, DatasetConfig, "")
    yield Component("consumed", Consumed, DatasetConfig, "")


class TestShuffled(DatasetConformance):
    use, plugins = "shuffled", HERE
    finds = {
        "another_process_has_the_same_rows": "row 0 is another one in another process",
        "its_fingerprint_is_text": "its fingerprint is empty",
        "there_is_no_row_after_the_last_one": "it has 50 rows, and a row after the last one: {'prompt'",
    }


class TestConsumed(DatasetConformance):
    use, plugins = "consumed", HERE
    changed = {"max_prompt_tokens": 9}
    finds = {
        "every_row_is_a_dict_with_a_prompt_that_the_bus_carries": "row 0 has no column 'prompt'",
        "a_row_does_not_depend_on_the_rows_read_before": "is another one when it is read again",
        "made_again_it_has_the_same_rows": "row 2 is another one when the dataset is made again",
        "other_rows_have_another_fingerprint": "other rows have the same fingerprint",
    }


# --------------------------------------------------------------------------------------- workflows


class Upper:
    """Trains on the text that it changed, and hides what goes wrong."""

    def __init__(self, config: Any, context: Any) -> None: ...

    async def run(self, prompt: Any, session: Any) -> list[Trajectory]:
        try:
            [answer] = await session.generate(prompt.ids)
        except EngineError:
            return []
        shouted = session.tokenizer.encode_text(answer.text.upper())
        return [Trajectory.of(prompt.ids, replace(answer, tokens=shouted), Score(1.0))]


class Mixing:
    """Keeps the answers of all prompts in one place."""

    def __init__(self, config: Any, context: Any) -> None:
        self.answers: list[Any] = []

    async def run(self, prompt: Any, session: Any) -> list[Trajectory]:
        self.answers += await session.generate(prompt.ids, n=session.group_size)
        await anyio.sleep(0)
        scores = await session.score(prompt, [answer.text for answer in self.answers])
        return [Trajectory.of(prompt.ids, *pair) for pair in zip(self.answers, scores, strict=True)]


class Zeroing:
    """Makes up the reward of an answer without a score, and the first sample once more for a missing one."""

    def __init__(self, config: Any, context: Any) -> None: ...

    async def run(self, prompt: Any, session: Any) -> list[Trajectory]:
        async def play(number: int) -> Any:
            conversation = session.conversation(prompt.row["prompt"])
            await conversation.reply()
            return conversation

        made = await session.members(play)
        scores = await session.score(prompt, [each.answers[-1] for each in made])
        samples = [
            each.trajectories(replace(score, reward=0.0) if score.reward != score.reward else score)
            for each, score in zip(made, scores, strict=True)
        ]
        samples += samples[:1] * (session.group_size - len(samples))
        return [part for sample in samples for part in sample]


@hookimpl
def stretto_workflow() -> Iterable[Component[Any]]:
    yield Component("zeroing", Zeroing, WorkflowConfig, "", reward_columns=("completion_tokens",))
    yield Component("upper", Upper, WorkflowConfig, "")
    yield Component("mixing", Mixing, WorkflowConfig, "", reward_columns=("completion_tokens",))


class TestUpper(WorkflowConformance):
    use, plugins = "upper", HERE
    answers = ("two", "three")
    finds = {
        "its_trajectories_are_what_the_policy_sampled": "the trained tokens from 4 on are not an answer",
        "prompts_at_the_same_time_do_not_mix": "the trained tokens from 4 on are not an answer",
        "an_error_of_the_engine_fails_the_prompt": "and it returned 0 trajectories",
    }


class TestZeroing(WorkflowConformance):
    use, plugins = "zeroing", HERE
    finds = {
        "a_sample_that_fails_costs_no_other": "3 samples of the 2 that were made",
        "an_answer_without_a_score_gets_none": "one answer has no score, and the samples [] have none",
    }


class TestMixing(WorkflowConformance):
    use, plugins = "mixing", HERE
    finds = {
        "prompts_at_the_same_time_do_not_mix": "trajectory 3: the trained tokens from 4 on are not an answer",
        "the_reward_gets_the_columns_that_the_component_names": "the reward gets the columns none",
    }


# ---------------------------------------------------------------------------------------- trackers


class Strict:
    """Refuses what comes again, and writes beside its folder."""

    def __init__(self, config: Any, context: Any) -> None:
        self.file: Path = context.path("trackers", "steps.txt")

    def start(self, config: Any, resumed_at: Any) -> None: ...
    def evaluation(self, metrics: Any) -> None: ...
    def advice(self, advice: Any) -> None: ...
    def samples(self, rows: Any) -> None: ...
    def finish(self, summary: Any) -> None: ...

    def step(self, metrics: Any) -> None:
        steps = self.file.read_text().split() if self.file.exists() else []
        if str(metrics["step"]) in steps:
            raise ValueError(f"step {metrics['step']} came again")
        self.file.write_text(" ".join([*steps, str(metrics["step"])]))


class Boasting(Strict):
    """Says that it has more than it got."""

    def start(self, config: Any, resumed_at: Any) -> Any:
        return Sent(step=3)

    def step(self, metrics: Any) -> None: ...


@hookimpl
def stretto_tracker() -> Iterable[Component[Any]]:
    yield Component("strict", Strict, TrackerConfig, "")
    yield Component("boasting", Boasting, TrackerConfig, "")


class TestStrict(TrackerConformance):
    use, plugins = "strict", HERE
    finds = {
        "it_takes_a_whole_run_and_writes_in_its_own_folder_only": "it wrote run/trackers/steps.txt, outside",
        "what_comes_again_after_a_kill_is_harmless": "ValueError: step 2 came again",
    }


class TestBoasting(TrackerConformance):
    use, plugins = "boasting", HERE
    finds = {
        "it_takes_a_whole_run_and_writes_in_its_own_folder_only": "before anything was sent",
        "what_comes_again_after_a_kill_is_harmless": "but it has got steps up to 2 and evaluations up to 2",
    }


# --------------------------------------------------------------------------------------- launchers


class LeakyHandle(LocalHandle):
    """A process of which only the top is killed, at once."""

    async def wait(self) -> int:
        return abs(await self._process.wait())

    async def stop(self, grace_s: float) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


class Leaky(LocalLauncher):
    async def launch(self, jobs: Any) -> list[Any]:
        spots = self._place_beside(jobs)
        self._spots |= {job.worker: (job, spots[job.worker]) for job in jobs}
        return [LeakyHandle(await self._start(job)) for job in jobs]


@hookimpl
def stretto_launcher() -> Iterable[Component[Any]]:
    yield Component("leaky", Leaky, LauncherConfig, "")


class TestLeaky(LauncherConformance):
    use, plugins = "leaky", HERE
    start_s = 2.0
    finds = {
        "a_lost_process_is_reported_with_its_status": "`wait` returned [7, 7, 9]",
        "stop_asks_first_and_leaves_nothing_running": "killed the process without asking it to end",
        "stop_kills_what_does_not_end_in_time": "s of 0.3 s grace",
        "a_job_that_cannot_start_stops_the_others": "FileNotFoundError",
    }


# ----------------------------------------------------------------------------------------- weights


class Careless:
    """Keeps the newest tensors in this process, and compares nothing. It is each of its parts."""

    newest: ClassVar[dict[str, Any]] = {}
    folder = None

    def __init__(self, config: Any, context: Any) -> None: ...

    def publisher(self, wire: Any) -> Any:
        return self

    subscriber = publisher

    def publish(self, version: int, tensors: Any, needed: Any = ()) -> WeightsNote:
        self.newest.update(tensors)
        return WeightsNote(version, "", digest_of(self.hashes().items()))

    async def receive(self, note: WeightsNote) -> Any:
        self.note = note
        return self

    def hashes(self) -> dict[str, str]:
        return {name: tensor_hash(tensor) for name, tensor in self.newest.items()}

    def tensors(self) -> dict[str, Any]:
        return self.newest

    def copy(self, version: int, folder: Path) -> None:
        raise WeightsError("no copies")

    def clean(self) -> None: ...
    def close(self) -> None: ...


@hookimpl
def stretto_weights() -> Iterable[Component[Any]]:
    yield Component("careless", Careless, WeightsConfig, "")


class TestCareless(WeightsConformance):
    use, plugins = "careless", HERE
    finds = {
        "a_late_engine_gets_the_newest_version": "the hashes of version 0 differ",
        "small_steps_arrive_as_they_were_published": "the hashes of version 0 differ",
        "a_damaged_copy_of_an_older_version_does_no_harm": "the hashes of version 5 differ",
        "versions_that_evaluations_need_stay": "the hashes of version 1 differ",
        "a_version_can_be_copied": "no copies",
        "other_weights_than_the_announced_ones_are_refused": "`receive` returned weights with another digest",
        "nothing_is_left_after_the_end": "`receive` returned a version that `clean` has removed",
    }


# -------------------------------------------------------------------------------------- algorithms


class Averaging:
    """Its loss is a mean over what it gets, and its sign is wrong."""

    models: ClassVar[dict[str, Model]] = {"actor": Model(), "idle": Model()}

    def __init__(self, config: Any, context: Any) -> None: ...

    def calls(self) -> list[Any]:
        reads = ("rewards", "group", "sample")
        return [
            generate(samples=4),
            score(),
            function(self.advantages, reads=reads, writes=("advantages",)),
            train("actor", Loss(self.loss, "token"), reads=("advantages",)),
        ]

    def keep(self, group: Any) -> Any:
        return max(group.rewards)

    def advantages(self, batch: Any) -> dict[str, Any]:
        from stretto.rl.functional import group_normalise

        centred = group_normalise(batch["rewards"], batch["group"], batch["sample"], std=False)
        return {"advantages": centred[batch.sequence_index()]}

    def loss(self, logprobs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        advantages = batch["advantages"] - batch["advantages"].mean()
        return advantages * logprobs, {}


class Forgetting(Averaging):
    """Reads a column that it does not name, and does not continue from its state."""

    models: ClassVar[dict[str, Model]] = {"actor": Model()}
    coefficient = 1.0

    def keep(self, group: Any) -> bool:
        return True

    def loss(self, logprobs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return -batch["advantages"] * logprobs * (logprobs.detach() - batch["behaviour_logprobs"]).exp(), {}

    def state(self) -> dict[str, float]:
        self.coefficient += 1
        return {"coefficient": self.coefficient}

    def restore(self, state: Any) -> None: ...


@hookimpl
def stretto_algorithm() -> Iterable[Component[Any]]:
    yield Component("averaging", Averaging, AlgorithmConfig, "")
    yield Component("forgetting", Forgetting, AlgorithmConfig, "")


class TestAveraging(AlgorithmConformance):
    use, plugins = "averaging", HERE
    finds = {
        "its_dataflow_can_run": "no call trains the model 'idle'",
        "keep_decides_about_any_group": "`keep` returned 0.0 for the rewards (0.0,)",
        "the_gradient_does_not_depend_on_the_split": "must not average over the batch",
        "it_learns_a_tiny_task": "expected a rise of 0.2",
    }


class TestForgetting(AlgorithmConformance):
    use, plugins = "forgetting", HERE
    finds = {
        "the_gradient_does_not_depend_on_the_split": "the batch has no column 'behaviour_logprobs'",
        "its_state_goes_on_from_a_checkpoint": "restored from {'coefficient': 3.0}, its state is",
        "it_learns_a_tiny_task": "the batch has no column 'behaviour_logprobs'",
    }
