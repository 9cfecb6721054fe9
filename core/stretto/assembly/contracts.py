"""Check that an object keeps the contract of its kind, a protocol such as `stretto.engine.InferenceEngine`.

The core calls methods with the protocol's arguments: by position, and after `*` by name. Private to the core.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from stretto.algorithm import Algorithm
from stretto.component import Kind
from stretto.dataset import Dataset
from stretto.engine import InferenceEngine, TrainingEngine
from stretto.errors import ContractError
from stretto.launcher import Launcher
from stretto.reward import Reward
from stretto.tracker import Tracker
from stretto.weights import WeightsTransport
from stretto.workflow import Workflow

CONTRACTS: dict[Kind, type] = {
    "algorithm": Algorithm,
    "training": TrainingEngine,
    "inference": InferenceEngine,
    "workflow": Workflow,
    "reward": Reward,
    "dataset": Dataset,
    "launcher": Launcher,
    "weights": WeightsTransport,
    "tracker": Tracker,
}


def expect_contract(component: object, contract: type, label: str) -> None:
    """Refuse an object that does not keep a contract."""
    if faults := list(_faults(component, contract)):
        raise ContractError(
            f"{label} does not keep its contract, {contract.__module__}.{contract.__name__}: "
            f"{type(component).__name__} {', and '.join(faults)}{_place_of_class(type(component))}"
        )


def _faults(component: object, contract: type) -> Iterator[str]:
    for name, member in vars(contract).items():
        if isinstance(member, property):
            yield from _attribute_faults(component, name)
        elif isinstance(member, FunctionType) and member.__module__ == contract.__module__:
            yield from _method_faults(component, name, member)


def _attribute_faults(component: object, name: str) -> Iterator[str]:
    attribute = inspect.getattr_static(component, name, None)  # do not compute a property here
    if attribute is None and not hasattr(component, name):
        yield f"has no attribute {name!r}"
    elif inspect.isfunction(attribute):
        yield f"has a method {name!r}; expected an attribute or a property"


def _method_faults(component: object, name: str, contract_method: FunctionType) -> Iterator[str]:
    method = getattr(type(component) if name.startswith("__") else component, name, None)
    if method is None:
        yield f"has no method {name!r}"
    elif not callable(method):
        yield f"has {name!r}, which cannot be called"
    elif inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(contract_method):
        yield f"has {name!r} as `async def`, but stretto does not await it; expected a plain `def`"
    else:
        with_self = [component] if name.startswith("__") else []
        yield from _signature_faults(name, method, with_self, contract_method)


def _signature_faults(
    name: str, method: Callable[..., Any], first: list[object], contract_method: FunctionType
) -> Iterator[str]:
    """Yield a fault unless the method accepts the core's arguments. `*args` in a contract allows any."""
    _, *parameters = inspect.signature(contract_method).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    try:
        signature = inspect.signature(method)
    except ValueError:  # a builtin may have no signature
        return
    try:
        signature.bind(*first, *positional, **dict.fromkeys(keywords))
    except TypeError as error:
        arguments = ", ".join([*positional, *(f"{keyword}=" for keyword in keywords)])
        accepted = ", ".join(list(signature.parameters)[len(first) :])
        yield f"has {name}({accepted}), but stretto calls {name}({arguments}): {error}"


def _place_of_class(kind: type) -> str:
    try:
        return f" ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # the class was made at run time, or is a builtin
        return ""
