from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lmcache_stream import StreamPerfMetrics, UsageError
from lmcache_stream.metrics import percentile
from lmcache_stream.plots import output_throughput, plot_latencies, plot_throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def stream(start: float, *times: float) -> StreamPerfMetrics:
    return StreamPerfMetrics.from_times(start=start, end=times[-1], times=times, input_tokens=1)


class TestLatencies:
    def test_a_line_goes_through_the_percentiles(self, ax: Axes) -> None:
        seconds = [0.5, 0.1, 0.4, 0.2, 0.3]
        assert plot_latencies({"run": seconds}, title="TTFT", ax=ax) is ax
        (line,) = ax.lines
        for value, share in points(line):
            assert value == pytest.approx(1000 * percentile(seconds, share))
        assert ax.get_title(loc="left") == "TTFT"
        assert ax.get_legend() is None

    def test_marks_are_at_p50_p90_and_p99(self, ax: Axes) -> None:
        seconds = [0.1, 0.2, 0.3, 0.7]
        plot_latencies({"run": seconds}, ax=ax)
        (line,) = ax.lines
        marks = line.get_markevery()
        assert isinstance(marks, list)
        expected = [pytest.approx((1000 * percentile(seconds, q), q)) for q in (50, 90, 99)]
        assert [points(line)[mark] for mark in marks] == expected

    def test_a_single_value_is_a_step(self, ax: Axes) -> None:
        plot_latencies({"run": [0.25]}, ax=ax)
        assert {x for x, _ in points(ax.lines[0])} == {250}

    def test_a_run_without_values_keeps_its_look(self, ax: Axes) -> None:
        plot_latencies({"a": [0.1], "b": [], "c": [0.3]}, ax=ax)
        first, third = ax.lines
        plot_throughput({"a": [(0.0, 1.0)], "b": [(0.0, 1.0)], "c": [(0.0, 1.0)]}, ax=ax)
        same = [ax.lines[2], ax.lines[4]]
        assert [(line.get_marker(), line.get_linestyle()) for line in (first, third)] == [
            (line.get_marker(), line.get_linestyle()) for line in same
        ]

    def test_lines_differ_without_colour(self, ax: Axes) -> None:
        plot_latencies({str(number): [0.1, 0.2 + number] for number in range(84)}, ax=ax)
        # `get_linestyle` calls all dash patterns alike, so look at the pattern itself.
        looks = {(line.get_marker(), str(line._dash_pattern)) for line in ax.lines}  # type: ignore[attr-defined]
        assert len(looks) == 84

    def test_a_value_that_is_not_finite_is_refused(self, ax: Axes) -> None:
        with pytest.raises(UsageError, match="slow: a latency that is not finite"):
            plot_latencies({"slow": [0.1, math.inf]}, ax=ax)


class TestThroughput:
    def test_counts_tokens_of_all_requests_on_one_clock(self) -> None:
        # Tokens at 1, 2, 4 s of the first request and at 3, 4 s on the same clock of one that begins at 2 s.
        found = output_throughput([stream(10, 11, 12, 14), stream(12, 13, 14)], bins=4)
        assert found == [(0.5, 0.0), (1.5, 1.0), (2.5, 1.0), (3.5, 3.0)]
        assert sum(rate for _, rate in found) * 1.0 == 5

    def test_of_nothing(self) -> None:
        assert output_throughput([]) == []
        assert output_throughput([StreamPerfMetrics()]) == []
        with pytest.raises(UsageError, match="bins must be at least 1"):
            output_throughput([], bins=0)

    def test_a_line_a_run(self, ax: Axes) -> None:
        runs = {"edited": [(0.5, 10.0), (1.5, 30.0)], "none": [], "baseline": [(0.5, 5.0)]}
        assert plot_throughput(runs, ax=ax) is ax
        assert [points(line) for line in ax.lines] == [runs["edited"], runs["baseline"]]
        legend = ax.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == ["edited", "baseline"]
