"""The answers of an evaluation as text, for people to read and for `stretto evaluate` to count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.bus.messages.tickets import Answers, Ticket
from stretto.dataset import Row
from stretto.engine import Finish
from stretto.models.images import with_names
from stretto.models.tokenizer import Tokenizer
from stretto.workflow import Trajectory, sample_numbers

__all__ = ["KeptAnswer", "answers_of"]


class KeptAnswer(msgspec.Struct, frozen=True):
    """One line of `answers/step-000040.jsonl`."""

    row: int
    """Index in the held-out dataset."""
    sample: int
    """Number of the sample among the row's samples. A sample of several trajectories has several lines."""
    version: int
    """Version of the weights that sampled it."""
    columns: dict[str, Any]
    """The row's columns, without its prompt, and with the path of each image; see `with_names`."""
    prompt: str
    """The prompt as the model got it: template applied, special tokens removed."""
    completion: str
    """The text after the prompt; with several turns, also the text between them."""
    reward: float
    metrics: dict[str, float]
    tokens: int
    """Number of sampled tokens."""
    finish: Finish
    engine: str


def answers_of(ticket: Ticket, row: Row, trajectories: Sequence[Trajectory], tokenizer: Tokenizer) -> Answers:
    """Return the answers of an evaluation ticket, as lines of JSON."""
    encode = msgspec.json.Encoder().encode
    columns = {name: value for name, value in with_names(row).items() if name != "prompt"}
    answers = (
        _answer_of(ticket, columns, sample, trajectory, tokenizer)
        for sample, trajectory in zip(sample_numbers(trajectories), trajectories, strict=True)
    )
    return Answers(b"".join(encode(answer) + b"\n" for answer in answers))


def _answer_of(
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
