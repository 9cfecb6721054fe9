"""Figures as every view shows them."""

from __future__ import annotations

__all__ = ["duration_text"]


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
