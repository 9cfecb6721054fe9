"""The answers of evaluations that a run keeps (`evaluation.keep_answers`), for people to read."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import ConfigError
from stretto.records.files import read_record

__all__ = ["AnswerLine", "newest_sample", "read_answers"]


class AnswerLine(msgspec.Struct, frozen=True):
    """One line of `answers/step-000040.jsonl`."""

    row: int
    """Index in the held-out dataset."""
    sample: int
    version: int
    prompt: str
    completion: str
    reward: float
    metrics: dict[str, float]
    finish: str
    columns: dict[str, Any] = {}

    @property
    def score(self) -> float:
        """The answer's `accuracy`, or its reward."""
        return self.metrics.get("accuracy", self.reward)


def read_answers(folder: Path, version: int) -> list[AnswerLine]:
    """Return the answers of the evaluation of a version; empty if the run in `folder` has not kept them.

    If a sample has several lines, its last line counts.

    Raises:
        ConfigError: if the file is damaged.
    """
    file = folder / "answers" / f"step-{version:06d}.jsonl"
    decode = msgspec.json.Decoder(AnswerLine).decode
    try:
        answers = [decode(line) for line in read_record(file).splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} does not hold the answers of an evaluation: {error}") from error
    return list({(answer.row, answer.sample): answer for answer in answers}.values())


def newest_sample(folder: Path) -> str:
    """Return a sample of the run as text: the newest one that the run has kept, or else a random answer of
    the newest evaluation whose answers it has kept. If there is none, the text says so.

    Raises:
        ConfigError: if a file is damaged.
    """
    from stretto.records.kept.samples import SampleStore  # it imports numpy

    if row := SampleStore(folder).newest():
        return _kept_sample(row)
    newest = max((folder / "answers").glob("step-*.jsonl"), default=None)
    answers = read_answers(folder, int(newest.stem.removeprefix("step-"))) if newest else []
    if not answers:
        return "no sample is kept yet: the run writes them every few seconds, unless `samples.keep` is none"
    answer = random.choice(answers)
    head = f"version {answer.version}, held-out row {answer.row}, reward {answer.reward:g}, {answer.finish}"
    return f"{head}\n{answer.prompt}\n→ {answer.completion}"


def _kept_sample(row: Mapping[str, Any]) -> str:
    """Return a row of the store of samples as text."""
    reward = "not scored" if row["reward"] is None else f"reward {row['reward']:g}"
    ended = [f"ended by {row['finish']}"] if row["finish"] else []
    reason = [row["reason"]] if row["reason"] else []
    facts = [row["id"], reward, *ended, row["outcome"], *reason]
    columns = row["dataset_row"]
    expected = columns.get("answer") if isinstance(columns, dict) else None
    wanted = [] if expected is None else [f"expected {expected}"]
    return "\n".join([", ".join(facts), row["prompt_text"] or "", f"→ {row['text'] or ''}", *wanted])
