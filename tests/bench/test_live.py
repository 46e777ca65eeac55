from __future__ import annotations

import io
import sys

import pytest

from lmcache_stream.bench.live import Live, table_width


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(live: Live) -> None:
    with live.showing(), live.phase("decode knorm:keep=0.5", 4, 1) as advance:
        advance(10, False)
        advance(0, True)
        advance(10, False)


def test_a_terminal_shows_phase_rates_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    show(Live())
    shown = terminal.getvalue()
    for part in ("decode knorm:keep=0.5", "4/4", "req/s", "tok/s", "1 failed"):
        assert part in shown


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()])
def test_is_quiet_where_it_should_be(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    show(Live(enabled=not terminal.isatty()))
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("200", 80), ("10", 40), ("", 80)])
def test_tables_are_no_wider_than_the_terminal(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert table_width() == width
