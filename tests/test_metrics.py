from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import (
    Metrics,
    StreamPerfMetrics,
    check_format,
    decode_metrics,
    modify_metrics,
    percentile,
    prefill_metrics,
)

finite = st.floats(-1e6, 1e6)


@dataclass(frozen=True)
class Receipt:
    tokens_before: int = 64
    tokens_after: int = 32
    bytes_moved: int = 1000
    recomputed: int = 3
    seconds: Mapping[str, float] = field(
        default_factory=lambda: {"wait": 0.5, "retrieve": 1.0, "edit": 2.0, "store": 3.0}
    )


@pytest.fixture(autouse=True)
def no_forced_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestStreamPerfMetrics:
    def test_documented_fields_come_first_and_default_to_nothing(self) -> None:
        names = [field.name for field in fields(StreamPerfMetrics)]
        assert names[:7] == ["duration", "input_tokens", "output_tokens", "input_tput", "output_tput", "tpot", "ttft"]
        assert StreamPerfMetrics() == StreamPerfMetrics(0.0, 0, 0, 0.0, 0.0, [], 0.0, None, 0)

    def test_is_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            StreamPerfMetrics().ttft = 1.0  # type: ignore[misc]

    def test_from_times(self) -> None:
        metrics = StreamPerfMetrics.from_times(
            start=100.0, end=104.0, times=[101.0, 101.5, 103.0], input_tokens=200, cached_tokens=64, edit_shortfall=32
        )
        assert metrics == StreamPerfMetrics(4.0, 200, 3, 50.0, 0.75, [0.5, 1.5], 1.0, 64, 32)
        assert metrics.times == (1.0, 1.5, 3.0)
        assert metrics.start == 100.0
        assert "times" not in repr(metrics)

    def test_a_gap_is_spread_over_the_tokens_of_its_event(self) -> None:
        assert of_times(1.0, 1.0, 1.0, 4.0, 4.0, 5.0).tpot == [0.0, 0.0, 1.5, 1.5, 1.0]

    def test_nothing_came(self) -> None:
        metrics = StreamPerfMetrics.from_times(start=5.0, end=5.0, times=[], input_tokens=7)
        assert metrics == StreamPerfMetrics(input_tokens=7)

    @given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60).map(sorted))
    @settings(deadline=None)
    def test_gaps_are_one_fewer_than_the_tokens_and_sum_to_first_to_last(self, times: list[float]) -> None:
        tpot = of_times(*times).tpot
        assert len(tpot) == len(times) - 1
        assert all(gap >= 0 for gap in tpot)
        assert math.isclose(math.fsum(tpot), times[-1] - times[0], abs_tol=1e-6)


class TestPercentile:
    @given(st.lists(finite, min_size=1, max_size=50), st.floats(0, 100))
    @settings(deadline=None)
    def test_is_numpys_default(self, values: list[float], q: float) -> None:
        assert math.isclose(percentile(values, q), float(np.percentile(values, q)), rel_tol=1e-9, abs_tol=1e-6)

    def test_refuses_what_has_none(self) -> None:
        with pytest.raises(UsageError, match="at least one"):
            percentile([], 50)
        with pytest.raises(UsageError, match="between 0 and 100"):
            percentile([1.0], 101)


class TestFormats:
    @pytest.mark.parametrize("fmt", ["html", "", "JSON", "term"])
    def test_an_unknown_format_is_refused_by_name(self, fmt: str) -> None:
        with pytest.raises(UsageError, match="'terminal', 'json'"):
            check_format(fmt)
        with pytest.raises(UsageError, match="fmt must be one of"):
            Metrics("Title", fmt)

    @pytest.mark.parametrize("width", [0, -1, 39, True, 80.0, "80"])
    def test_a_width_that_shows_nothing_is_refused(self, width: object) -> None:
        with pytest.raises(UsageError, match="width"):
            check_format("terminal", width)  # type: ignore[arg-type]

    def test_known_formats_pass(self) -> None:
        check_format("terminal")
        check_format("json", 120)


