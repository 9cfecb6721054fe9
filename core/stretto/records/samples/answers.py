"""The answers of an evaluation, read from the kept samples of a run."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from stretto.bus.messages.events import Measure
from stretto.records.samples.store import SampleFilter, SampleStore


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a held-out row, and a line of the file that `stretto evaluate` writes."""

    row: int
    """Index in the held-out dataset."""
    sample: int
    """Number of the sample among the row's samples. A sample of several trajectories has several answers."""
    version: int
    """Version of the weights that sampled it."""
    columns: dict[str, Any] | None = None
    """The row's columns without its prompt; see `stretto.models.images.with_names`."""
    prompt: str | None = None
    """The prompt as the model got it."""
    completion: str | None = None
    """The text that the reward scored: of a conversation, the last answer. `columns`, `prompt` and
    `completion` are None if the texts were not read."""
    messages: list[dict[str, Any]] | None = None
    """The whole conversation; None if there was none."""
    reward: float
    metrics: dict[str, float]
    tokens: int
    """Sampled tokens."""
    finish: str
    engine: str

    def score(self, measure: Measure) -> float:
        """Return the accuracy or reward. Runs up to version 0.1 may lack accuracies: use the reward then."""
        return self.metrics.get("accuracy", self.reward) if measure == "accuracy" else self.reward


def read_answers(store: SampleStore, version: int, *, texts: bool = False) -> list[KeptAnswer]:
    """Return an evaluation's answers by row, from the row's last attempt; `texts` adds columns and texts."""
    wanted = SampleFilter(purpose="eval", outcome="evaluated", step=(version, version))
    samples = store.find(wanted, limit=None, texts=texts)
    last_outcome = {each["row"]: each["sequence"] for each in samples}
    of_last_attempts = [each for each in samples if each["sequence"] == last_outcome[each["row"]]]
    return [_answer_of(each, version) for each in sorted(of_last_attempts, key=lambda each: each["row"])]


def measure_of(answers: Iterable[KeptAnswer]) -> Measure:
    """Return the measure of some answers: accuracy if every answer has one, otherwise reward."""
    return "accuracy" if all("accuracy" in answer.metrics for answer in answers) else "reward"


def by_sample(answers: Iterable[KeptAnswer]) -> dict[tuple[int, int], KeptAnswer]:
    """Return (row, sample) -> its answer. Of a sample with several answers, the last one counts."""
    return {(answer.row, answer.sample): answer for answer in answers}


def _answer_of(kept: Mapping[str, Any], version: int) -> KeptAnswer:
    columns, chat = kept.get("dataset_row"), kept.get("messages")
    messages = cast("list[dict[str, Any]]", chat) if isinstance(chat, list) else None  # else it was cut
    answers = [turn.get("content") for turn in messages or () if turn["role"] == "assistant"]
    return KeptAnswer(
        **{name: kept[name] for name in ("row", "sample", "reward", "metrics", "finish", "engine")},
        version=version,
        columns={name: value for name, value in columns.items() if name != "prompt"} if columns else None,
        prompt=kept.get("prompt_text"),
        completion=answers[-1] if answers else kept.get("text"),
        messages=messages,
        tokens=kept["sampled"],
    )
