from __future__ import annotations

import io
import json

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import Metrics, check_format
from tests.metrics.reports import emitted, sections


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_json_knows_no_infinity() -> None:
    metrics = Metrics("odd", fmt="json")
    metrics.add_section("results", "Results").add("a", "A", float("inf")).add("b", "B", float("nan")).add("c", "C", 1.5)
    out = io.StringIO()
    metrics.emit(out)
    assert json.loads(out.getvalue())["metrics"]["results"] == {"a": None, "b": None, "c": 1.5}
