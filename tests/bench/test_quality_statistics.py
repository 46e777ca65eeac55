from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.bench.statistics import (
    holm,
    mcnemar,
    mean_interval,
    samples_needed,
    t_quantile,
    t_two_sided,
    wilson,
)

TABLE = [  # Student's t at 0.975, from printed tables
    (1, 12.706),
    (2, 4.303),
    (5, 2.571),
    (9, 2.262),
    (30, 2.042),
    (120, 1.980),
    (599, 1.964),
]


@pytest.mark.parametrize(("freedom", "expected"), TABLE)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 40.0])
def test_p_values_have_closed_forms_for_one_and_two_degrees(t: float) -> None:
    assert t_two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-10)
    assert t_two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert t_two_sided(-t, 7) == t_two_sided(t, 7)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.5, 0.9999), st.integers(1, 700))
def test_quantile_and_p_value_are_inverse(probability: float, freedom: int) -> None:
    assert t_two_sided(t_quantile(probability, freedom), freedom) == pytest.approx(2 * (1 - probability), rel=1e-6)


def test_mean_interval_is_the_plain_t_interval_without_clusters() -> None:
    values = [0.1, 0.4, -0.2, 0.3, 0.25]
    found = mean_interval(values)
    error = statistics.stdev(values) / math.sqrt(5)
    assert found.mean == pytest.approx(statistics.mean(values))
    assert found.half_width == pytest.approx(2.7764451 * error)
    assert found.sd == pytest.approx(statistics.stdev(values))
    assert found.p == pytest.approx(t_two_sided(found.mean / error, 4))
    assert mean_interval(values, "abcde") == found


def test_values_of_one_document_count_as_depending_on_each_other() -> None:
    values, documents = [1.0, 1.0, -1.0, -1.0, 0.5, 0.5], "aabbcc"
    found = mean_interval(values, documents)
    sums = [2 * (value - 1 / 6) for value in (1.0, -1.0, 0.5)]
    error = math.sqrt(3 / 2 * sum(s * s for s in sums)) / 6
    assert found.half_width == pytest.approx(4.3026527 * error)
    assert found.half_width > mean_interval(values).half_width


def test_differences_that_are_all_zero_are_certain() -> None:
    found = mean_interval([0.0] * 4)
    assert (found.low, found.high, found.p) == (0, 0, 1)
    assert mean_interval([2.0] * 4).p == 0


def test_one_sample_tells_nothing_about_the_spread() -> None:
    found = mean_interval([0.3])
    assert found.mean == 0.3
    assert math.isnan(found.half_width)


def test_wilson_interval() -> None:
    found = wilson(8, 10)
    assert found.low == pytest.approx(0.4902, abs=1e-4)
    assert found.high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(0, 10).low == pytest.approx(0)
    assert wilson(10, 10).high == pytest.approx(1)


def test_mcnemar_is_a_binomial_test_of_the_pairs_that_differ() -> None:
    pairs = [(True, False)] * 1 + [(False, True)] * 7 + [(True, True)] * 30
    assert mcnemar(pairs) == pytest.approx(2 * (1 + 8) / 2**8)
    assert mcnemar([(True, True)]) == 1
    assert mcnemar([(True, False), (False, True)]) == 1


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1, 1]
    assert holm([]) == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_the_order_and_never_lowers_a_p_value(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    by_p = sorted(zip(p_values, adjusted, strict=True))
    assert [q for _, q in by_p] == sorted(adjusted)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-3, 2), st.floats(0.01, 0.2))
def test_samples_needed_are_just_enough(sd: float, half_width: float) -> None:
    def reached(n: int) -> float:
        return t_quantile(0.975, n - 1) * sd / math.sqrt(n)

    n = samples_needed(sd, half_width)
    assert reached(n) <= half_width
    assert n == 2 or reached(n - 1) > half_width
