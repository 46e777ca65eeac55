"""Shows how far a phase is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PhaseProgress", "ProgressCallback", "ProgressOption", "watching"]

logger: logging.Logger = logging.getLogger("lmcache_stream")


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """How far a phase of a batch is.

    Args:
        phase: "prefill", "modify", "decode", or "run" for `run_streams`.
        total: Streams that take part.
        done: Streams that are through, failed ones included.
        failed: Streams that failed.
    """

    phase: str
    total: int
    done: int = 0
    failed: int = 0


ProgressCallback: TypeAlias = Callable[[PhaseProgress], object]
ProgressOption: TypeAlias = ProgressCallback | Literal[False] | None


@contextmanager
def watching(progress: ProgressOption, phase: str, total: int) -> Iterator[ProgressCallback]:
    """What to tell a phase's progress to: the caller's callback, a bar on a terminal (None), or nobody (False).

    `total` streams take part.
    """
    if callable(progress):
        yield _harmless(progress)
    elif progress is None and sys.stderr.isatty():
        with _bar(phase, total) as show:
            yield show
    else:
        yield lambda _: None


def _harmless(callback: ProgressCallback) -> ProgressCallback:
    """`callback`, whose failure costs nobody a result: it is logged, and then it is not called any more."""
    failed = False

    def show(at: PhaseProgress) -> None:
        nonlocal failed
        if not failed:
            try:
                callback(at)
            except Exception:
                failed = True
                logger.exception("the progress callback failed and is not called again in this phase")

    return show


@contextmanager
def _bar(phase: str, total: int) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(phase, total=total, failed="")

        def show(at: PhaseProgress) -> None:
            failed = f"{at.failed} failed" if at.failed else ""
            bar.update(task, total=at.total, completed=at.done, failed=failed)

        yield show
