"""(torch) The model: it runs in threads, one call at a time. R: running samples, T: columns of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from stretto.errors import EngineError, WeightsError
from stretto.models.digest import tensor_hash


class Decoder:
    """A model of transformers, and the keys and values of the running samples.

    The texts in the cache end in the same column. Shorter ones begin with columns that the mask hides.
    """

    def __init__(self, source: str, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot load the model {source!r}: {error}") from error
        self._model = model.eval().requires_grad_(False)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        eos: int | list[int] | None = model.generation_config.eos_token_id
        self.eos = [eos] if isinstance(eos, int) else eos or []
        self.forget()

    def forget(self) -> None:
        """Drop the cache, so that the next step computes it again."""
        self._rows: dict[int, int] = {}
        self._layers: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def step(self, texts: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Return the logits, (V,) float64, of the token after each text. Each text that the cache has from
        the step before is one token longer now.

        Args:
            texts: number of the sample -> prompt and answer so far.
        """
        self._keep([row for row in self._rows if row in texts])
        new = [row for row in texts if row not in self._rows]
        logits = self._decode([texts[row][-1] for row in self._rows]) if self._rows else {}
        for row in new:
            logits[row] = self._prefill(row, texts[row])
        return logits

    @torch.inference_mode()
    def logprobs(self, sequence: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the logprobs of all tokens but the first, (L - 1,), at temperature 1."""
        tokens = torch.from_numpy(sequence.astype(np.int64))
        logprobs = self._model(tokens[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        return logprobs.gather(1, tokens[1:, None])[:, 0].float().numpy()

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Check all tensors, then copy them into the model. Return the hash of each loaded tensor.

        Raises:
            WeightsError: if they do not fit; the model is unchanged then.
        """
        own = dict(self._model.named_parameters())
        for name in own.keys() | tensors.keys():
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                raise WeightsError(f"tensor {name!r} of version {version} does not fit", version=version)
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        return {name: tensor_hash(own[name].to(tensor.dtype)) for name, tensor in tensors.items()}

    def _decode(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """Compute one token of every row in the cache."""
        lengths = torch.tensor(list(self._rows.values()))
        columns = torch.arange(int(lengths.max()) + 1)
        hidden = lengths.max() - lengths
        cache = self._cache()
        logits = self._model(
            input_ids=torch.tensor(tokens)[:, None],
            position_ids=lengths[:, None],
            attention_mask=(columns >= hidden[:, None]).long(),
            past_key_values=cache,
        ).logits[:, -1]
        self._layers = [(layer.keys, layer.values) for layer in cache.layers]
        self._rows = {row: length + 1 for row, length in self._rows.items()}
        return dict(zip(self._rows, logits.double(), strict=True))

    def _prefill(self, row: int, text: Sequence[int]) -> Tensor:
        """Compute a whole text, and add it to the cache as the last row."""
        cache: Any = DynamicCache()
        logits = self._model(torch.tensor([text]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
        own = [(layer.keys, layer.values) for layer in cache.layers]
        if self._rows:
            own = [
                (_stack(keys, own_keys), _stack(values, own_values))
                for (keys, values), (own_keys, own_values) in zip(self._layers, own, strict=True)
            ]
        self._layers = own
        self._rows[row] = len(text)
        return logits.double()

    def _keep(self, rows: Sequence[int]) -> None:
        """Remove the other rows from the cache, and the columns that only they needed."""
        if len(rows) == len(self._rows):
            return
        order = list(self._rows)
        self._rows = {row: self._rows[row] for row in rows}
        index, length = torch.tensor([order.index(row) for row in rows]), max(self._rows.values(), default=0)
        self._layers = [
            (keys[index, :, -length:], values[index, :, -length:]) for keys, values in self._layers if rows
        ]

    def _cache(self) -> Any:
        cache: Any = DynamicCache()
        for number, (keys, values) in enumerate(self._layers):
            cache.update(keys, values, number)
        return cache


def _stack(rows: Tensor, own: Tensor) -> Tensor:
    """Add a row, (1, heads, T', size), to others, (R, heads, T, size); the shorter get columns in front."""
    length = max(rows.shape[2], own.shape[2])
    padded = [torch.nn.functional.pad(part, (0, 0, length - part.shape[2], 0)) for part in (rows, own)]
    return torch.cat(padded)
