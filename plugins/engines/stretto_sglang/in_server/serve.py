"""Start an SGLang server, in SGLang's own interpreter: `serve.py [any flag of the server]`.

It passes the key in the variable STRETTO_SERVER_KEY to the server, so that no command line shows it. It keeps
the key out of the log. With SGLANG_USE_CPU_ENGINE=1 SGLang runs on machines without its CPU kernels (AMX).

The code above `main` runs at import on purpose: SGLang spawns processes that each import this file again.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import runpy
import sys
import types
from typing import Any

_KEY = os.environ.get("STRETTO_SERVER_KEY", "")
_ON_CPU = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
_absent = {"sgl_kernel"}
_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


class _Record(logging.LogRecord):
    """A log record in which the key is replaced by asterisks: SGLang logs all its arguments."""

    def getMessage(self) -> str:  # noqa: N802 - the name is the standard library's
        message = super().getMessage()
        return message.replace(_KEY, "***") if _KEY else message


logging.setLogRecordFactory(_Record)


class _Placeholder(types.ModuleType):
    """A module that is imported but not used. Calling anything in it raises an error."""

    __path__ = []  # noqa: RUF012 - what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        child = sys.modules.setdefault(full, _Placeholder(full))
        setattr(self, name, child)
        return child

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no implementation for CPUs here")


class _PlaceholderFinder:
    """Finds placeholders for `sgl_kernel`, whose wheel has only CUDA kernels (SGLang imports it to move its
    cache and for speculative decoding), and for a missing `torchvision`, which only models of images need."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in _absent:
            loader: Any = _PlaceholderFinder
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
        return None

    @staticmethod
    def create_module(spec: Any) -> types.ModuleType:
        return _Placeholder(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass


if _ON_CPU:
    # transformers remembers whether torchvision is installed; let it look before the placeholder exists.
    import torch
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        _absent.add("torchvision")
    sys.meta_path.insert(0, _PlaceholderFinder)
    # The processor of Qwen's images imports a newer model, which binds these operators at its import.
    for _name in _OPERATORS:
        setattr(torch.ops.sgl_kernel, _name, _Placeholder(f"torch.ops.sgl_kernel.{_name}"))


def main() -> None:
    """Start the server as its own command line does."""
    if _KEY:
        sys.argv += ["--api-key", _KEY]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
