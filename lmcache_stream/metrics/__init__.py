"""What a request took (`StreamPerfMetrics`), what a phase of a batch took (`Metrics`), and how a report is shown."""

from __future__ import annotations

from lmcache_stream.metrics.phases import ModifyReceiptLike, decode_metrics, modify_metrics, prefill_metrics
from lmcache_stream.metrics.report import FORMATS, Metrics, Section, check_format
from lmcache_stream.metrics.request import StreamPerfMetrics
from lmcache_stream.metrics.statistics import percentile

__all__ = [
    "FORMATS",
    "Metrics",
    "ModifyReceiptLike",
    "Section",
    "StreamPerfMetrics",
    "check_format",
    "decode_metrics",
    "modify_metrics",
    "percentile",
    "prefill_metrics",
]
