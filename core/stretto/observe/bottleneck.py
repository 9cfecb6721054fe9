"""The part of a run that the others wait for most, from lines of `metrics.jsonl`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stretto.bus.messages.events import CauseKind

Part = Literal[
    "training",
    "generation",
    "verification",
    "workflow",
    "evaluation",
    "checkpoints",
    "publication",
    "swaps",
    "inference engines",
    "late tickets",
    "overhead",
]

_PARTS: dict[CauseKind, Part] = {
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "publication": "publication",
    "swap": "swaps",
    "engines": "inference engines",
    "overhead": "overhead",
}
"""Cause of a wait -> the part that training waits for. All other causes are a lack of groups."""
_OF_TICKETS: dict[Part, str] = {
    "generation": "ticket_generate_s",
    "verification": "ticket_score_s",
    "workflow": "ticket_own_s",
}
"""Part that groups wait for -> figure of a ticket's time in this part."""
_SATURATED = 0.85
"""If verifiers work more than this share of the time, groups and evaluations wait for verifiers."""


def bottleneck(lines: Sequence[Mapping[str, Any]]) -> tuple[Part, float]:
    """Return the part of a run that the others wait for most, and the share of the time of that work or wait.

    The part is training if it worked for more than half of the time, else what training waited for longest.
    A wait for groups is one for the part where tickets spend most time: the engine (`ticket_generate_s`), the
    verifier (`ticket_score_s`) or the workflow (`ticket_own_s`). If all verifiers work nearly all the time,
    waits for groups and evaluations are waits for verifiers. `lines` has at least one line.
    """
    share = works(lines)
    if share > 0.5:
        return "training", share
    step_s = max(total(lines, "step_s"), 1e-9)
    waits: dict[Part, float] = {
        part: total(lines, f"wait/{kind}_s") / step_s for kind, part in _PARTS.items()
    }
    waits["late tickets"] = late_alone(lines)
    group_waits = 1 - share - math.fsum(waits.values())
    if verifiers_used(lines) > _SATURATED:
        waits["verification"] = group_waits + waits.pop("evaluation")
    else:
        waits[max(_OF_TICKETS, key=lambda part: total(lines, _OF_TICKETS[part]))] = group_waits
    return max(waits.items(), key=lambda item: item[1])


def late_alone(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the time in which training waits for late tickets, though neither the engines nor
    the verifiers work nearly all the time: a few tickets take long, such as in a tool. Else 0."""
    step_s = max(total(lines, "step_s"), 1e-9)
    works_most = max(total(lines, "generate_busy_s") / step_s, verifiers_used(lines))
    return 0.0 if works_most > _SATURATED else total(lines, "wait/late_ticket_s") / step_s


def works(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the time in which training worked."""
    return total(lines, "train_s") / max(total(lines, "step_s"), 1e-9)


def verifiers_used(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the time in which the verifiers' processes worked; 0 if it is not known."""
    with_figure = [line for line in lines if number(line, "verifiers_used") is not None]
    work_s = math.fsum(line["verifiers_used"] * (number(line, "step_s") or 0.0) for line in with_figure)
    return work_s / max(total(with_figure, "step_s"), 1e-9)


def total(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the sum of a figure over lines. A line without the figure counts as 0."""
    return math.fsum(number(line, name) or 0.0 for line in lines)


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a finite figure of a line; None if the line has none."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
