"""Algorithms with one policy and no critic: GRPO and its relatives, a file each.

They differ in their advantages and objectives; `stretto.rl.policy_gradient` has the rest.
"""

from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Problem, hookimpl
from stretto.config import RunConfig
from stretto.rl.policy_gradient import PolicyConfig, PolicyGradient, check_policy
from stretto_policy_gradients.cispo import CISPO, CISPOConfig
from stretto_policy_gradients.dapo import DAPO, DAPOConfig, check_dapo
from stretto_policy_gradients.grpo import GRPO, GRPOConfig
from stretto_policy_gradients.gspo import GSPO, GSPOConfig
from stretto_policy_gradients.m2po import M2PO, M2POConfig
from stretto_policy_gradients.reinforce_pp import ReinforcePP, ReinforcePPConfig, check_reinforce_pp
from stretto_policy_gradients.rloo import RLOO, RLOOConfig
from stretto_policy_gradients.sapo import SAPO, SAPOConfig

__all__ = ["CISPO", "DAPO", "GRPO", "GSPO", "M2PO", "RLOO", "SAPO", "ReinforcePP"]
__all__ += ["CISPOConfig", "DAPOConfig", "GRPOConfig", "GSPOConfig"]
__all__ += ["M2POConfig", "RLOOConfig", "ReinforcePPConfig", "SAPOConfig"]

_ALGORITHMS: dict[str, tuple[type[PolicyGradient[Any]], type[PolicyConfig], str]] = {
    "cispo": (CISPO, CISPOConfig, "clipped importance-sampling weights: every token keeps its gradient"),
    "dapo": (DAPO, DAPOConfig, "clip-higher, dynamic sampling, overlong shaping"),
    "grpo": (
        GRPO,
        GRPOConfig,
        "group relative policy optimisation; the ratio is taken to the behaviour policy",
    ),
    "gspo": (GSPO, GSPOConfig, "group sequence policy optimisation: one clipped ratio per answer"),
    "m2po": (M2PO, M2POConfig, "second-moment trust region, for very stale samples"),
    "reinforce_pp": (
        ReinforcePP,
        ReinforcePPConfig,
        "REINFORCE++: returns whitened over the batch, optional group baseline",
    ),
    "rloo": (RLOO, RLOOConfig, "REINFORCE with the mean reward of the group's other samples as the baseline"),
    "sapo": (SAPO, SAPOConfig, "soft adaptive policy optimisation: a sigmoid gate instead of the clip"),
}
_CHECKS: dict[str, Callable[[Any, RunConfig], Iterator[Problem]]] = {
    "dapo": check_dapo,
    "reinforce_pp": check_reinforce_pp,
}
"""The others have `check_policy`."""


@hookimpl
def stretto_algorithm() -> Iterator[Component[Any]]:
    for name, (algorithm, config, summary) in _ALGORITHMS.items():
        check = _CHECKS.get(name, check_policy)
        yield Component(name, algorithm, config, summary, check, requires={"torch": "stretto[torch]"})
