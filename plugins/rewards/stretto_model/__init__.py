"""Reward `model`: the score of a reward model, for example one trained with the algorithm `reward_model`.

The model reads prompt and answer through its own tokenizer and chat template, as `reward_model` encodes them,
so its vocabulary may differ from the policy's. The score at the last token is the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import ModelSource

if TYPE_CHECKING:
    from stretto.config import RunConfig
    from stretto.tokenizer import Tokenizer

__all__ = ["ModelRewardConfig"]


class ModelRewardConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `model`."""

    path: ModelSource
    """Folder or hub id of a model with one score per token (`…ForTokenClassification` with one label), such
    as `checkpoints/step-000100/model` of a run of the algorithm `reward_model`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; `auto` uses a GPU if the process can see one."""
    scale: float = 1.0
    """Factor by which the score is multiplied."""


def make(config: ModelRewardConfig, context: Context) -> Callable[..., list[float]]:
    """Return the scoring function; it scores all answers of a group at once."""
    del context
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForTokenClassification

    from stretto.models.tokenizer import load_tokenizer

    use_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    tokenizer = load_tokenizer(config.path)
    model: Any = AutoModelForTokenClassification.from_pretrained(
        config.path, dtype=torch.float32, use_safetensors=True
    )
    if model.config.num_labels != 1:
        raise ValueError(f"{config.path!r} gives {model.config.num_labels} numbers per token; expected one")
    model = model.to("cuda" if use_gpu else "cpu").eval()

    @torch.no_grad()
    def score(completions: list[Any], prompts: list[Any], **columns: Any) -> list[float]:
        del columns
        texts = [
            _encode(prompt, completion, tokenizer)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        lengths = torch.tensor([len(text) for text in texts])
        tokens = [torch.tensor(text, dtype=torch.long) for text in texts]
        ids = pad_sequence(tokens, batch_first=True)  # (S, L), padded on the right
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        scores = model(
            input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device), use_cache=False
        ).logits  # (S, L, 1)
        last = scores[torch.arange(len(texts)), lengths - 1, 0]
        return (config.scale * last.float()).tolist()

    return score


def _encode(prompt: Any, completion: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt and an answer: both are text, or both are chat messages."""
    from stretto.models.chats import encode_chat

    if isinstance(prompt, str):
        return [*tokenizer.encode_prompt(prompt), *tokenizer.encode_answer(completion, prompt=prompt)]
    pieces = encode_chat(prompt, completion, tokenizer, complete=False)
    return [id for piece in pieces for id in piece.ids]


def check(config: ModelRewardConfig, run: RunConfig) -> Iterable[Problem]:
    """Check that a local folder contains a model."""
    del run
    path = Path(config.path)
    if path.is_dir() and not (path / "config.json").exists():
        yield Problem("reward.path", f"{config.path!r} is not a model: the folder has no config.json")


@hookimpl
def stretto_reward() -> Iterator[Component[ModelRewardConfig]]:
    yield Component(
        "model",
        make,
        ModelRewardConfig,
        "the score of a reward model",
        check,
        requires={"torch": "stretto[torch]"},
    )
