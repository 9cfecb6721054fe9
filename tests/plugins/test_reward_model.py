"""The reward `model`: the score that the class of a checkpoint gives each text alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from stretto import Context
from stretto.errors import EngineError, RewardError
from stretto_model import ModelRewardConfig, check, make
from tiny_types import tiny_config
from vision_models import ascii_tokenizer

PROMPTS = ["a", "one prompt", "2"]
ANSWERS = ["b", " and a much longer answer", ""]


def saved(folder: Path, kind: Any, name: str, **options: Any) -> Any:
    model = kind.from_config(tiny_config(name, **options)).float().eval()
    model.save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return model


def scores(folder: Path) -> list[float]:
    score = make(
        ModelRewardConfig(use="model", path=str(folder), device="cpu"), Context(run="r", name="v", seed=1)
    )
    together = score(completions=ANSWERS, prompts=PROMPTS)
    alone = [score(completions=[b], prompts=[a])[0] for a, b in zip(PROMPTS, ANSWERS, strict=True)]
    assert together == alone
    return together


@pytest.mark.parametrize("pad", [0, 1], ids=["pad", "eos = pad"])
@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "llama", "qwen2", "bloom", "mixtral"])
def test_a_score_is_that_of_the_class_for_one_text(name: str, kind: Any, pad: int, tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path, kind, name, num_labels=1, pad_token_id=pad), ascii_tokenizer()
    assert not [*check(ModelRewardConfig(use="model", path=str(tmp_path)), None)]  # pyright: ignore[reportArgumentType]
    for prompt, answer, found in zip(PROMPTS, ANSWERS, scores(tmp_path), strict=True):
        ids = [*tokenizer.encode(prompt + answer), 1]  # a completion ends with the end of a text
        own = model(input_ids=torch.tensor([ids])).logits.detach()
        assert found == pytest.approx(float(own.flatten()[-1]), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["DebertaV2ForSequenceClassification"]}, "an encoder"),
        ({"architectures": ["BertForTokenClassification"]}, "an encoder"),
        ({"architectures": ["ModernBertForSequenceClassification"]}, "an encoder"),
        ({"architectures": ["ModernBertDecoderForSequenceClassification"]}, ""),
        ({"architectures": ["BartForSequenceClassification"], "is_encoder_decoder": True}, "an encoder"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "no head that scores"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "no head that scores"),
        ({"architectures": ["GPTNeoXForSequenceClassification"]}, ""),
        ({}, "no config.json"),
    ],
)
def test_only_decoders_with_a_score_are_taken(config: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    found = [*check(ModelRewardConfig(use="model", path=str(tmp_path)), None)]  # pyright: ignore[reportArgumentType]
    assert [words in problem.message for problem in found] == [True] * bool(words)


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_the_score_of_a_chat_is_at_the_end_that_its_class_reads(kind: Any, tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path, kind, "llama", num_labels=1, pad_token_id=0), ascii_tokenizer()
    template = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token + '#' }}{% endfor %}"
    tokenizer.chat_template = template + "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    config = ModelRewardConfig(use="model", path=str(tmp_path), device="cpu")
    [found] = make(config, Context(run="r", name="v", seed=1))(prompts=chat[:1], completions=chat[1:])
    ids = tokenizer.apply_chat_template([*chat[0], *chat[1]], return_dict=False)
    own = model(input_ids=torch.tensor([ids])).logits.detach().flatten()
    assert found == pytest.approx(
        float(own[-1 if kind is AutoModelForSequenceClassification else -2]), abs=1e-5
    )


def test_a_text_beyond_the_positions_has_no_score(tmp_path: Path) -> None:
    saved(tmp_path, AutoModelForSequenceClassification, "llama", num_labels=1, pad_token_id=0)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RewardError, match=r"the text has \d+ tokens, and .* reads 10"):
        scores(tmp_path)


def test_a_model_without_its_score_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, AutoModelForCausalLM, "llama", architectures=["LlamaForSequenceClassification"])
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(EngineError, match=r"lacks score.weight"):
        scores(tmp_path)
