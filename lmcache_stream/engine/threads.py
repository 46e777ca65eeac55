"""Work that blocks, in a thread that ends with it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(fn: Callable[[], T]) -> T:
    """Run `fn` in a new thread, without blocking the loop. Cancelled, it waits for the thread, and then goes on."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(fn())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=work, name="lmcache-stream-work", daemon=True)
    thread.start()
    result = asyncio.wrap_future(outcome)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.wait([result])
        raise
