"""Figures that a result is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["deviation", "mean", "percentile_of_sorted", "rate"]


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a population; 0 of none."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values)) if values else 0.0


def percentile_of_sorted(values: Sequence[float], q: float) -> float:
    """`metrics.percentile` of values in order."""
    position = (len(values) - 1) * q / 100
    low = math.floor(position)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (position - low)


def rate(amount: float, seconds: float) -> float:
    """`amount` a second; 0 of no time."""
    return amount / seconds if seconds > 0 else 0.0
