"""Load a model and choose its decoder, which is tested against the plain forward of transformers."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from stretto.errors import ConfigError, EngineError
from stretto.machine.cores import available_memory
from stretto.models.files import positions_of
from stretto.models.finite import not_finite
from stretto.training.device import compute_device, is_gpu
from stretto.training.model import load_whole, names_in_files, reads_images
from stretto.training.trial import Unsuitable, attempt
from stretto_torch import TorchInferenceConfig, slots_within, tokens_within
from stretto_torch.decoder import Decoder
from stretto_torch.decoder_fast import FastDecoder, check_suitable
from stretto_torch.decoder_graphs import GraphDecoder
from stretto_torch.decoder_hf import HFDecoder, layer_shapes
from stretto_torch.images import ImageReader
from stretto_torch.linear import prefers_onednn
from stretto_torch.shapes import Shapes, TokenSpan, padded_length, padded_rows
from stretto_torch.swap import Targets

log = structlog.get_logger(__name__)

# Root mean square of the difference of logits, relative to their standard deviation, that rounding can
# explain; about 1e-6 and 1e-2 are usual. A wrong decoder differs by tenths, or by 1e-3 on an untrained model.
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be served."""

    decoder: Decoder
    targets: Targets  # the tensors that new weights are copied into, by their names in the model's files
    shapes: Shapes
    eos: tuple[int, ...]  # tokens that end an answer
    reader: ImageReader | None = None  # reader of the images in prompts; None for a model of text


def load_model(folder: str, config: TorchInferenceConfig, samples_in_flight: int = 0) -> LoadedModel:
    device, dtype = compute_device(config.device, config), getattr(torch, config.compute_dtype)
    transformers_logging.disable_progress_bar()  # logs are files
    try:
        has_vision = reads_images(AutoConfig.from_pretrained(folder))
        kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        model: Any = load_whole(kind, folder, dtype=dtype)
        reader = ImageReader(folder, model) if has_vision else None
    except ConfigError as error:
        raise EngineError(str(error)) from error
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot load the model {folder!r}: {error}") from error
    model.to(device).eval().requires_grad_(False)
    length = _context(folder, config)
    sample_bytes, memory = length * _bytes_of_a_token(model), _memory(model.device, config.share)
    slots = config.slots or slots_within(config, samples_in_flight, sample_bytes, memory)
    shapes = Shapes(slots, length)
    decoder = _choose(model, shapes, config, reader)
    targets = decoder.targets.renamed(names_in_files(model, folder))
    return LoadedModel(decoder, targets, shapes, _eos(model), reader)


def _choose(model: Any, shapes: Shapes, config: TorchInferenceConfig, reader: ImageReader | None) -> Decoder:
    fault = "it reads images"
    if reader is None:
        decoder, fault = attempt(partial(_fast_decoder, model, shapes, config))
        if decoder is not None:
            return decoder
        log.info("transformers runs the model, not the hand-written decoder", why=fault)
    if config.cuda_graphs:
        raise EngineError(
            f"inference.cuda_graphs: only the hand-written decoder captures steps, and it cannot run this"
            f" model: {fault}; set cuda_graphs to false"
        )
    tokens = _cache_tokens(model, shapes, config, padded_rows(1))
    decoder = HFDecoder(model, shapes.most_rows, shapes.length, tokens, reader)
    _refuse_unless_same(decoder, model, difference(decoder, model))
    if reader is not None:
        _refuse_unless_same(decoder, model, difference_with_image(decoder, model, reader))
    return decoder


def _fast_decoder(model: Any, shapes: Shapes, config: TorchInferenceConfig) -> Decoder:
    onednn = prefers_onednn(config.linear, model.device, model.dtype)
    rows, length = shapes.most_rows, shapes.length
    check_suitable(model)
    kind = GraphDecoder if config.cuda_graphs else FastDecoder
    decoder = kind(model, rows, length, _cache_tokens(model, shapes, config, 1), onednn=onednn)
    deviation = difference(decoder, model)
    if not deviation <= _ROUNDING[model.dtype]:  # also refuses NaN
        raise Unsuitable(f"its logits differ by {deviation:.1e} of their deviation")
    return decoder


def _refuse_unless_same(decoder: Decoder, model: Any, deviation: float) -> None:
    if not deviation <= _ROUNDING[model.dtype]:  # also refuses NaN
        for name, tensor in model.state_dict().items():
            if fault := not_finite(name, tensor):
                raise EngineError(f"the torch engine cannot serve the model: {fault}")
        raise EngineError(
            f"{decoder.name} does not compute over slots what it computes over a whole text (logits differ"
            f" by {deviation:.1e} of their deviation); the torch engine cannot serve it; use vllm or sglang"
        )


def _memory(device: torch.device, share: float) -> float:
    if is_gpu(device):
        return torch.get_device_module(device).get_device_properties(device).total_memory * share
    return available_memory()


