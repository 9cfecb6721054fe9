"""Algorithm `sft`: supervised fine-tuning on answers that are given.

The negative log-likelihood of the answer's tokens, -log pi(y_t | x, y_<t); the prompt is not trained on. The
answer is the column `completion_column` of the row, text or the assistant's messages, and ends with the
tokenizer's end of text, so that the model learns to stop.

Peers disagree on the mean: TRL and most trainers take it over the tokens of the batch, as `loss_mean: token`
does here, across all ranks and micro-batches alike.

Metrics: `nll`, the loss per token in nats, averaged over trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stretto import AlgorithmConfig, Component, Context, Problem, hookimpl
from stretto.algorithm import Call, Encoded, Group, Loss, Model, Reduction, read, train
from stretto.rl.supervised import check_temperature, prompt_and_answer

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.dataset import Row
    from stretto.models.tokenizer import Tokenizer
    from stretto.rl.batch import Batch

__all__ = ["SFT", "SFTConfig"]


class SFTConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `sft`."""

    completion_column: str = "completion"
    """Column with the answer to the prompt: text, or chat messages of the assistant."""
    loss_mean: Reduction = "token"
    """`token`: every token of the batch counts alike; `sequence`: every answer does; `sequence_sum`: every
    answer, with the sum of its tokens instead of their mean."""


class SFT:
    """One policy, `actor`, and the rows."""

    models: Mapping[str, Model] = {"actor": Model()}

    def __init__(self, config: SFTConfig, context: Context) -> None:
        del context
        self.config = config

    def calls(self) -> Sequence[Call]:
        """read -> train."""
        return [read(self.encode), train("actor", Loss(self.loss, self.config.loss_mean), reads=())]

    def keep(self, group: Group) -> bool:
        """Every row is trained on."""
        del group
        return True

    def encode(self, row: Row, index: int, tokenizer: Tokenizer) -> Encoded:
        """Prompt and answer, the answer trained on."""
        del index
        return prompt_and_answer(row, self.config.completion_column, tokenizer)

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """-log pi, (T,)."""
        del batch
        return -logprobs, {"nll": -logprobs.detach()}


def check(config: SFTConfig, run: RunConfig) -> Iterator[Problem]:
    """The logprobs are to be the model's own."""
    del config
    yield from check_temperature(run)


@hookimpl
def stretto_algorithm() -> Iterator[Component[SFTConfig]]:
    """The component of this package."""
    yield Component(
        "sft",
        SFT,
        SFTConfig,
        "supervised fine-tuning on answers that are given",
        check,
        requires={"torch": "stretto[torch]"},
    )
