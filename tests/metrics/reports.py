"""Measured requests, and what reports say."""

from __future__ import annotations

import io

from lmcache_stream.metrics import Metrics, StreamPerfMetrics


def of_times(*times: float, end: float = 10.0) -> StreamPerfMetrics:
    return StreamPerfMetrics.from_times(start=0.0, end=end, times=times, input_tokens=100)


def sections(metrics: Metrics) -> dict[str, dict[str, object]]:
    found = metrics.to_dict()["metrics"]
    assert isinstance(found, dict)
    return found


def emitted(metrics: Metrics) -> str:
    out = io.StringIO()
    metrics.emit(out)
    return out.getvalue()
