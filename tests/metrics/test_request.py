from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.metrics import StreamPerfMetrics
from tests.metrics.reports import of_times


def test_documented_fields_come_first_and_default_to_nothing() -> None:
    names = [field.name for field in fields(StreamPerfMetrics)]
    assert names[:7] == ["duration", "input_tokens", "output_tokens", "input_tput", "output_tput", "tpot", "ttft"]
    assert StreamPerfMetrics() == StreamPerfMetrics(0.0, 0, 0, 0.0, 0.0, [], 0.0, None, 0)


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        StreamPerfMetrics().ttft = 1.0  # type: ignore[misc]


def test_from_times() -> None:
    metrics = StreamPerfMetrics.from_times(
        start=100.0, end=104.0, times=[101.0, 101.5, 103.0], input_tokens=200, cached_tokens=64, edit_shortfall=32
    )
    assert metrics == StreamPerfMetrics(4.0, 200, 3, 50.0, 0.75, [0.5, 1.5], 1.0, 64, 32)
    assert metrics.times == (1.0, 1.5, 3.0)
    assert metrics.start == 100.0
    assert "times" not in repr(metrics)


def test_a_gap_is_spread_over_the_tokens_of_its_event() -> None:
    assert of_times(1.0, 1.0, 1.0, 4.0, 4.0, 5.0).tpot == [0.0, 0.0, 1.5, 1.5, 1.0]


def test_nothing_came() -> None:
    metrics = StreamPerfMetrics.from_times(start=5.0, end=5.0, times=[], input_tokens=7)
    assert metrics == StreamPerfMetrics(input_tokens=7)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60).map(sorted))
@settings(deadline=None)
def test_gaps_are_one_fewer_than_the_tokens_and_sum_to_first_to_last(times: list[float]) -> None:
    tpot = of_times(*times).tpot
    assert len(tpot) == len(times) - 1
    assert all(gap >= 0 for gap in tpot)
    assert math.isclose(math.fsum(tpot), times[-1] - times[0], abs_tol=1e-6)
