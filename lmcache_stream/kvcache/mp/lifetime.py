"""The life of a context: on one event loop, until a close or the loop's end, with a good end for calls under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.errors import UsageError
from lmcache_stream.finishing import finish
from lmcache_stream.kvcache.mp.errand import CLEAN_UP, Errand, detach, run_errand

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from lmcache_stream.kvcache.buffers import BufferPool
    from lmcache_stream.kvcache.mp.registry import Registry
    from lmcache_stream.kvcache.mp.transport import Transport

__all__ = ["CLOSE_TIMEOUT", "Lifetime"]

T = TypeVar("T")

CLOSE_TIMEOUT = 5.0
"""Seconds that a close waits for calls under way before it asks them to let go of what they hold."""

LOOP_END_TIMEOUT = 2.0
"""The same as `CLOSE_TIMEOUT` where the loop ends under an open context."""

LAST_TIMEOUT = 3.0
"""Seconds for calls that had to be cancelled, and again to unregister."""


class Lifetime:
    """From the making of a context to its end; it belongs to the event loop that made it.

    Args:
        registry: What is unregistered in the end.
        transport: What is closed behind that.
        buffers: What is dropped.
    """

    def __init__(self, registry: Registry, transport: Transport, buffers: BufferPool) -> None:
        self._registry = registry
        self._transport = transport
        self._buffers = buffers
        self._errands: set[Errand] = set()
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop_end = self._at_loop_end()
        self._loop_ends = self._closed = False

    async def begin(self) -> None:
        """From here on, the end of the loop is an end."""
        await anext(self._loop_end)

    def check_open(self) -> None:
        """Raise if it is over, or another loop's."""
        if self._closing is not None:
            raise UsageError("the context is closed: connect again")
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("the context belongs to another event loop: connect once in each")

    async def run(self, work: Callable[[Errand], Coroutine[Any, Any, T]], errand: Errand) -> T:
        """Run `work`, for which a close waits; see `run_errand`."""
        return await run_errand(work, errand, self._errands)

    async def close(self) -> None:
        """Let go of everything. Calls under way are given a few seconds to let go of what they hold."""
        if self._closing is None:
            self._closing = detach(self._close_in_time())
        await asyncio.shield(self._closing)

    async def _close_in_time(self) -> None:
        try:
            await self._close(CLOSE_TIMEOUT)
        finally:
            if not self._loop_ends:
                self._closed = True
                await self._loop_end.aclose()

    async def _close(self, patience: float) -> None:
        """Give the calls under way `patience` seconds, and then `CLEAN_UP` more to let go of what they hold."""
        try:
            if self._errands:
                await asyncio.wait(self._running(), timeout=patience)
            for errand in self._errands:
                errand.hurry()
            if self._errands:
                await asyncio.wait(self._running(), timeout=CLEAN_UP + 1)
            left = self._running()
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=LAST_TIMEOUT)
            await self._registry.close(timeout=LAST_TIMEOUT)
        finally:
            await self._transport.close()
            self._buffers.clear()

    def _running(self) -> list[asyncio.Task[Any]]:
        return [errand.task for errand in self._errands if errand.task is not None]

    async def _at_loop_end(self) -> AsyncGenerator[None]:
        """What a loop that ends closes behind all tasks, which it has cancelled."""
        try:
            yield
        finally:
            if not self._closed:
                self._loop_ends = True
                if self._closing is None:
                    self._closing = detach(self._close(LOOP_END_TIMEOUT))
                await finish(self._closing, None)
