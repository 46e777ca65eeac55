"""Shows on a terminal how far a benchmark is: each phase's requests, rates and failures."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from lmcache_stream.metrics.report import MIN_WIDTH

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Live", "Show", "table_width"]

WIDEST = 80

Show: TypeAlias = Callable[[int, bool], None]
"""Takes the tokens of a request that is through, and whether it failed."""


def table_width() -> int:
    """Columns for a table: those of the terminal, at most 80 and at least what a table needs."""
    return max(MIN_WIDTH, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


class Live:
    """Progress bars on standard error; none where that is no terminal, or where they are not wanted.

    Args:
        enabled: Whether they are wanted.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._bars: Progress | None = None

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Show bars until the end of the block."""
        if not self._enabled:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rates]}"),
            TextColumn("{task.fields[failures]}", style="red"),
            console=Console(stderr=True),
        ) as self._bars:
            try:
                yield
            finally:
                self._bars.refresh()
        self._bars = None

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Show]:
        """A bar of a phase.

        Args:
            name: The phase's.
            total: Requests.
            done: Those that were through before.
        """
        if self._bars is None:
            yield lambda _tokens, _failed: None
            return
        bar = _Bar(self._bars, self._bars.add_task(name, total=total, completed=done, rates="", failures=""))
        yield bar.show


class _Bar:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task
        self._start = time.perf_counter()
        self._requests = self._tokens = self._failed = 0

    def show(self, tokens: int, failed: bool) -> None:
        self._requests += 1
        self._tokens += tokens
        self._failed += failed
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rates = f"{self._requests / seconds:,.1f} req/s"
        if self._tokens:
            rates += f", {self._tokens / seconds:,.0f} tok/s"
        failures = f"{self._failed} failed" if self._failed else ""
        self._bars.update(self._task, advance=1, rates=rates, failures=failures)