class TestReport:
    def report(self, fmt: str = "terminal", width: int = 80) -> Metrics:
        metrics = Metrics("A title", fmt, width)
        metrics.add_section("config", "Config").add("num_streams", "Streams", 1234)
        metrics.add_section("results", "Results").add("rate", "Rate [red]a[/red] <b>", 0.123456).add("none", "No", None)
        return metrics

    def test_to_dict(self) -> None:
        assert self.report().to_dict() == {
            "title": "A title",
            "metrics": {"config": {"num_streams": 1234}, "results": {"rate": 0.123456, "none": None}},
        }

    def test_what_is_handed_out_is_a_copy(self) -> None:
        report = self.report()
        sections(report)["config"]["num_streams"] = 0
        assert sections(report)["config"]["num_streams"] == 1234

    def test_json_is_one_document(self) -> None:
        report = self.report("json")
        assert json.loads(emitted(report)) == report.to_dict()

    def test_what_is_no_terminal_gets_no_colours_even_if_the_environment_asks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b" not in emitted(self.report())

    @pytest.mark.parametrize("width", [40, 80, 120])
    def test_a_table_fills_its_width_without_colours_and_without_reading_markup(self, width: int) -> None:
        text = emitted(self.report(width=width))
        assert "\x1b" not in text
        assert {len(line) for line in text.splitlines()[1:]} == {width}
        assert "A title" in text
        assert "1,234" in text
        assert "0.1235" in text
        assert "[red]a[/red]" in text

    def test_a_terminal_gets_colours_unless_no_color_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        out = Terminal()
        self.report().emit(out)
        assert "\x1b[1;36m" in out.getvalue()
        monkeypatch.setenv("NO_COLOR", "1")
        out = Terminal()
        self.report().emit(out)
        assert "36m" not in out.getvalue()

    def test_goes_to_standard_output_by_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.report().emit()
        assert "A title" in capsys.readouterr().out

    def test_a_notebook_shows_a_table_with_escaped_text(self) -> None:
        shown = self.report()._repr_html_()
        assert shown.startswith("<table>")
        assert "&lt;b&gt;" in shown
        assert "<b>" not in shown
        assert shown.count("<tr>") == 5

    def test_several_values_share_a_row_of_the_table(self) -> None:
        report = Metrics("Title")
        report.add_section("a", "A").add("k", "K", 1).add_row("Both", {"x": 1.0, "y": None})
        assert report.to_dict()["metrics"] == {"a": {"k": 1, "x": 1.0, "y": None}}
        assert "1.0000        -" in emitted(report)
        assert report._repr_html_().count("<tr>") == 3
        assert '<td colspan="2" style="text-align: right">1</td>' in report._repr_html_()

    def test_one_key_one_value(self) -> None:
        report = Metrics("Title")
        section = report.add_section("a", "A").add("k", "K", 1)
        with pytest.raises(UsageError, match=r"\['k'\] already"):
            section.add("k", "K", 2)
        with pytest.raises(UsageError, match="'a' already"):
            report.add_section("a", "A")

    def test_a_servers_words_do_not_steer_the_terminal(self) -> None:
        report = Metrics("Title")
        report.add_section("a", "A").add("k", "\x1b[2Jlabel", "\x1b[31mred\x07")
        assert "\x1b" not in emitted(report)
        assert "\x07" not in emitted(report)
        assert r"\x1b[31mred" in emitted(report)


class TestPhases:
    streams = (of_times(1.0, 2.0, 4.0), of_times(3.0, 3.5))

    def test_prefill(self) -> None:
        report = sections(prefill_metrics(self.streams, 4.0, num_streams=2))
        assert report["config"] == {"num_streams": 2}
        assert report["results"] == {"duration": 4.0, "input_tokens": 200, "input_tput": 50.0}
        assert report["ttft"] == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
        assert "failures" not in report

    def test_decode(self) -> None:
        report = sections(decode_metrics(self.streams, 4.0, num_streams=2))
        assert report["config"] == {"num_streams": 2}
        assert report["results"] == {"duration": 4.0, "output_tokens": 5, "output_tput": 1.25}
        assert report["tpot"]["mean"] == pytest.approx((1.5 + 0.5) / 2)
        assert report["itl"]["mean"] == pytest.approx((1.0 + 2.0 + 0.5) / 3)
        assert report["itl"]["p50"] == 1.0
        assert set(report["itl"]) == set(report["tpot"]) == set(report["ttft"]) == {"mean", "p50", "p90", "p99"}

    def test_no_tokens_no_latencies_but_the_same_keys(self) -> None:
        report = sections(decode_metrics([of_times()], 0.0, num_streams=1))
        assert report["results"] == {"duration": 0.0, "output_tokens": 0, "output_tput": 0.0}
        assert set(report["tpot"].values()) == set(report["ttft"].values()) == {None}

    def test_cache_counts_when_there_are_any(self) -> None:
        one = StreamPerfMetrics(cached_tokens=64, edit_shortfall=8)
        report = sections(decode_metrics([one, StreamPerfMetrics()], 1.0, num_streams=2))
        assert report["cache"] == {"cached_tokens": 64, "edit_shortfall": 8}
        assert "cache" not in sections(decode_metrics([StreamPerfMetrics()], 1.0, num_streams=1))

    def test_modify(self) -> None:
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

    def test_modify_of_nothing(self) -> None:
        report = sections(modify_metrics([], 0.0, num_streams=0))
        assert report["edit"]["kept_ratio"] is None
        assert set(report["steps"].values()) == {None}

    @pytest.mark.parametrize("phase", [prefill_metrics, decode_metrics, modify_metrics])
    def test_failures_are_named(self, phase: object) -> None:
        assert callable(phase)
        failures = {"s1": ValueError("no room"), "s2": TimeoutError()}
        report = phase([], 1.0, num_streams=3, failures=failures)
        assert sections(report)["failures"] == {"count": 2, "s1": "ValueError: no room", "s2": "TimeoutError"}
        assert sections(report)["config"]["num_streams"] == 3
        assert "no room" in emitted(report)

    @pytest.mark.parametrize("phase", [prefill_metrics, decode_metrics, modify_metrics])
    def test_format_and_width_reach_the_report(self, phase: object) -> None:
        assert callable(phase)
        assert json.loads(emitted(phase([], 1.0, num_streams=0, fmt="json")))["metrics"]
        assert max(map(len, emitted(phase([], 1.0, num_streams=0, width=60)).splitlines())) == 60
        with pytest.raises(UsageError):
            phase([], 1.0, num_streams=0, fmt="xml")


def test_json_knows_no_infinity() -> None:
    metrics = Metrics("odd", fmt="json")
    metrics.add_section("results", "Results").add("a", "A", float("inf")).add("b", "B", float("nan")).add("c", "C", 1.5)
    out = io.StringIO()
    metrics.emit(out)
    assert json.loads(out.getvalue())["metrics"]["results"] == {"a": None, "b": None, "c": 1.5}
