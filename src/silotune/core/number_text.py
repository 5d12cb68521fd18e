"""Numbers as tables and lines write them: `score_text` (a dash where there is no score), `clock_text` of seconds."""

from __future__ import annotations


def score_text(value: float | None) -> str:
    """Return a score with two digits; a dash if there is none."""
    return "–" if value is None else f"{value:.2f}"


def clock_text(seconds: float) -> str:
    """Return seconds as `h:mm:ss`, below an hour as `m:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
