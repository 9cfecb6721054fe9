"""Components of several kinds that break their contract, and the tests that must find it.

`test_faults.py` runs this file. `finds` says which tests fail, and words of the message.
"""

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, cast

import msgspec
import numpy as np

from stretto import Component, RewardConfig, WorkflowConfig, hookimpl, testing
from stretto.errors import EngineError
from stretto.workflow import Trajectory
from stretto_mock import MockInferenceConfig
from stretto_mock.inference import MockInference
from stretto_policy_gradients import GRPO, GRPOConfig
from stretto_torch import TorchInferenceConfig

HERE = (__file__,)


class LooseConfig(RewardConfig, frozen=True, forbid_unknown_fields=False):
    pass


CALLS = itertools.count(os.getpid())  # so that another process begins with another number


def counting(config: Any, context: Any) -> Any:
    def score(prompt: str, completion: str) -> Any:
        return float(next(CALLS))

    return score


class Careless:
    """Waits in the event loop, reads texts only, gives each sample the reward of another one, and hides what
    goes wrong."""

    def __init__(self, config: Any, context: Any) -> None: ...

    async def run(self, prompt: Any, session: Any) -> list[Trajectory]:
        from patience import patience  # a scoring process reads this file, too, and has no such module

        time.sleep(patience(0.5))
        assert prompt.row["prompt"].endswith("=")
        try:
            answers = await session.generate(prompt.ids, n=session.group_size)
        except EngineError:
            return []
        scores = await session.score(prompt, answers)
        pairs = zip(answers, scores[1:] + scores[:1], strict=True)
        return [
            Trajectory.of(prompt.ids, replace(answer, versions=answer.versions + 1), score)
            for answer, score in pairs
        ]


class Misreporting(MockInference):
    """Says something else than what it serves."""

    async def swap(self, update: Any) -> Any:
        report = await super().swap(update)
        return msgspec.structs.replace(report, digest="")

    def load(self) -> Any:
        return msgspec.structs.replace(super().load(), generated_tokens=0)


def draw_of_50(logits: Any, uniform: Any, settings: Any) -> Any:
    """As `transformers.generate` does unless told otherwise: draw from the 50 likeliest tokens. Report the
    logprobs of all."""
    import torch

    from stretto_torch.sampling import draw

    logprobs = logits.clone()
    if settings is not None:
        logprobs /= torch.from_numpy(settings.temperature)[:, None]
        settings = replace(settings, top_k=np.where(settings.top_k == 0, 50, settings.top_k))
    tokens, _, kept = draw(logits, uniform, settings)
    return tokens, logprobs.log_softmax(-1).numpy()[np.arange(len(tokens)), tokens], kept


def forgetful(config: Any, context: Any) -> Any:
    """Does not say that it computes everything anew at a swap, and from how many tokens it draws."""
    import stretto_torch.slots as slots
    from stretto_torch.inference import TorchInferenceEngine

    slots.__dict__["draw"] = draw_of_50
    return TorchInferenceEngine(msgspec.structs.replace(config, on_swap="recompute"), context)


class Twice(GRPO):
    """Compares sequences, where it should compare samples."""

    def advantages(self, batch: Any) -> Any:
        import torch

        return super().advantages(batch.with_columns({"sample": torch.arange(len(batch))}))


class OfSequencesConfig(GRPOConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    figure: Literal["mean", "upper_half", "deviation"]


class OfSequences(GRPO):
    """Compares with a figure of all sequences of the batch, where it should be one of all samples."""

    def advantages(self, batch: Any) -> Any:
        rewards, config = batch["rewards"], cast("OfSequencesConfig", self.config)
        advantages = {
            "mean": lambda: rewards - rewards.mean(),
            "upper_half": lambda: rewards - rewards.sort().values[len(rewards) // 2 :].mean(),
            "deviation": lambda: (rewards - rewards.mean()) / rewards.std(),
        }
        return advantages[config.figure]()[batch.sequence_index()]


@hookimpl
def stretto_reward() -> Iterable[Component[Any]]:
    yield Component("counting", counting, LooseConfig, "")


@hookimpl
def stretto_workflow() -> Iterable[Component[Any]]:
    yield Component("careless", Careless, WorkflowConfig, "")


@hookimpl
def stretto_inference() -> Iterable[Component[Any]]:
    yield Component("misreporting", Misreporting, MockInferenceConfig, "", needs_model=False)
    yield Component("forgetful", forgetful, TorchInferenceConfig, "")


@hookimpl
def stretto_algorithm() -> Iterable[Component[Any]]:
    yield Component("twice", Twice, GRPOConfig, "")
    yield Component("of_sequences", OfSequences, OfSequencesConfig, "")


class TestCounting(testing.RewardConformance):
    use, plugins = "counting", HERE
    right, wrong = "right", "wrong"
    finds = {
        "its_config_is_frozen_and_refuses_unknown_keys": "LooseConfig accepts unknown keys",
        "the_same_answers_get_the_same_scores": "gets another score when the reward is made again",
        "an_answers_score_is_its_own": "after other answers",
        "the_right_answer_scores_higher_than_the_wrong_one": "'right' scores ",
        "a_scoring_process_gives_the_same_rewards": "in a scoring process",
    }


class TestCareless(testing.WorkflowConformance):
    use, plugins = "careless", HERE
    finds = {
        "its_trajectories_are_what_the_policy_sampled": "the trained tokens from 4 on are not an answer",
        "a_sample_gets_the_reward_of_its_own_answers": "sample 0 has the reward of '2 (1)'",
        "it_does_not_block_the_event_loop": "time.sleep(patience(0.5))",
        "a_prompt_may_be_a_chat": "says `chats = False`",
        "an_error_of_the_engine_fails_the_prompt": "and it returned 0 trajectories",
    }


class TestMisreporting(testing.InferenceConformance):
    use, plugins = "misreporting", HERE
    options = {"tokens_per_s": 2000, "slots": 8, "lengths": [2000]}
    finds = {
        "a_swap_reports_what_is_served_and_what_it_cost": "it reports another digest",
        "an_engine_that_slept_serves_what_the_next_swap_loads": "assert report.digest == ",
        "a_request_sent_again_is_the_same_request": "assert (0 - 0) == 500",
        "figures_add_up": "assert (0 - 0) == ",
    }


class TestForgetful(testing.InferenceConformance):
    """At temperature 0.7 the tokens after the 50th have so little weight that 600 answers do not show it."""

    use, plugins, options = "forgetful", HERE, {"slots": 8}
    finds = {
        "keep_cache_goes_on_over_what_older_weights_computed": "says `recomputes = True`",
        "tokens_are_drawn_with_the_probability_they_report[{'temperature': 2.0}]": "chi-squared ",
    }


class TestTwice(testing.AlgorithmConformance):
    use, plugins, options = "twice", HERE, {"group_size": 4}
    finds = {"a_sample_in_parts_counts_once": "count a sample once"}


class TestMeanOfSequences(testing.AlgorithmConformance):
    use, plugins, options = "of_sequences", HERE, {"group_size": 4, "figure": "mean"}
    finds = {"a_sample_in_parts_counts_once": "count a sample once"}


class TestUpperHalfOfSequences(TestMeanOfSequences):
    options = {"group_size": 4, "figure": "upper_half"}


class TestDeviationOfSequences(TestMeanOfSequences):
    options = {"group_size": 4, "figure": "deviation"}
