from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import StreamPerfMetrics, decode_metrics, modify_metrics, prefill_metrics
from tests.metrics.reports import emitted, of_times, sections


@dataclass(frozen=True)
class Receipt:
    tokens_before: int = 64
    tokens_after: int = 32
    bytes_moved: int = 1000
    recomputed: int = 3
    seconds: Mapping[str, float] = field(
        default_factory=lambda: {"wait": 0.5, "retrieve": 1.0, "edit": 2.0, "store": 3.0}
    )


STREAMS = (of_times(1.0, 2.0, 4.0), of_times(3.0, 3.5))


def test_prefill() -> None:
    report = sections(prefill_metrics(STREAMS, 4.0, num_streams=2))
    assert report["config"] == {"num_streams": 2}
    assert report["results"] == {"duration": 4.0, "input_tokens": 200, "input_tput": 50.0}
    assert report["ttft"] == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert "failures" not in report


def test_decode() -> None:
    report = sections(decode_metrics(STREAMS, 4.0, num_streams=2))
    assert report["config"] == {"num_streams": 2}
    assert report["results"] == {"duration": 4.0, "output_tokens": 5, "output_tput": 1.25}
    assert report["tpot"]["mean"] == pytest.approx((1.5 + 0.5) / 2)
    assert report["itl"]["mean"] == pytest.approx((1.0 + 2.0 + 0.5) / 3)
    assert report["itl"]["p50"] == 1.0
    assert set(report["itl"]) == set(report["tpot"]) == set(report["ttft"]) == {"mean", "p50", "p90", "p99"}


def test_no_tokens_no_latencies_but_the_same_keys() -> None:
    report = sections(decode_metrics([of_times()], 0.0, num_streams=1))
    assert report["results"] == {"duration": 0.0, "output_tokens": 0, "output_tput": 0.0}
    assert set(report["tpot"].values()) == set(report["ttft"].values()) == {None}


def test_cache_counts_when_there_are_any() -> None:
    one = StreamPerfMetrics(cached_tokens=64, edit_shortfall=8)
    report = sections(decode_metrics([one, StreamPerfMetrics()], 1.0, num_streams=2))
    assert report["cache"] == {"cached_tokens": 64, "edit_shortfall": 8}
    assert "cache" not in sections(decode_metrics([StreamPerfMetrics()], 1.0, num_streams=1))


def test_modify() -> None:
    slow = Receipt(tokens_before=96, tokens_after=96, seconds={"wait": 1.5, "retrieve": 1.0, "edit": 4.0})
    report = sections(modify_metrics([Receipt(), slow], 7.0, num_streams=2))
    assert report["config"] == {"num_streams": 2}
    assert report["results"] == {"duration": 7.0}
    assert report["edit"] == {
        "tokens_before": 160,
        "tokens_after": 128,
        "kept_ratio": 0.8,
        "recomputed": 6,
        "bytes_moved": 2000,
    }
    assert report["steps"]["wait_mean"] == 1.0
    assert report["steps"]["edit_p90"] == pytest.approx(3.8)
    assert report["steps"]["store_p99"] == 3.0
    assert len(report["steps"]) == 16


def test_modify_of_nothing() -> None:
    report = sections(modify_metrics([], 0.0, num_streams=0))
    assert report["edit"]["kept_ratio"] is None
    assert set(report["steps"].values()) == {None}


@pytest.mark.parametrize("phase", [prefill_metrics, decode_metrics, modify_metrics])
def test_failures_are_named(phase: object) -> None:
    assert callable(phase)
    failures = {"s1": ValueError("no room"), "s2": TimeoutError()}
    report = phase([], 1.0, num_streams=3, failures=failures)
    assert sections(report)["failures"] == {"count": 2, "s1": "ValueError: no room", "s2": "TimeoutError"}
    assert sections(report)["config"]["num_streams"] == 3
    assert "no room" in emitted(report)


@pytest.mark.parametrize("phase", [prefill_metrics, decode_metrics, modify_metrics])
def test_format_and_width_reach_the_report(phase: object) -> None:
    assert callable(phase)
    assert json.loads(emitted(phase([], 1.0, num_streams=0, fmt="json")))["metrics"]
    assert max(map(len, emitted(phase([], 1.0, num_streams=0, width=60)).splitlines())) == 60
    with pytest.raises(UsageError):
        phase([], 1.0, num_streams=0, fmt="xml")