def _bytes_of_a_token(model: Any) -> int:
    return sum(2 * shape.kv_heads * shape.head_dim for shape in layer_shapes(model)) * model.dtype.itemsize


def _cache_tokens(model: Any, shapes: Shapes, config: TorchInferenceConfig, rows: int) -> int:
    """Return the number of tokens of the cache: as many as the slots can use, or as the memory allows, but at
    least the longest sample in each of `rows` rows, which the decoder computes for one sample."""
    max_tokens = shapes.most_rows * shapes.length
    size = _bytes_of_a_token(model)
    min_tokens = max(rows * shapes.length, 64)  # the decoder's test needs 64
    if config.cache_gb is None:
        return tokens_within(max_tokens, min_tokens, size, _memory(model.device, config.share))
    tokens = int(config.cache_gb * 2**30 / size)
    if tokens < min_tokens:
        raise EngineError(
            f"inference.cache_gb is {config.cache_gb:g}, {tokens} tokens of {size} bytes; it must hold"
            f" {min_tokens}, because inference.context_length is {shapes.context}: raise cache_gb or lower"
            " context_length"
        )
    return min(max_tokens, tokens)


def difference(decoder: Decoder, model: Any) -> float:
    """Return the difference between a decoder's logits and the model's own, for prompts of several lengths,
    decoded tokens, and texts that continue after the tokens in their slots."""
    prompts, cached, steps = (9, 20), (5, 13), 4
    length = max(prompts) + steps
    tokens = torch.arange(7, 7 + length * len(prompts)).mul(7919).remainder(decoder.vocabulary)
    tokens = tokens.view(len(prompts), length).to(model.device)
    full_logits = model(input_ids=tokens).logits.float()

    positions, begins = (torch.tensor(lengths, device=model.device) for lengths in (prompts, cached))
    rows = torch.arange(len(prompts), device=model.device)
    decoder.cache.place_evenly(padded_length(length), len(prompts))
    logits = [decoder.prefill(tokens[:, : max(prompts)], positions, rows)]
    spans = [TokenSpan(0, len(prompts), padded_length(length))]
    expected = [full_logits[rows, positions - 1]]
    for _ in range(steps):
        logits.append(decoder.decode(tokens[rows, positions], positions, spans).clone())
        expected.append(full_logits[rows, positions])
        positions = positions + 1
    columns = torch.arange(int((positions - begins).max()), device=model.device)
    tails = tokens.gather(1, (begins.unsqueeze(1) + columns).clamp(max=length - 1))
    logits.append(decoder.prefill(tails, positions - begins, rows, begins))
    expected.append(full_logits[rows, positions - 1])
    return _relative(torch.stack(logits), torch.stack(expected))


def difference_with_image(decoder: Decoder, model: Any, reader: ImageReader) -> float:
    """Return the difference between a decoder's logits and the model's own for a prompt with an image,
    decoded tokens, and a text that continues after the image in its slot."""
    steps, blank = 4, reader.vision.blank()
    text = (
        torch.arange(11, 16 + steps).mul(7919).remainder(min(decoder.vocabulary, reader.vision.image_token))
    )
    ids = torch.cat([torch.from_numpy(blank.ids).long(), text]).to(model.device)[None]
    prompt = ids.shape[1] - steps
    images = reader.images(ids[0, :prompt].cpu().numpy().astype(np.int32), blank.media, ["blank"])
    full_logits = model(input_ids=ids, **images.media, **reader.marks(ids)).logits.float()[0]

    lengths, row = torch.tensor([prompt], device=model.device), torch.tensor([0], device=model.device)
    shifts = torch.tensor([images.shift], device=model.device)
    capacity = padded_length(ids.shape[1])
    decoder.cache.place_evenly(capacity, 1)
    logits = [decoder.prefill(ids[:, :prompt], lengths, row, images=images)]
    for step in range(steps):
        position = lengths + step
        logits.append(decoder.decode(ids[0, position], position, [TokenSpan(0, 1, capacity)], shifts))
    begins = lengths - 2
    tail = ids[:, prompt - 2 :]
    logits.append(decoder.prefill(tail, torch.full_like(lengths, tail.shape[1]), row, begins, shifts=shifts))
    expected = torch.stack([*full_logits[prompt - 1 :], full_logits[-1]])
    return _relative(torch.cat(logits), expected)


def _relative(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).square().mean().sqrt() / expected.std())


def _context(folder: str, config: TorchInferenceConfig) -> int:
    length, max_positions = config.room(folder), positions_of(folder)
    if max_positions is not None and length > max_positions:
        raise EngineError(f"inference.context_length is {length}; the model has {max_positions} positions")
    return length


def _eos(model: Any) -> tuple[int, ...]:
    """Return the end-of-text tokens, from the generation config if it has them, as in transformers."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids: int | Iterable[int] | None = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
