"""How long requests took, and what came out over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics.statistics import rate_over_time
from lmcache_stream.plots.look import plain_axes, show_legend, style, the_axes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from lmcache_stream.metrics import StreamPerfMetrics

__all__ = ["output_throughput", "plot_latencies", "plot_throughput"]

MARKED: Final = (50, 90, 99)
MARKS: Final = 8


def plot_latencies(runs: Mapping[str, Iterable[float]], *, title: str = "Latency", ax: Axes | None = None) -> Axes:
    """Draw how latencies spread: the share of values up to a time, with a mark at p50, p90 and p99.

    Args:
        runs: Name of a run -> values in seconds, such as `[m.ttft for m in batch.perf_metrics.values()]`. A run without
            values has no line, and keeps its look for other plots.
        title: Above the plot.
        ax: Where to draw; None: a new figure.

    Raises:
        UsageError: A value is not finite, or matplotlib is not installed.
    """
    ax = the_axes(ax)
    for index, (name, values) in enumerate(runs.items()):
        milliseconds = 1000.0 * np.fromiter(values, dtype=float)
        if not np.isfinite(milliseconds).all():
            raise UsageError(f"{name}: a latency that is not finite cannot be drawn")
        if len(milliseconds):
            shares = np.arange(101)
            ax.plot(np.percentile(milliseconds, shares), shares, label=name, markevery=list(MARKED), **style(index))
    ax.locator_params(axis="x", nbins=6)
    ax.set_xlim(left=0)
    ax.set_ylim(0, 101)
    plain_axes(ax, "milliseconds (marks: p50, p90, p99)", "% of values")
    ax.set_title(title, fontsize="medium", loc="left")
    show_legend(ax)
    return ax


def output_throughput(streams: Iterable[StreamPerfMetrics], *, bins: int = 60) -> list[tuple[float, float]]:
    """Generated tokens a second over the time from the first request to the last token.

    Args:
        streams: Metrics of requests that ran at the same time, such as `batch.perf_metrics.values()`.
        bins: Into how many equal parts that time is cut.

    Returns:
        `(second, tokens/s)` of each part, the second in its middle; none without tokens.
    """
    if bins < 1:
        raise UsageError(f"bins must be at least 1, not {bins}")
    measured = list(streams)
    first = min((one.start for one in measured), default=0.0)
    arrivals = [(one.start - first + time, 1) for one in measured for time in one.times]
    return rate_over_time(arrivals, max((at for at, _ in arrivals), default=0.0), bins)


def plot_throughput(
    runs: Mapping[str, Sequence[tuple[float, float]]], *, title: str = "Throughput over time", ax: Axes | None = None
) -> Axes:
    """Draw generated tokens a second over time.

    Args:
        runs: Name of a run -> `(second, tokens/s)` pairs, from `output_throughput`. A run without pairs has no line.
        title: Above the plot.
        ax: Where to draw; None: a new figure.

    Raises:
        UsageError: matplotlib is not installed.
    """
    ax = the_axes(ax)
    for index, (name, points) in enumerate(runs.items()):
        if points:
            seconds, rates = zip(*points, strict=True)
            ax.plot(seconds, rates, label=name, markevery=max(len(points) // MARKS, 1), **style(index))
    ax.set_ylim(bottom=0)
    plain_axes(ax, "seconds", "generated tokens/s")
    ax.set_title(title, fontsize="medium", loc="left")
    show_legend(ax)
    return ax
