"""Three components of different kinds that break their contract, and the tests that must find it.

`test_faults.py` runs this file. `finds` says which tests fail, and words of the message.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from stretto import Component, RewardConfig, WorkflowConfig, hookimpl
from stretto.errors import EngineError
from stretto.testing import (
    AlgorithmConformance,
    InferenceConformance,
    RewardConformance,
    WorkflowConformance,
)
from stretto.workflow import Score, Trajectory
from stretto_grpo import GRPO, GRPOConfig
from stretto_mock import MockInferenceConfig
from stretto_mock.inference import MockInference

HERE = (__file__,)

# ----------------------------------------------------------------------------------------- rewards


class LooseConfig(RewardConfig, frozen=True, forbid_unknown_fields=False):
    pass


CALLS = itertools.count(os.getpid())  # so that another process begins with another number


def counting(config: Any, context: Any) -> Any:
    def score(prompt: str, completion: str) -> Any:
        return float(next(CALLS))

    return score


@hookimpl
def stretto_reward() -> Iterable[Component[Any]]:
    yield Component("counting", counting, LooseConfig, "")


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


class Hasty:
    """Waits in the event loop, reads texts only, and gives each sample the reward of another one."""

    def __init__(self, config: Any, context: Any) -> None: ...

    async def run(self, prompt: Any, session: Any) -> list[Trajectory]:
        from patience import patience  # a scoring process reads this file, too, and has no such module

        time.sleep(patience(0.5))
        assert prompt.row["prompt"].endswith("=")
        answers = await session.generate(prompt.ids, n=session.group_size)
        scores = await session.score(prompt, answers)
        pairs = zip(answers, scores[1:] + scores[:1], strict=True)
        return [Trajectory.of(prompt.ids, answer, score) for answer, score in pairs]


@hookimpl
def stretto_workflow() -> Iterable[Component[Any]]:
    yield Component("upper", Upper, WorkflowConfig, "")
    yield Component("hasty", Hasty, WorkflowConfig, "")


class TestUpper(WorkflowConformance):
    use, plugins = "upper", HERE
    answers = ("two", "three")
    finds = {
        "its_trajectories_are_what_the_policy_sampled": "the trained tokens from 4 on are not an answer",
        "prompts_at_the_same_time_do_not_mix": "the trained tokens from 4 on are not an answer",
        "a_prompt_may_be_a_chat": "the trained tokens from 5 on are not an answer",
        "an_error_of_the_engine_fails_the_prompt": "and it returned 0 trajectories",
    }


class TestHasty(WorkflowConformance):
    use, plugins = "hasty", HERE
    finds = {
        "a_sample_gets_the_reward_of_its_own_answers": "sample 0 has the reward of '2 (1)'",
        "it_does_not_block_the_event_loop": "time.sleep(patience(0.5))",
        "a_prompt_may_be_a_chat": "says `chats = False`",
    }


# -------------------------------------------------------------------------------------- algorithms


class Twice(GRPO):
    """Compares sequences, where it should compare samples."""

    def advantages(self, batch: Any) -> Any:
        import torch

        return super().advantages(batch.with_columns({"sample": torch.arange(len(batch))}))


@hookimpl
def stretto_algorithm() -> Iterable[Component[Any]]:
    yield Component("twice", Twice, GRPOConfig, "")


class TestTwice(AlgorithmConformance):
    use, plugins, options = "twice", HERE, {"group_size": 4}
    finds = {"a_sample_in_parts_counts_once": "count a sample once"}


# ------------------------------------------------------------------------------- inference engines


class Misreporting(MockInference):
    """Says something else than what it serves."""

    async def swap(self, update: Any) -> Any:
        report = await super().swap(update)
        return msgspec.structs.replace(report, digest="")

    def load(self) -> Any:
        return msgspec.structs.replace(super().load(), swaps=0)


@hookimpl
def stretto_inference() -> Iterable[Component[Any]]:
    yield Component("misreporting", Misreporting, MockInferenceConfig, "", needs_model=False)


class TestMisreporting(InferenceConformance):
    use, plugins = "misreporting", HERE
    finds = {
        "without_a_model_nothing_is_sampled_before_the_first_swap": "it reports another digest",
        "without_a_model_answers_go_on_over_a_swap": "after two swaps, its figures are",
    }
