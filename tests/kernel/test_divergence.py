"""The divergence of trained batches: measured by the trainer, less the engine's error, it moves the gate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixture_types import Models, Start
from plugin_files import write_plugin, write_reward
from stretto.array import Array
from stretto.bus.messages.inference import ScoredRow, SwapDone
from stretto.engine import SwapReport
from stretto.errors import EngineError
from stretto.kernel.calls.engine_errors import EngineErrors
from stretto.workers.shared_rows import choose_rows, engine_kl, score_rows
from training_engines import batch_of, loaded_engine
from worlds import in_simulation

# ------------------------------------------------------------------------------------ the shared rows


def row(trained: list[bool], logprobs: list[float]) -> ScoredRow:
    tokens = np.zeros(len(trained) + 1, np.int32)
    return ScoredRow(Array.of(tokens), Array.of(np.array(trained)), Array.of(np.array(logprobs, np.float32)))


def test_rows_are_chosen_evenly_and_a_few_only() -> None:
    assert choose_rows([5]) == [5]
    assert choose_rows(range(256)) == [0, 64, 128, 192]
    assert choose_rows([9, 8, 7, 6, 5]) == [9, 7, 5]


def test_the_engines_error_is_k3_over_the_trained_tokens() -> None:
    rows = [row([False, True], [-9.0, -1.0]), row([True], [-2.0])]
    found = [np.array([-1.0, -1.5], np.float32), np.array([-1.75], np.float32)]
    # engine - trainer: -0.5 and 0.25; exp(0.5) - 1 - 0.5 = 0.148721, exp(-0.25) - 1 + 0.25 = 0.028801
    assert engine_kl(rows, found) == pytest.approx((0.148721 + 0.028801) / 2, abs=1e-6)
    with pytest.raises(EngineError, match="is not a number"):
        engine_kl(rows, [np.array([np.nan, np.nan], np.float32), found[1]])


def test_the_trainer_scores_the_beginnings_of_rows(tiny_models: Models) -> None:
    """Up to the 64th trained token; what comes later changes nothing before it."""
    trainer = loaded_engine(tiny_models("qwen2"))
    batch = batch_of([100, 30], loss_mask=torch.arange(130) % 100 >= 10)
    long, short = score_rows(trainer, batch)
    whole = trainer.forward(batch, temperature=1.0)
    assert (len(long.tokens), len(short.tokens)) == (74, 30)
    assert long.trained.numpy().sum() == 64
    assert np.array_equal(short.tokens.numpy(), batch["tokens"][100:].numpy())
    assert long.logprobs.numpy() == pytest.approx(whole[1:74].numpy(), abs=1e-5)
    assert short.logprobs.numpy() == pytest.approx(whole[101:].numpy(), abs=1e-5)


# -------------------------------------------------------------------------------- the engine's error


def swapped(engine_kl: float | None = None, unscored: str = "") -> SwapDone:
    return SwapDone(SwapReport(1, "d", 0.0), engine_kl=engine_kl, rows_unscored=unscored)


def test_the_engines_error_is_taken_off_the_divergence() -> None:
    errors = EngineErrors()
    assert errors.divergence(0.5) is None  # nobody knows how much of it is the engines' error
    errors.add("inference-0", swapped())
    assert errors.divergence(0.5) is None
    errors.add("inference-0", swapped(0.1))
    errors.add("inference-1", swapped(0.3))
    assert errors.divergence(0.5) == pytest.approx(0.3)
    assert errors.divergence(0.1) == 0.0
    assert errors.divergence(None) is None
    errors.add("inference-0", swapped(0.5))  # averaged over swaps: 0.1 + 0.25 · 0.4 = 0.2
    assert errors.divergence(0.5) == pytest.approx(0.5 - 0.25)


def test_where_no_engine_can_be_compared_the_whole_figure_counts() -> None:
    errors = EngineErrors()
    errors.add("inference-0", swapped(unscored="it keeps no logits"))
    assert errors.divergence(0.5) == 0.5
    errors.add("inference-1", swapped(0.1))
    assert errors.divergence(0.5) == pytest.approx(0.4)


# ------------------------------------------------------------------------------------- whole runs

DIVERGING = """
    from pathlib import Path
    import numpy as np
    from stretto_mock.training import MockTraining

    class make(MockTraining):
        def forward(self, batch, *, temperature):
            return -np.log(2) * (batch["loss_mask"].float())

        def train(self, batch, loss, *, temperature):
            measured, _ = map(float, Path(__file__).with_name("figures.txt").read_text().split())
            return {**super().train(batch, loss, temperature=temperature), "divergence": measured}
