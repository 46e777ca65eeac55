"""Work that is seen through to its end, also when nobody waits for it any more; and what is left of one that failed.

An error leads to the frames that it ran through, and those to what they hold. Where a frame holds the error as well,
or the task or future that has it, that is a circle: gigabytes stay until the garbage collector comes round.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

__all__ = ["finish", "forget_frames", "thread_to_the_end", "to_the_end"]

T = TypeVar("T")


async def thread_to_the_end(fn: Callable[[], T]) -> T:
    """Run `fn` in a new thread, without blocking the loop. Cancelled, it waits for the thread, and then goes on."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(fn())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=work, name="lmcache-stream-work", daemon=True)
    thread.start()
    return await to_the_end(asyncio.wrap_future(outcome))


async def to_the_end(work: Awaitable[T]) -> T:
    """Await `work`. Cancelled, however often, it waits for its end, and then goes on."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        return running.result()
    if not running.cancelled():
        running.exception()  # nobody wants it any more
    try:
        raise cancelled
    finally:
        del cancelled


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that `error`, and what led to it, ran through."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]


async def finish(task: asyncio.Future[Any], seconds: float | None) -> None:
    """Wait for `task`, at most `seconds`, whatever happens to the waiter; its result is not looked at."""
    loop = asyncio.get_running_loop()
    deadline = None if seconds is None else loop.time() + seconds
    with anyio.CancelScope(shield=True):
        while not task.done() and (deadline is None or loop.time() < deadline):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=None if deadline is None else deadline - loop.time())
