"""Read a model's files, in a folder or in the hub's cache, without torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from stretto.errors import ConfigError
from stretto.models.safetensors import Place, places_in

__all__ = [
    "cache_bytes",
    "end_tokens_in",
    "fetch_config",
    "fingerprint_of",
    "folder_of_model",
    "is_hybrid",
    "known_config",
    "modelling_imports",
    "needs_padding",
    "pieces_of",
    "positions_of",
    "shapes_in",
    "tensors_of_model",
    "text_config",
    "vocabulary_of",
    "writes_date",
]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folders made in it are private and named after the run


def known_config(model: str | None) -> Mapping[str, Any]:
    """Return a model's `config.json` if it is on this machine or in the hub's cache; otherwise empty."""
    path = _file_of(model, "config.json")
    return {} if path is None else _read(path)


def _file_of(model: str | None, name: str) -> Path | None:
    if model is None:
        return None
    path = Path(model, name) if Path(model).is_dir() else cached_file(model, name)
    return path if path is not None and path.is_file() else None


def cached_file(model: str, name: str) -> Path | None:
    """Return a file of a hub id's model in the hub's cache; None if this machine does not have it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError:  # not a valid name of a model; `check` reports that
        return None
    return Path(cached) if isinstance(cached, str) else None


def fetch_config(model: str | None) -> Mapping[str, Any]:
    """Return a model's `config.json`, or download it; ConfigError if that fails. Empty without a model."""
    config = known_config(model)
    if config or model is None:
        return config
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return _read(Path(hf_hub_download(model, "config.json")))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(f"model {model!r} has no config.json that can be read: {error}") from error


def text_config(model: str | None) -> Mapping[str, Any]:
    """Return the section of the text model in the config that `known_config` finds."""
    config = known_config(model)
    return config.get("text_config") or config


def positions_of(model: str | None) -> int | None:
    """Return the number of a model's positions; None if its config has no such key. With longrope, a text is
    rotated by the longest of its batch, and only up to the original positions always in the same way. YaRN
    multiplies the original ones, also where the config still has their number."""
    config = text_config(model)
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if {"longrope", "su"} & {rope.get("rope_type"), rope.get("type")}:
        key = "original_max_position_embeddings"
        return rope.get(key) or config.get(key) or config.get("max_position_embeddings")
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if positions and "yarn" in (rope.get("rope_type"), rope.get("type")):
        original = rope.get("original_max_position_embeddings") or positions
        return max(positions, int(original * rope.get("factor", 1)))
    return positions


def vocabulary_of(model: str | None) -> int | None:
    """Return a model's number of token ids; None if its config has no such key."""
    return text_config(model).get("vocab_size")


def pieces_of(model: str | None) -> tuple[dict[int, str], list[str]] | None:
    """Return what each token id of a model stands for, and the merges of its vocabulary, from the model's
    `tokenizer.json`; None if this machine does not have the file."""
    if (path := _file_of(model, "tokenizer.json")) is None:
        return None
    written = _read(path)
    vocabulary, merges = written["model"]["vocab"], written["model"].get("merges") or ()
    if isinstance(vocabulary, list):
        pieces = {id: piece for id, (piece, *_) in enumerate(cast("list[list[Any]]", vocabulary))}
    else:
        pieces = {id: piece for piece, id in vocabulary.items()}
    pieces |= {token["id"]: token["content"] for token in written.get("added_tokens") or ()}
    return pieces, [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def is_hybrid(model: str | None) -> bool:
    """Return whether a model's config names layers other than full attention."""
    text = text_config(model)
    recurrent = any(word in key for key in text for word in ("mamba", "ssm", "linear_"))
    return recurrent or not set(text.get("layer_types") or ()) <= {"full_attention"}


def needs_padding(model: str | None) -> bool:
    """Return whether a hybrid's sequences cannot share a row here: it has sliding windows, or the packages
    whose kernels keep sequences apart are not installed."""
    kinds: list[str] = text_config(model).get("layer_types") or []
    kernels = "fla" if "linear_attention" in kinds else "mamba_ssm"
    is_installed = all(find_spec(package) for package in (kernels, "causal_conv1d"))
    return is_hybrid(model) and ("sliding_attention" in kinds or not is_installed)


def cache_bytes(model: str | None, item: int) -> int:
    """Return the bytes of a token's keys and values, with `item` bytes a number; 0 if a model's config does
    not say it, or has layers other than full attention."""
    text = text_config(model)
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    layers, kv_heads = text.get("num_hidden_layers"), text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    if not layers or not kv_heads or not size or is_hybrid(model):
        return 0
    return 2 * layers * kv_heads * size * item


def modelling_imports(model: str | None) -> tuple[str, ...]:
    """Return the slow imports with which transformers loads a model, if its `config.json` is known."""
    kind = str(known_config(model).get("model_type", "")).replace("-", "_")
    code = (f"transformers.models.{kind}.modeling_{kind}",) if kind.isidentifier() else ()
    return ("torch", "transformers", *code)


def folder_of_model(model: str | None) -> str | None:
    """Return the folder with a model's files, its own or in the hub's cache; None if there is none."""
    if model is None or Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(model, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def end_tokens_in(folder: str) -> frozenset[int]:
    """Return the tokens that end an answer, for the model in a folder."""
    end_tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(folder, name)
        if file.is_file():
            ends: int | list[int] | None = json.loads(file.read_text()).get("eos_token_id")
            end_tokens |= {ends} if isinstance(ends, int) else set(ends or ())
    return frozenset(end_tokens)


def writes_date(folder: str) -> bool:
    """Return whether the chat template of the model in a folder asks for today's date."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "processor_config.json")
    files = [*(Path(folder, name) for name in names), *Path(folder).glob("additional_chat_templates/*")]
    return any(b"strftime_now" in file.read_bytes() for file in files if file.is_file())


def shapes_in(folder: str) -> dict[str, tuple[int, ...]]:
    """Return tensor name -> shape, for the safetensors files in a folder; empty if there are none."""
    return {name: place.shape for name, place in places_in(Path(folder)).items()}


def parameters_in(folder: str) -> int:
    """Return the number of parameters in the safetensors files in a folder."""
    return sum(math.prod(shape) for shape in shapes_in(folder).values())


def tensors_of_model(model: str | None) -> dict[str, Place]:
    """Return tensor name -> its place, for a model in files with the names that Hugging Face uses; empty if
    `folder_of_model` finds none."""
    folder = folder_of_model(model)
    return places_in(Path(folder)) if folder is not None else {}


def fingerprint_of(model: str) -> str:
    """Return a text that changes with the names, shapes and first numbers of a model's tensors; empty if the
    model is not on this machine."""
    digest, tensors = hashlib.sha256(), tensors_of_model(model or None)
    for name, place in sorted(tensors.items()):
        digest.update(f"{name} {place.dtype} {place.shape}".encode())
        digest.update(replace(place, size=min(place.size, 2**14)).read())
    return digest.hexdigest() if tensors else ""


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", path="model") from error
