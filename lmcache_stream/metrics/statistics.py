"""Percentiles, distributions and rates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["STATISTICS", "distribution", "percentile", "rate"]

STATISTICS = ("mean", "p50", "p90", "p99")
"""What a distribution is told by."""


def percentile(values: Iterable[float], q: float) -> float:
    """The `q`-th percentile, `q` from 0 to 100, with linear interpolation between neighbours (numpy's default)."""
    ordered = sorted(values)
    if not ordered:
        raise UsageError("no values: a percentile needs at least one")
    if not 0 <= q <= 100:
        raise UsageError(f"q must be between 0 and 100, not {q}")
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """The `STATISTICS` of values by name; None each where there are no values."""
    if not values:
        return dict.fromkeys(STATISTICS)
    return {"mean": math.fsum(values) / len(values), **{f"p{q}": percentile(values, q) for q in (50, 90, 99)}}


def rate(tokens: int, duration: float) -> float:
    """Tokens a second; 0 when `duration` is 0."""
    return tokens / duration if duration > 0 else 0.0
