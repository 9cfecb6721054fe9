"""Whether an object keeps the contract of its kind: its members are there, and take what they are given.

A contract is a protocol such as `stretto.engine.InferenceEngine`. The core gives each method what the
protocol names: arguments by place, those after `*` by name. Private to the core; plugin authors need the
protocols only.
"""

from __future__ import annotations

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

__all__ = ["CONTRACTS", "expect_contract"]

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


def expect_contract(made: object, contract: type, label: str) -> None:
    """Refuse an object that does not keep a contract.

    Args:
        label: what the object is, for the message.

    Raises:
        ContractError: naming every member at fault, the contract, and where the object's class is.
    """
    if faults := list(_faults(made, contract)):
        raise ContractError(
            f"{label} does not keep its contract, {contract.__module__}.{contract.__name__}: "
            f"{type(made).__name__} {', and '.join(faults)}{_place_of_class(type(made))}"
        )


def _faults(made: object, contract: type) -> Iterator[str]:
    for name, promised in vars(contract).items():
        if isinstance(promised, property):
            yield from _attribute_faults(made, name)
        elif isinstance(promised, FunctionType) and promised.__module__ == contract.__module__:
            yield from _method_faults(made, name, promised)


def _attribute_faults(made: object, name: str) -> Iterator[str]:
    found = inspect.getattr_static(made, name, None)  # a property is not to be computed here
    if found is None and not hasattr(made, name):
        yield f"has no attribute {name!r}"
    elif inspect.isfunction(found):
        yield f"has a method {name!r} where an attribute or a property is expected"


def _method_faults(made: object, name: str, promised: FunctionType) -> Iterator[str]:
    method = getattr(type(made) if name.startswith("__") else made, name, None)
    if method is None:
        yield f"has no method {name!r}"
    elif not callable(method):
        yield f"has {name!r}, which cannot be called"
    elif inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(promised):
        yield f"has {name!r} as `async def`, and it is not awaited; expected a plain `def`"
    else:
        with_self = [made] if name.startswith("__") else []
        yield from _signature_faults(name, method, with_self, promised)


def _signature_faults(
    name: str, method: Callable[..., Any], first: list[object], promised: FunctionType
) -> Iterator[str]:
    """Bind what the core gives the method; a contract that says `*args` leaves its arguments free."""
    _, *parameters = inspect.signature(promised).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    placed = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    try:
        signature = inspect.signature(method)
    except ValueError:  # of something built in, which has none to be read
        return
    try:
        signature.bind(*first, *placed, **dict.fromkeys(named))
    except TypeError as error:
        given = ", ".join([*placed, *(f"{each}=" for each in named)])
        own = ", ".join(list(signature.parameters)[len(first) :])
        yield f"has {name}({own}), which is called as {name}({given}): {error}"


def _place_of_class(kind: type) -> str:
    try:
        return f" ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # made at run time, or built in
        return ""
