"""What workers keep of samples for people: texts by turns, and the trainer's figures of each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.algorithm import Loss
from stretto.bus.messages.tickets import Ticket
from stretto.models.tokenizer import load_tokenizer
from stretto.rl.batch import Batch
from stretto.workers.sampling.ticket_record import TicketNotes, record_of
from stretto.workers.training.step_recorder import ROW, StepFigures
from stretto.workflow import Score, Trajectory

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def test_the_turns_of_a_text_stand_on_lines_of_their_own() -> None:
    tokenizer = load_tokenizer(str(MODEL))
    turns = [tokenizer.encode_text(text) for text in ("1+7+5=", "8 13", "8+1=", "9")]
    mask = np.concatenate([np.full(len(turn), bool(place % 2)) for place, turn in enumerate(turns)])
    trajectory = Trajectory(
        tokens=np.concatenate(turns),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        score=Score(1.0),
        finish="stop",
        engine="inference-0",
    )
    notes = TicketNotes({"prompt": "1+7+5="})
    record = record_of(Ticket(0, 1, "train", 0, 0, 1), "rollout-0", notes, [trajectory], tokenizer)
    assert record.prompt == "1+7+5="
    assert record.texts[0].text == "8 13\n8+1=\n9"


def test_importance_weights_keep_the_precision_of_logprobs() -> None:
    def nothing(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logprobs, {}

    figures = StepFigures()
    behaviour = torch.tensor([0.0, -1.0, -2.0, 0.0])
    batch = Batch(
        [4],
        {"tokens": torch.tensor([1, 2, 3, 4]), "loss_mask": torch.tensor([False, True, True, True])},
        {ROW: torch.tensor([0])},
    ).with_columns({"behaviour_logprobs": behaviour})
    logprobs = behaviour + torch.tensor([0.0, 1e-4, -1e-4, 12.0])  # float16 has neither of the three weights
    figures.watch(Loss(nothing, "token"), [0]).function(logprobs, batch)
    [row] = figures.rows(["0/1/0"])
    np.testing.assert_allclose(
        row.importance_weights.numpy(), np.exp(np.array([1e-4, -1e-4, 12.0])), rtol=3e-7 * 12
    )
