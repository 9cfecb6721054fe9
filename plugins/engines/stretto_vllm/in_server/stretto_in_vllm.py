"""Stretto's additions to a vLLM server, in vLLM's own interpreter: this file imports nothing of stretto.

- `Weights`, a worker extension: reads a folder of safetensors during sampling, then loads it at once.
- `RequireKey`, a middleware: requires the server's key on every path; vLLM itself requires it only on some.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class Weights:
    """Methods that vLLM adds to every worker of the server; /collective_rpc calls them."""

    model_runner: Any
    reload_weights: Any
    _stretto_reading: Any

    def stretto_loads(self) -> dict[str, Any]:
        """Confirm that this extension is installed."""
        return {"loads": "safetensors"}

    def stretto_read(self, folder: str) -> None:
        """Begin to read and hash the tensors of a folder, in a thread, while decoding continues."""
        self._stretto_reading = _TensorReader(folder)

    def stretto_have_read(self) -> dict[str, Any]:
        """Return whether reading is `done`; if so, also `error` and `hashes`: tensor name -> hash."""
        reading = self._stretto_reading
        if reading.is_alive():
            return {"done": False}
        return {"done": True, "error": reading.error, "hashes": reading.hashes}

    def stretto_load(self) -> dict[str, Any]:
        """Load the tensors that were read."""
        reading, self._stretto_reading = self._stretto_reading, None
        # Not `model.load_weights`: on CPU, weights are packed after a load; `reload_weights` unpacks them.
        self.reload_weights(weights_iterator=iter(reading.tensors.items()))
        for module in self.model_runner.get_model().modules():
            # A reload does not update the packed copy of a head on CPU that is tied to the embedding.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        return {"loaded": len(reading.tensors)}


class _TensorReader(threading.Thread):
    """Reads all files before the load: a load that fails half-way would leave an unusable model."""

    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.error = ""
        self.tensors: dict[str, torch.Tensor] = {}
        self.hashes: dict[str, str] = {}
        self.start()

    def run(self) -> None:
        try:
            for file in _files(self._folder):
                self.tensors.update(load_file(file))
            self.hashes = {name: tensor_hash(tensor) for name, tensor in self.tensors.items()}
        except Exception as error:  # noqa: BLE001 - the inference worker gets every error
            self.error = f"{type(error).__name__}: {error}"


def _files(folder: str) -> list[str]:
    files = [str(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}")
    return files


def tensor_hash(tensor: torch.Tensor) -> str:
    """Return a tensor's hash as `stretto.models.digest` defines it. A test compares the two functions."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), "x".join(map(str, tensor.shape))
    hasher = hashlib.sha256(f"stretto tensor\0{dtype} {shape}\n".encode())
    hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class RequireKey:
    """ASGI middleware. Only /health needs no key: it shows only that the server is running."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(header, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error":"this server requires its key"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