"""
INEXACT = """
    from pathlib import Path
    import numpy as np
    from stretto_mock.inference import MockInference

    class make(MockInference):
        async def logprobs(self, sequences):
            _, error = map(float, Path(__file__).with_name("figures.txt").read_text().split())
            return [np.full(len(tokens) - 1, -np.log(2) + error, np.float32) for tokens in sequences]
"""


@pytest.fixture
def diverging(start: Start, tmp_path: Path) -> Start:
    """A run whose figures stand in `figures.txt`: what the trainer measures, and the engine's error in each
    logprob."""
    trainer = write_plugin(tmp_path, "training", DIVERGING, "stretto_mock.MockTrainingConfig")
    engine = write_plugin(tmp_path, "inference", INEXACT, "stretto_mock.MockInferenceConfig")
    engines = ["training=mine", "inference=mine", f"plugins=[{trainer}, {engine}]"]

    def start_run(measured: float, error: float, *overrides: str, **named: Any) -> Any:
        (tmp_path / "figures.txt").write_text(f"{measured} {error}")
        if "resume" in named:
            return start(**named)
        return start(*engines, "queue.max_divergence=0.01", *overrides, **named)

    return start_run


@in_simulation
def test_an_engines_error_never_closes_the_gate(diverging: Start) -> None:
    """0.5 in every logprob is k3 = exp(-0.5) - 0.5 = 0.1065 nats per token, ten times the bound."""
    run = diverging(0.1066, 0.5, "steps=12")
    run.assert_completed(12)
    lines = run.metrics()
    assert [line["staleness_limit"] for line in lines] == [2] * 12
    assert {line["engine_kl"] for line in lines if "engine_kl" in line} == {0.107}
    assert lines[-1]["divergence"] == pytest.approx(0.0, abs=2e-4)
    assert run.summary()["staleness_limit"] == {"2": 12}


@in_simulation
def test_the_gate_closes_on_divergence_and_a_resumed_run_takes_the_recorded_figures(diverging: Start) -> None:
    run = diverging(0.2, 0.0, "checkpoint.every=3", "steps=24")
    run.until_step(11)
    run.kill("trainer-0")
    before = {line["step"]: line for line in run.metrics()}
    resumed = diverging(0.0, 0.0, resume=run)  # from here on, the trainer measures none
    resumed.assert_completed(24)
    assert "step repeated" in resumed.text()
    lines = {line["step"]: line for line in run.metrics()}
    for step in range(1, 11):
        names = ("divergence", "staleness_limit")
        assert [lines[step].get(name) for name in names] == [before[step].get(name) for name in names], step
    assert (before[1]["staleness_limit"], before[8]["staleness_limit"]) == (2, 0)
    assert before[10]["staleness"] == 0
    assert lines[24]["staleness_limit"] > 0
    assert lines[24]["divergence"] == 0


def test_rows_that_are_read_have_no_gate(refusals: Callable[..., list[str]]) -> None:
    text = "\n".join(refusals("algorithm.use=sft", "queue.max_divergence=0.01"))
    assert "queue.max_divergence: limits how far sampled answers are off-policy" in text


@pytest.mark.slow
def test_the_policy_at_the_start_of_the_step_is_measured_in_every_minibatch(
    start: Start, tiny_models: Models, tmp_path: Path
) -> None:
    """Without staleness the batch is on-policy, however far its own optimizer steps go."""
    length = write_reward(tmp_path, "def score(prompt, completion): return len(completion) / 10")
    run = start(
        f"model={tiny_models('qwen2')}",
        *("training=torch", "training.lr=1e-2", "inference=torch", "algorithm.minibatches=4"),
        *("queue.max_divergence=0.01", "queue.max_staleness=0", "sampling.max_tokens=24", "steps=4"),
        *length,
    )
    run.assert_completed(4, bound=0)
    lines = run.metrics()
    assert lines[-1]["behaviour_kl"] > 1e-3
    assert all(line["divergence"] < 1e-4 for line in lines[1:])
    assert all(line["engine_kl"] < 1e-4 for line in lines[1:])
