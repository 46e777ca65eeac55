"""Intervals of 95 % and tests of paired measurements, without scipy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

__all__ = ["Interval", "holm", "mcnemar", "mean_interval", "samples_needed", "t_quantile", "t_two_sided", "wilson"]

UPPER: Final = 0.975
"""Probability of what lies below the upper limit of an interval."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its confidence interval.

    Args:
        mean: The estimate.
        low: Lower limit; NaN where one sample tells nothing about the spread.
        high: Upper limit.
        n: Samples.
        p: Two-sided p-value of the mean being 0; NaN where it was not tested.
        sd: Standard deviation of one sample that explains the interval; NaN where unknown.
    """

    mean: float
    low: float
    high: float
    n: int
    p: float = math.nan
    sd: float = math.nan

    @property
    def half_width(self) -> float:
        """Half of the distance between the limits."""
        return (self.high - self.low) / 2


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval:
    """The mean of `values`, with Student's interval and t test against 0; of differences, it is the paired t test.

    Values of one cluster, such as passages of one document, may depend on each other: the variance of the mean is then
    that of cluster sums (Liang and Zeger 1986), with as many degrees of freedom as there are clusters less one. With a
    cluster for each value it is the plain t interval.

    Args:
        values: At least one.
        clusters: For each value what it belongs to; None: all are independent.
    """
    n = len(values)
    mean = math.fsum(values) / n
    sums: dict[Hashable, float] = {}
    for value, cluster in zip(values, range(n) if clusters is None else clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + (value - mean)
    groups = len(sums)
    if groups < 2:
        return Interval(mean=mean, low=math.nan, high=math.nan, n=n)
    error = math.sqrt(groups / (groups - 1) * math.fsum(total * total for total in sums.values())) / n
    half = t_quantile(UPPER, groups - 1) * error
    p = t_two_sided(mean / error, groups - 1) if error else float(mean == 0)
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n, p=p, sd=error * math.sqrt(n))


def wilson(successes: int, n: int) -> Interval:
    """The share of successes with Wilson's score interval."""
    z = NormalDist().inv_cdf(UPPER)
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(mean=share, low=max(middle - half, 0.0), high=min(middle + half, 1.0), n=n)


def mcnemar(pairs: Iterable[tuple[bool, bool]]) -> float:
    """Two-sided p-value of McNemar's exact test: are both of paired yes-or-no results equally often true?"""
    first = second = 0
    for a, b in pairs:
        first += a and not b
        second += b and not a
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979), in the order given: below 0.05, the family-wise error stays below it."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def samples_needed(sd: float, half_width: float) -> int:
    """The fewest samples of standard deviation `sd` whose Student interval is at most `half_width` to each side."""
    n = max(math.ceil((NormalDist().inv_cdf(UPPER) * sd / half_width) ** 2), 2)
    while t_quantile(UPPER, n - 1) * sd / math.sqrt(n) > half_width:
        n += 1
    return n


def t_two_sided(t: float, freedom: int) -> float:
    """Probability that a Student variable is at least as far from 0 as `t`."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def t_quantile(probability: float, freedom: int) -> float:
    """The value that a Student variable stays below with this probability of at least a half."""
    tail = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > tail:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + numerator * d or tiny)
            c = 1 + numerator / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a
