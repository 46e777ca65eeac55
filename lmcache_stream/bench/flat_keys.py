"""The keys of `vllm bench serve` that describe requests.

Times in them are in milliseconds where the key ends in `_ms`, in seconds elsewhere; a request ends with its last token.
ITL is the gap between two events, whatever number of tokens each brings; all tokens that one read of the socket brings
are one event here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lmcache_stream.metrics.statistics import deviation, mean, percentile, rate

if TYPE_CHECKING:
    from lmcache_stream.bench.config import ServeOptions
    from lmcache_stream.bench.records import RequestRecord

__all__ = ["flat_keys"]

DETAILS: Final = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_MS: Final = 1000.0


def flat_keys(outcomes: Sequence[RequestRecord], duration: float, options: ServeOptions) -> dict[str, Any]:
    """The keys of `vllm bench serve` that describe requests, from their records and the seconds of their phase."""
    good = [one for one in outcomes if not one.error]
    total_input, total_output = sum(one.input_tokens for one in good), sum(one.output_tokens for one in good)
    flat: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": rate(len(good), duration),
        "request_goodput": rate(_good_enough(good, options.goodput), duration) if options.goodput else None,
        "output_throughput": rate(total_output, duration),
        "total_token_throughput": rate(total_input + total_output, duration),
        "input_lens": [one.input_tokens for one in outcomes],
        "output_lens": [0 if one.error else one.output_tokens for one in outcomes],
        "ttfts": [one.ttft for one in outcomes],
        "itls": [one.itl for one in outcomes],
        "latencies": [one.latency for one in outcomes],
        "start_times": [one.start for one in outcomes],
        "queue_times": [one.queue for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error for one in outcomes],
        **_peaks(good),
        "rtfx": 0.0,
    }
    values = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
    }
    if options.max_concurrency is not None:
        values["client_queue_time"] = [one.queue for one in good]
        if math.isfinite(options.request_rate):
            values["e2el_including_client_queue"] = [one.latency + one.queue for one in good]
    for metric in values:
        if metric in options.percentile_metrics:
            flat |= _statistics(metric, values[metric], options.metric_percentiles)
    return flat if options.save_detailed else {key: value for key, value in flat.items() if key not in DETAILS}


def _statistics(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = sorted(values)
    known = values or [0.0]
    return {
        f"mean_{metric}_ms": mean(values) * _MS,
        f"median_{metric}_ms": percentile(known, 50) * _MS,
        f"std_{metric}_ms": deviation(values) * _MS,
        **{f"p{q:g}_{metric}_ms": percentile(known, q) * _MS for q in percentiles},
    }


def _good_enough(records: Sequence[RequestRecord], objectives: dict[str, float]) -> int:
    """Requests that meet all objectives (ms); one of a single token has a TPOT of 0."""
    return sum(
        all(
            {"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2el": one.latency}[name] <= limit / _MS
            for name, limit in objectives.items()
        )
        for one in records
    )


def _peaks(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The most tokens in a second, and the most requests that were under way in one, by whole seconds."""
    first = min((one.start for one in records), default=0.0)
    tokens: dict[int, int] = {}
    requests: dict[int, int] = {}
    for one in records:
        for at, count in one.events:
            second = int(one.start - first + at)
            tokens[second] = tokens.get(second, 0) + count
        for second in range(int(one.start - first), int(one.start - first + one.latency) + 1):
            requests[second] = requests.get(second, 0) + 1
    return {
        "max_output_tokens_per_s": float(max(tokens.values(), default=0)),
        "max_concurrent_requests": max(requests.values(), default=0),
    }
