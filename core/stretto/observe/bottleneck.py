"""What a run waits for most, over lines of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stretto.bus.messages.events import CauseKind

Part = Literal[
    "training",
    "generation",
    "verification",
    "evaluation",
    "checkpoints",
    "swaps",
    "inference engines",
    "overhead",
]

_PARTS: dict[CauseKind, Part] = {
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "swap": "swaps",
    "engines": "inference engines",
    "overhead": "overhead",
}
"""The part that training waits for, by the cause of the wait. All other causes are a lack of groups."""


def bottleneck(lines: Sequence[Mapping[str, Any]]) -> tuple[Part, float]:
    """Return the part of a run that the other parts wait for most.

    The part is training if it worked for more than half of the time. Otherwise it is what training waited for
    longest. A wait for groups is a wait for verification if tickets spend more time at the verifier
    (`ticket_score_s`) than at the engine (`ticket_generate_s`), and for generation if not.

    Args:
        lines: lines of `metrics.jsonl`, at least one.

    Returns:
        The part, and a share of the time: in which training worked, or in which it waited for the part.
    """
    share = works(lines)
    if share > 0.5:
        return "training", share
    step_s = max(total(lines, "step_s"), 1e-9)
    waits: dict[Part, float] = {
        part: total(lines, f"wait/{kind}_s") / step_s for kind, part in _PARTS.items()
    }
    scores = total(lines, "ticket_score_s") > total(lines, "ticket_generate_s")
    waits["verification" if scores else "generation"] = 1 - share - math.fsum(waits.values())
    return max(waits.items(), key=lambda item: item[1])


def works(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the time in which training worked."""
    return total(lines, "train_s") / max(total(lines, "step_s"), 1e-9)


def total(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the sum of a figure over lines. A line without the figure counts as 0."""
    return math.fsum(number(line, name) or 0.0 for line in lines)


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a finite figure of a line; None if the line has none."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
