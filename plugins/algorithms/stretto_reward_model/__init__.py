"""Algorithm `reward_model`: train a reward model on pairs of a chosen and a rejected answer.

Bradley and Terry 1952, as in Stiennon et al. 2020 (arXiv 2009.01325), section 3.4: -log sigmoid(r_c - r_r -
margin), where r is the score at the last token of prompt and answer. The loss determines scores only up to a
constant; `centering` adds centering · (r_c + r_r)^2 to the loss of a pair (Eisenstein et al. 2023,
2312.09244), which keeps them around 0.

Each sequence of a pair carries the pair's loss at its last token, its only trained token, so the mean over
tokens is the mean over pairs.

Metrics, averaged over pairs: `accuracy`, the share of pairs with r_c > r_r, and `margin`, r_c - r_r.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stretto import Component, hookimpl
from stretto.algorithm import Call, Encoded, Loss, Model, read, train
from stretto.component import NonNegativeFloat
from stretto.rl.supervised import PairConfig, Supervised, check_pair, prompt_and_answer

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.dataset import Row
    from stretto.rl.batch import Batch
    from stretto.tokenizer import Tokenizer

__all__ = ["RewardModel", "RewardModelConfig"]


class RewardModelConfig(PairConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `reward_model`."""

    margin: NonNegativeFloat = 0.0
    """Margin by which the chosen answer's score must exceed the rejected answer's for a small loss."""
    centering: NonNegativeFloat = 0.0
    """Weight in the loss of the squared sum of a pair's scores, which keeps scores around 0; 0.01 is
    customary."""


class RewardModel(Supervised[RewardModelConfig]):
    """Trains one model, `reward`, on the rows."""

    models: Mapping[str, Model] = {"reward": Model(head="reward")}

    def calls(self) -> Sequence[Call]:
        """Return the dataflow read -> train. Pairs are never split."""
        return [
            read(self.encode, samples=2),
            train("reward", Loss(self.loss, "token", unit="group"), reads=("group",)),
        ]

    def encode(self, row: Row, index: int, tokenizer: Tokenizer) -> Encoded:
        """Encode the prompt and one answer, chosen (0) or rejected (1); only the last token is trained on."""
        tokens, mask = prompt_and_answer(row, self.config.columns[index], tokenizer)
        return Encoded(tokens, [False] * (len(mask) - 1) + [True])

    def loss(self, scores: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the pair's loss at the last token of each sequence, (T,), and statistics."""
        import torch

        from stretto.rl.functional import at_last_token, pairs_of, preference_loss, sequence_sum

        config, mask = self.config, batch["loss_mask"]
        index = batch.sequence_index().to(scores.device)
        answer_score = sequence_sum(torch.where(mask, scores, 0.0), index, len(batch))  # (S,)
        chosen, rejected, pair = pairs_of(batch["group"])
        margin = answer_score[chosen] - answer_score[rejected]  # (P,)
        losses = preference_loss(margin - config.margin)
        losses = losses + config.centering * (answer_score[chosen] + answer_score[rejected]).square()
        margin = margin.detach()
        return at_last_token(losses[pair], mask, index), {
            "accuracy": (margin > 0).float()[pair[index]],
            "margin": margin[pair[index]],
        }


@hookimpl
def stretto_algorithm() -> Iterator[Component[RewardModelConfig]]:
    yield Component(
        "reward_model",
        RewardModel,
        RewardModelConfig,
        "a reward model from pairs of answers (Bradley-Terry)",
        check_pair,
        requires={"torch": "stretto[torch]"},
    )
