"""Reward `function`: a Python function of the user, named by file or by module."""

from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import Importable
from stretto.config import RunConfig
from stretto.user_code.importable import fault_of_importable, load_importable

__all__ = ["FunctionConfig"]


class FunctionConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `function`."""

    function: Importable
    """The function, as `path.py:name` or `module:name`. It has either signature of `stretto.reward`, of which
    one is TRL's."""


def make(config: FunctionConfig, context: Context) -> Callable[..., Any]:
    """Load and return the user's function. The child process that calls it imports its module."""
    del context
    return load_importable(config.function)


def check(config: FunctionConfig, run: RunConfig) -> Iterator[Problem]:
    del run
    if fault := fault_of_importable(config.function):
        yield Problem("reward.function", fault)


@hookimpl
def stretto_reward() -> Iterator[Component[FunctionConfig]]:
    yield Component("function", make, FunctionConfig, "a Python function of your own", check)
