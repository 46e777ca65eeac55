"""Ctrl-C that ends a run cleanly, however often it is pressed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["INTERRUPTED", "run_until_interrupt"]

INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C ended."""
ENDING: Final = "ending; once more leaves at once, without a result"


def run_until_interrupt(work: Callable[[], Coroutine[Any, Any, None]], say: Callable[[str], object]) -> bool:
    """`asyncio.run(work())`; whether Ctrl-C ended it.

    The first Ctrl-C cancels `work` and waits for its clean-up, the third leaves the process on the spot. asyncio's own
    answer to a second one is a KeyboardInterrupt wherever the loop happens to be, after which it may wait for ever.
    Outside the main thread, and where the program handles SIGINT itself, all this is left to the program.

    Args:
        work: What to run.
        say: Takes a line about what Ctrl-C does.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        asyncio.run(work())
        return False
    interrupts = 0
    running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 2:
            os._exit(INTERRUPTED)
        if running is not None:
            loop, task = running
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel if interrupts == 1 else partial(say, ENDING))

    async def watched() -> None:
        nonlocal running
        task = asyncio.current_task()
        assert task is not None
        running = asyncio.get_running_loop(), task
        if interrupts:
            task.cancel()
        await work()

    signal.signal(signal.SIGINT, interrupt)
    try:
        asyncio.run(watched())
    except asyncio.CancelledError:
        if not interrupts:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return interrupts > 0
