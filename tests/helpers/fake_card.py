"""A GPU that computes nothing: tensors of `fakegpu:0` have shapes and no numbers, those of the host are real.

The real engines take steps on it. It counts reads of the host, the dtypes of matrix products and live bytes,
and an operation on a mix of devices raises. torch's FakeTensorMode would make the host's tensors fake too, so
`mask.nonzero()` of the engine raises in it, and attention becomes float32 products of all pairs. All private
names of torch are in this file. A process that imports it has the device until it ends.
"""

# torch has no types for what this file uses.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingParameterType=false

import weakref
from collections import Counter
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("fakegpu")
# A real `model.to(device)` keeps the parameters' identities, and so ties; for other classes torch needs this.
torch.__future__.set_swap_module_params_on_conversion(True)
torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
_module: Any = torch.fakegpu
_module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
_module.get_rng_state = lambda: torch.zeros(16, dtype=torch.uint8)
_module.synchronize = lambda: None
DEVICE = torch.device("fakegpu:0")


class Counts:
    """What happened on the card since `clear`."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        """Kind of transfer for which the host waits -> number."""
        self.products: Counter[str] = Counter()
        """dtype -> number of matrix products."""
        self.operations: Counter[str] = Counter()
        self.live = self.highest = 0
        """Bytes of the tensors that live, and the most since `clear`."""
        self._storages: set[int] = set()

    def clear(self) -> None:
        for counter in (self.reads, self.products, self.operations):
            counter.clear()
        self.highest = self.live

    def add(self, storage: torch.UntypedStorage) -> None:
        if (key := id(storage)) in self._storages:
            return
        self._storages.add(key)
        self.live += storage.nbytes()
        self.highest = max(self.highest, self.live)
        weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.live -= size


COUNTS = Counts()


class Dev(Tensor):
    """A tensor on the card: `meta`, on the device meta, has its shape."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> "Dev":
        self = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=DEVICE,
        )
        self.meta = meta
        COUNTS.add(meta.untyped_storage())
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: "Dev") -> None:
        Tensor.data.__set__(self, other)
        self.meta = other.meta

    def tolist(self) -> Any:
        COUNTS.reads["tolist"] += 1
        return torch.ones(self.shape, dtype=self.dtype).tolist()


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = str(operation).removeprefix("aten.")
    COUNTS.operations[name] += 1
    if name.startswith("_local_scalar_dense"):
        COUNTS.reads["item"] += 1
        return 1.0 if args[0].dtype.is_floating_point else args[0].dtype != torch.bool
    if name.startswith("equal"):
        COUNTS.reads["equal"] += 1
        return True
    if name.startswith(("index.", "index_put")) and any(
        isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
    ):
        COUNTS.reads["index by mask"] += 1
    if name.startswith("copy_") and not isinstance(args[0], Dev):
        COUNTS.reads["copy to the host"] += 1
        return args[0].fill_(1)
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "meta"}
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    crosses = name.startswith(("_to_copy", "copy_", "index", "_index_put"))  # CUDA takes the host's indices
    if not crosses and any(each.dim() for each in tensors if not isinstance(each, Dev)):
        raise RuntimeError(f"a mix of devices in {name}")
    own = {id(each.meta): each for each in tensors if isinstance(each, Dev)}
    bare_args, bare_kwargs = tree_map(_bare, (args, kwargs))
    result = operation(*bare_args, **bare_kwargs)
    if name.partition(".")[0] in ("mm", "bmm", "addmm"):
        COUNTS.products[str(result.dtype).removeprefix("torch.")] += 1
    if to_host:
        COUNTS.reads["copy to the host"] += 1
        return torch.ones(result.shape, dtype=result.dtype)

    def on_card(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return own[id(value)] if id(value) in own else Dev(value)

    return tree_map(on_card, result)


def _bare(value: Any) -> Any:
    if isinstance(value, Dev):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def _low(operation: Any) -> Any:
    """Return an operation as autocast runs it: in bfloat16."""

    def cast(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


class _Attention(torch.autograd.Function):
    """One fused kernel: it keeps its inputs, with the mask, its output and one float a query."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        COUNTS.operations["fused attention"] += 1
        shape = (*query.shape[:-1], value.shape[-1])
        output = Dev(torch.empty(shape, dtype=query.dtype, device="meta"))
        sums = Dev(torch.empty(query.shape[:-1], device="meta"))
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = ctx.saved_tensors[:3]
        return *(Dev(torch.empty(each.shape, dtype=each.dtype, device="meta")) for each in given), None


def _attend(query: Any, key: Any, value: Any, mask: Any = None, *_: Any, **__: Any) -> Any:
    return _Attention.apply(query, key, value, mask)


_LIBRARIES = [torch.library.Library(name, "IMPL") for name in ("_", "_", "aten", "aten")]
_LIBRARIES[0].fallback(lambda operation, *args, **kwargs: _run(operation, args, kwargs), "PrivateUse1")
_LIBRARIES[1].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention"):
    _LIBRARIES[2].impl(_name, _low(getattr(torch.ops.aten, _name)), "AutocastPrivateUse1")
for _key in ("AutogradPrivateUse1", "PrivateUse1"):
    _LIBRARIES[3].impl("scaled_dot_product_attention", _attend, _key)
