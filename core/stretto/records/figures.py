"""Figures as every view shows them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RECENT_STEPS", "change", "duration_text", "recent"]

RECENT_STEPS = 10
"""A figure of a run, such as its reward, is the mean over this many newest steps: one step is noise."""


def recent(values: Sequence[float]) -> float | None:
    """Return the mean over the newest steps; None without a step."""
    newest = values[-RECENT_STEPS:]
    return sum(newest) / len(newest) if newest else None


def change(values: Sequence[float]) -> float | None:
    """Return how far the mean over the newest steps is from that over as many first steps; None if these are
    the same steps."""
    first, newest = recent(values[:RECENT_STEPS]), recent(values)
    return None if first is None or newest is None or len(values) <= RECENT_STEPS else newest - first


def duration_text(seconds: float | None) -> str:
    """Return a duration as text: `350 ms`, `4.5 s`, `45 s`, `4 min 58 s`, `12 min`, `3 h 5 min`, `2 d 3 h`; a
    dash if it is not known. The page's `duration` follows the same rule."""
    if seconds is None:
        return "-"
    if not 0 <= seconds < 1e9:  # what a foreign process says
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    minutes = int(whole / 60 + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    if minutes < 60:
        return f"{minutes} min"
    days, hours = divmod(minutes // 60, 24)
    return f"{days} d {hours} h" if days > 1 else f"{minutes // 60} h {minutes % 60} min"
