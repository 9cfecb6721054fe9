"""Reward `model`: the score of a reward model, for example one trained with the algorithm `reward_model`.

The model reads prompt and answer through its own tokenizer and chat template, as `reward_model` encodes them,
so its vocabulary may differ from the policy's. The reward is the score that the model's own class gives this
text alone, or gives its last token.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import ModelSource
from stretto.config import RunConfig
from stretto.errors import RewardError
from stretto.models.files import fetch_config, known_config, positions_of
from stretto.tokenizer import Tokenizer

__all__ = ["ModelRewardConfig"]

_OF_TEXT, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
_ENCODER = re.compile(
    "(?i).*(bert(?!decoder)|t5|data2vec|former|jina|layoutlm|bigbirdfor|markuplm|mpnet|xlm)"
    "|(bros|canine|electra|ernie(?!4)|esm|flaubert|fnet|funnel|gte|lilt|luke|mra|perceiver|tapas|xmod|yoso)"
)
"""Matches the architectures of transformers' encoders."""


class ModelRewardConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `model`."""

    path: ModelSource
    """Folder or hub id of a decoder with one label: `…ForTokenClassification`, such as
    `checkpoints/step-000100/model` of a run of the algorithm `reward_model`, or
    `…ForSequenceClassification`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; `auto` uses a GPU if the process can see one."""
    scale: float = 1.0
    """Factor by which the score is multiplied."""


def make(config: ModelRewardConfig, context: Context) -> Callable[..., list[float]]:
    """Return the scoring function; it scores all answers of a group at once."""
    del context
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    from stretto.models.tokenizer import load_tokenizer
    from stretto.training.model import load_whole

    use_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    tokenizer = load_tokenizer(config.path)
    scores_text = _architecture(fetch_config(config.path)).endswith(_OF_TEXT)
    kind = AutoModelForSequenceClassification if scores_text else AutoModelForTokenClassification
    model: Any = load_whole(kind, config.path, dtype=torch.float32)
    if model.config.num_labels != 1:
        raise ValueError(f"{config.path!r} gives {model.config.num_labels} numbers per token; expected one")
    model = model.to("cuda" if use_gpu else "cpu").eval()
    most = positions_of(config.path) or math.inf

    @torch.no_grad()
    def score(completions: list[Any], prompts: list[Any], **columns: Any) -> list[float]:
        del columns
        scores: list[float] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            # One text a call: classes that score a text look for its end by the id of padding.
            ids = torch.tensor(
                [_encode(prompt, completion, tokenizer, whole=scores_text)], device=model.device
            )
            if ids.numel() > most:
                raise RewardError(f"the text has {ids.numel()} tokens, and {config.path!r} reads {most:g}")
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            scores.append(config.scale * float(logits.flatten()[-1]))
        return scores

    return score


def _encode(prompt: Any, completion: Any, tokenizer: Tokenizer, *, whole: bool) -> list[int]:
    """Return the tokens of a prompt and an answer: both are text, or both are chat messages. `whole`: all
    that the template writes, also behind the end of the answer."""
    from stretto.chat.chats import encode_chat

    if isinstance(prompt, str):
        return [*tokenizer.encode_prompt(prompt), *tokenizer.encode_answer(completion, prompt=prompt)]
    if whole:
        text = tokenizer.render([*prompt, *completion], add_generation_prompt=False)
        return [*tokenizer.encode_text(text, whole=True)]
    pieces = encode_chat(prompt, completion, tokenizer, complete=False)
    return [id for piece in pieces for id in piece.ids]


def check(config: ModelRewardConfig, run: RunConfig) -> Iterable[Problem]:
    """Check that the model is a decoder with a head that scores texts or tokens, if its config is here."""
    del run
    path, model = Path(config.path), known_config(config.path)
    if path.is_dir() and not model:
        yield Problem("reward.path", f"{config.path!r} is not a model: the folder has no config.json")
    name = _architecture(model)
    if name and not name.endswith((_OF_TEXT, _OF_TOKENS)):
        yield Problem(
            "reward.path",
            f"{config.path!r} is a {name}, which has no head that scores; expected a decoder that ends in "
            f"{_OF_TEXT} or {_OF_TOKENS}, with one label",
        )
    elif name and (model.get("is_encoder_decoder") or _ENCODER.match(name)):
        yield Problem(
            "reward.path",
            f"{config.path!r} is a {name}, an encoder: it pools a text between marks of its own, and this "
            "reward gives it prompt and answer as a decoder reads them; expected a decoder, such as "
            f"Llama{_OF_TEXT}",
        )


def _architecture(model: Mapping[str, Any]) -> str:
    return (model.get("architectures") or [""])[0]


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
