from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import percentile
from lmcache_stream.metrics.statistics import deviation, mean, rate, rate_over_time


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@settings(deadline=None)
def test_a_percentile_is_numpys_default(values: list[float], q: float) -> None:
    assert math.isclose(percentile(values, q), float(np.percentile(values, q)), rel_tol=1e-9, abs_tol=1e-6)


def test_what_has_no_percentile_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        percentile([], 50)
    with pytest.raises(UsageError, match="between 0 and 100"):
        percentile([1.0], 101)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
@settings(deadline=None)
def test_mean_and_deviation_are_numpys(values: list[float]) -> None:
    assert math.isclose(mean(values), float(np.mean(values)), rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(deviation(values), float(np.std(values)), rel_tol=1e-9, abs_tol=1e-6)


def test_nothing_and_no_time_come_to_nothing() -> None:
    assert (mean([]), deviation([]), rate(3, 0.0)) == (0.0, 0.0, 0.0)
    assert rate_over_time([(0.0, 1)], 0.0, 4) == []


def test_what_came_over_time() -> None:
    arrivals = [(0.0, 3), (0.9, 1), (1.0, 2), (4.0, 5), (9.0, 1)]
    assert rate_over_time(arrivals, 4.0, 4) == [(0.5, 4.0), (1.5, 2.0), (2.5, 0.0), (3.5, 6.0)]
    assert rate_over_time(arrivals, 4.0, 2) == [(1.0, 3.0), (3.0, 3.0)]
