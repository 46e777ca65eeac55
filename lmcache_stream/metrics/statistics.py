"""Means, percentiles, distributions and rates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "STATISTICS",
    "deviation",
    "distribution",
    "mean",
    "percentile",
    "percentile_of_sorted",
    "rate",
    "rate_over_time",
]

STATISTICS = ("mean", "p50", "p90", "p99")
"""What a distribution is told by."""


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a population; 0 of none."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) ** 2 for value in values]))


def percentile(values: Iterable[float], q: float) -> float:
    """The `q`-th percentile, `q` from 0 to 100, with linear interpolation between neighbours (numpy's default)."""
    ordered = sorted(values)
    if not ordered:
        raise UsageError("no values: a percentile needs at least one")
    if not 0 <= q <= 100:
        raise UsageError(f"q must be between 0 and 100, not {q}")
    return percentile_of_sorted(ordered, q)


def percentile_of_sorted(values: Sequence[float], q: float) -> float:
    """`percentile` of values in order, at least one."""
    position = (len(values) - 1) * q / 100
    low = math.floor(position)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (position - low)


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """The `STATISTICS` of values by name; None each where there are no values."""
    if not values:
        return dict.fromkeys(STATISTICS)
    return {"mean": mean(values), **{f"p{q}": percentile(values, q) for q in (50, 90, 99)}}


def rate(amount: float, seconds: float) -> float:
    """`amount` a second; 0 of no time."""
    return amount / seconds if seconds > 0 else 0.0


def rate_over_time(arrivals: Iterable[tuple[float, int]], duration: float, parts: int) -> list[tuple[float, float]]:
    """What came a second over `duration` seconds, which are cut into equal parts.

    Args:
        arrivals: Second and amount; what came later counts to the last part.
        duration: Seconds.
        parts: How many, at least one.

    Returns:
        `(second, amount a second)` of each part, the second in its middle; none of no time.
    """
    width = duration / parts
    if width <= 0:
        return []
    amounts = [0] * parts
    for at, amount in arrivals:
        amounts[min(int(at / width), parts - 1)] += amount
    return [((index + 0.5) * width, amount / width) for index, amount in enumerate(amounts)]
