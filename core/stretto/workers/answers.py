"""The answers of an evaluation as text, for people to read and for `stretto evaluate` to count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.bus.messages import Answers, Ticket
from stretto.dataset import Row
from stretto.engine import Finish
from stretto.models.tokenizer import Tokenizer
from stretto.models.vision import IMAGE_COLUMNS
from stretto.workflow import Trajectory, sample_numbers

__all__ = ["KeptAnswer", "answers_of"]


class KeptAnswer(msgspec.Struct, frozen=True):
    """One line of `answers/step-000040.jsonl`."""

    row: int
    """Index in the held-out dataset."""
    sample: int
    """Which of the row's; one that became several trajectories has several lines."""
    version: int
    """Of the weights that sampled it."""
    columns: dict[str, Any]
    """The row's own, but for its prompt and images."""
    prompt: str
    """What the model was given, template applied, without special tokens."""
    completion: str
    """All that followed; of several turns, what stands between them too."""
    reward: float
    metrics: dict[str, float]
    tokens: int
    """Sampled."""
    finish: Finish
    engine: str


def answers_of(ticket: Ticket, row: Row, trajectories: Sequence[Trajectory], tokenizer: Tokenizer) -> Answers:
    """What the log keeps of an evaluation ticket."""
    encode = msgspec.json.Encoder().encode
    columns = {name: value for name, value in row.items() if name not in ("prompt", *IMAGE_COLUMNS)}
    kept = (
        _kept(ticket, columns, sample, trajectory, tokenizer)
        for sample, trajectory in zip(sample_numbers(trajectories), trajectories, strict=True)
    )
    return Answers(b"".join(encode(answer) + b"\n" for answer in kept))


def _kept(
    ticket: Ticket, columns: dict[str, Any], sample: int, trajectory: Trajectory, tokenizer: Tokenizer
) -> KeptAnswer:
    start = int(np.argmax(trajectory.loss_mask))
    return KeptAnswer(
        row=ticket.row,
        sample=sample,
        version=ticket.min_version,
        columns=columns,
        prompt=tokenizer.decode(trajectory.tokens[:start]),
        completion=tokenizer.decode(trajectory.tokens[start:]),
        reward=trajectory.score.reward,
        metrics=dict(trajectory.score.metrics),
        tokens=int(np.count_nonzero(trajectory.loss_mask)),
        finish=trajectory.finish,
        engine=trajectory.engine,
    )
