"""Tiny models for tests, and the numbers that transformers computes with them. They need `stretto[torch]`."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Reference", "TinyModel", "make_tiny_model"]

SPECIAL = ("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
VOCABULARY = len(SPECIAL) + 97
"""Vocabulary size of a tiny model. Not a multiple of the sizes to which engines pad their embeddings."""
POSITIONS = 1024
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write a random Qwen2 model into a folder and return the folder: float32, 2 heads of size 32, a token
    for each printable ASCII character. Distributions are peaked, so that wrong tokens or positions show."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        dtype="float32",
    )
    rng_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # norms and biases too: otherwise an error in them would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    torch.random.set_rng_state(rng_state)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> Any:
    """Make a byte-level BPE tokenizer without merges, which engines load without a special class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_of = {" ": "\u0120", "\n": "\u010a", "\t": "\u0109"}
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(bytes_of.get(c, c) for c in characters)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[END],
        additional_special_tokens=[*SPECIAL[1:3]],
        chat_template=_TEMPLATE,
    )


class Reference:
    """The outputs of a model folder in transformers' plain float32 forward. L: tokens, V: vocabulary size."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._model: Any = model.float().eval().requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as a trainer publishes them: tied tensors have one name."""
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return (L, V) the logits after each token."""
        import torch

        return self._model(torch.tensor([list(tokens)])).logits[0].double().numpy()

    def logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
    ) -> NDArray[np.float64]:
        """Return (A,) the logprobs of an answer's tokens. Temperature 0 gives those of temperature 1."""
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        return log_softmax(logits / (temperature or 1.0))[np.arange(len(answer)), list(answer)]

    def last_over(self, older: Reference, tokens: Sequence[int], kept: int) -> float:
        """Return the logprob of the last token under these weights, with the KV cache of the first `kept`
        tokens from `older` weights; 1 <= kept < L - 1."""
        import torch

        text = torch.tensor([list(tokens)])
        cache = older._model(text[:, :kept], use_cache=True).past_key_values
        logits = self._model(text[:, kept:-1], past_key_values=cache, use_cache=True).logits[0, -1]
        return float(log_softmax(logits.double().numpy())[tokens[-1]])


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithms of the probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True)
class TinyModel:
    """A tiny model on disk, with its reference."""

    folder: Path
    reference: Reference

    @classmethod
    def make(cls, folder: Path, *, seed: int, layers: int) -> TinyModel:
        """Make the folder (see `make_tiny_model`) and its reference."""
        return cls(make_tiny_model(folder, seed=seed, layers=layers), Reference(folder))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens."""
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(self.folder)
        return tokenizer.decode(list(tokens), skip_special_tokens=True)


@dataclass(frozen=True)
class NoModel:
    """Takes the place of a model and its reference for engines without a model. Its tensors mean nothing."""

    seed: int
    folder = Path()

    @property
    def reference(self) -> NoModel:
        """Return this object itself: tests compare no numbers."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of a version."""
        import torch

        return {"steps": torch.tensor([self.seed])}
