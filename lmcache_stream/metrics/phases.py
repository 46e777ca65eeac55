"""The reports of a batch's phases: prefill, modify, decode."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from lmcache_stream.metrics.report import Metrics
from lmcache_stream.metrics.statistics import STATISTICS, distribution, rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_stream.metrics.request import StreamPerfMetrics

__all__ = ["ModifyReceiptLike", "decode_metrics", "modify_metrics", "prefill_metrics"]

STEPS = ("wait", "retrieve", "edit", "store")


class ModifyReceiptLike(Protocol):
    """What a report over edits needs to know of each one."""

    @property
    def tokens_before(self) -> int:
        """Tokens whose KV was given to the edit."""

    @property
    def tokens_after(self) -> int:
        """Tokens that the edit gave back."""

    @property
    def bytes_moved(self) -> int:
        """Bytes of KV fetched and stored."""

    @property
    def recomputed(self) -> int:
        """Tokens of the edit that fill no chunk, so that the engine computes them anew."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by step: wait, retrieve, edit, store."""


def prefill_metrics(
    streams: Sequence[StreamPerfMetrics],
    duration: float,
    *,
    num_streams: int,
    failures: Mapping[str, BaseException] | None = None,
    fmt: str = "terminal",
    width: int = 80,
) -> Metrics:
    """Report a batch's prefill phase.

    Args:
        streams: One for each stream that succeeded.
        duration: Wall time of the whole phase in seconds; throughput is over it.
        num_streams: Streams that were asked to run, failures included.
        failures: Exception by stream id.
        fmt: "terminal" or "json".
        width: Columns of the table.
    """
    metrics = _phase("Prefill", num_streams, fmt, width)
    tokens = sum(stream.input_tokens for stream in streams)
    results = metrics.add_section("results", "Results")
    results.add("duration", "Duration (s)", duration)
    results.add("input_tokens", "Input tokens", tokens)
    results.add("input_tput", "Input throughput (tok/s)", rate(tokens, duration))
    _add_distribution(metrics, "ttft", "Time to first token", _ttfts(streams))
    _add_cache(metrics, streams)
    _add_failures(metrics, failures)
    return metrics


def decode_metrics(
    streams: Sequence[StreamPerfMetrics],
    duration: float,
    *,
    num_streams: int,
    failures: Mapping[str, BaseException] | None = None,
    fmt: str = "terminal",
    width: int = 80,
) -> Metrics:
    """Report a batch's decode phase; arguments as for `prefill_metrics`.

    TPOT is over streams, each with the mean of its gaps; ITL is over all gaps of all streams.
    """
    metrics = _phase("Decode", num_streams, fmt, width)
    tokens = sum(stream.output_tokens for stream in streams)
    results = metrics.add_section("results", "Results")
    results.add("duration", "Duration (s)", duration)
    results.add("output_tokens", "Output tokens", tokens)
    results.add("output_tput", "Output throughput (tok/s)", rate(tokens, duration))
    means = [math.fsum(stream.tpot) / len(stream.tpot) for stream in streams if stream.tpot]
    gaps = [gap for stream in streams for gap in stream.tpot]
    _add_distribution(metrics, "ttft", "Time to first token", _ttfts(streams))
    _add_distribution(metrics, "tpot", "Time per output token", means)
    _add_distribution(metrics, "itl", "Inter-token latency", gaps)
    _add_cache(metrics, streams)
    _add_failures(metrics, failures)
    return metrics


def modify_metrics(
    receipts: Sequence[ModifyReceiptLike],
    duration: float,
    *,
    num_streams: int,
    failures: Mapping[str, BaseException] | None = None,
    fmt: str = "terminal",
    width: int = 80,
) -> Metrics:
    """Report a batch's modify phase; `receipts` has one for each stream that succeeded, the rest is as for the others.

    The kept ratio is tokens after over tokens before, summed over all streams; None when there were none before.
    """
    metrics = _phase("Modify", num_streams, fmt, width)
    metrics.add_section("results", "Results").add("duration", "Duration (s)", duration)
    before = sum(receipt.tokens_before for receipt in receipts)
    after = sum(receipt.tokens_after for receipt in receipts)
    edit = metrics.add_section("edit", "Edit")
    edit.add("tokens_before", "Tokens before", before)
    edit.add("tokens_after", "Tokens after", after)
    edit.add("kept_ratio", "Kept ratio", after / before if before else None)
    edit.add("recomputed", "Tokens left to recompute", sum(receipt.recomputed for receipt in receipts))
    edit.add("bytes_moved", "Bytes moved", sum(receipt.bytes_moved for receipt in receipts))
    steps = metrics.add_section("steps", f"Steps (s): {', '.join(STATISTICS)}")
    for step in STEPS:
        seconds = distribution([receipt.seconds[step] for receipt in receipts if step in receipt.seconds])
        steps.add_row(step.capitalize(), {f"{step}_{key}": value for key, value in seconds.items()})
    _add_failures(metrics, failures)
    return metrics


def _phase(title: str, num_streams: int, fmt: str, width: int) -> Metrics:
    metrics = Metrics(title, fmt, width)
    metrics.add_section("config", "Config").add("num_streams", "Streams", num_streams)
    return metrics


def _ttfts(streams: Sequence[StreamPerfMetrics]) -> list[float]:
    return [stream.ttft for stream in streams if stream.output_tokens]


def _add_distribution(metrics: Metrics, name: str, title: str, values: Sequence[float]) -> None:
    metrics.add_section(name, f"{title} (s)").add_row(", ".join(STATISTICS), distribution(values))


def _add_cache(metrics: Metrics, streams: Sequence[StreamPerfMetrics]) -> None:
    told = [stream.cached_tokens for stream in streams if stream.cached_tokens is not None]
    shortfall = sum(stream.edit_shortfall for stream in streams)
    if not told and not shortfall:
        return
    section = metrics.add_section("cache", "Cache")
    section.add("cached_tokens", "Prompt tokens taken from a cache", sum(told) if told else None)
    section.add("edit_shortfall", "Tokens of edits not taken", shortfall)


def _add_failures(metrics: Metrics, failures: Mapping[str, BaseException] | None) -> None:
    if not failures:
        return
    section = metrics.add_section("failures", "Failures").add("count", "Streams that failed", len(failures))
    for stream_id, error in failures.items():
        section.add(stream_id, stream_id, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
