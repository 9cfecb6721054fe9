"""Download a model from the Hugging Face hub before the processes that need it start."""

import json
from collections.abc import Callable

from stretto.models.files import cached_file

__all__ = ["download"]

_BESIDE = (".json", ".txt", ".model", ".jinja")
"""Suffixes of the files beside the weights: configs, tokenizer, template."""
_TIMEOUT_S = 5.0  # protects a start without a network from a long wait for the hub


def download(model: str, say: Callable[[str, str], None]) -> None:
    """Download the files of a hub id's model that this machine lacks, with a progress bar. `say` receives
    (`note` or `warning`, text): what is downloaded, or why the download is left to the workers."""
    if _is_cached(model):
        return
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        info = HfApi().model_info(model, files_metadata=True, timeout=_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        top = {name: size for name, size in sizes.items() if "/" not in name}
        weights = [name for name in top if name.endswith(".safetensors")]  # engines load no others
        model_files = [name for name in weights if name.startswith("model")]  # no second copy by the maker
        names = [*(name for name in top if name.endswith(_BESIDE)), *(model_files or weights)]
        names = [name for name in names if not cached_file(model, name)]
        if not names:
            return
        size = sum(top[name] for name in names) / 1e9
        say("note", f"downloading {model} from the hub: {size:.2f} GB, into {constants.HF_HUB_CACHE}")
        snapshot_download(model, allow_patterns=names)
    except Exception as error:  # noqa: BLE001 - the exceptions differ between versions of the hub's client
        reason = str(error).partition("\n")[0] or type(error).__name__
        say("warning", f"{model} is not downloaded yet, and the workers try it again: {reason}")


def _is_cached(model: str) -> bool:
    if cached_file(model, "model.safetensors"):
        return True
    index = cached_file(model, "model.safetensors.index.json")
    files: dict[str, str] = json.loads(index.read_text())["weight_map"] if index else {}
    return bool(files) and all(cached_file(model, file) for file in {*files.values()})
