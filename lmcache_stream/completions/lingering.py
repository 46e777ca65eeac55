"""Requests that nobody waits for any more, kept open until their first token.

vLLM ends when a request is left while a KV connector such as LMCache's loads its KV (vllm#43226), which it does before
the first token.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from lmcache_stream.completions.reading import read_arrived
from lmcache_stream.completions.sse import CompletionDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

__all__ = ["Lingering"]


class Lingering:
    """Requests that were left before their first token.

    Args:
        seconds: How long one is kept open for its first token; 0: it is closed at once.

    Attributes:
        seconds: The same.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds: float = seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_end: AsyncGenerator[None] | None = None

    async def begin(self) -> None:
        """From here on, the end of the loop closes what is left."""
        if self._loop_end is None:
            self._loop_end = self._at_loop_end()
            await anext(self._loop_end)

    def leave_request(self, request: asyncio.Task[aiohttp.ClientResponse]) -> None:
        """Leave a request that was sent, and whose answer has not begun."""

        def close() -> None:
            request.cancel()
            request.add_done_callback(_close)

        self._see_off(partial(_answered, request), close)

    def leave_answer(self, response: aiohttp.ClientResponse, decoder: CompletionDecoder) -> None:
        """Leave an answer whose first token has not come; `decoder` was fed what came of it."""
        if self.seconds:
            self._see_off(partial(_until_first_token, response, decoder), response.close)
        else:
            response.close()

    async def end(self, seconds: float) -> None:
        """Wait for the first tokens, and close what has none after `seconds`, or when this is cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        try:
            while self._tasks and loop.time() < deadline:
                await asyncio.wait(set(self._tasks), timeout=deadline - loop.time())
        finally:
            loop_end, self._loop_end = self._loop_end, None
            if loop_end is not None:
                await loop_end.aclose()

    async def _at_loop_end(self) -> AsyncGenerator[None]:
        """What a loop that ends closes behind all tasks, which it has cancelled: they may have left requests."""
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            while self._tasks:
                await asyncio.wait(set(self._tasks))

    def _see_off(self, work: Callable[[], Awaitable[None]], close: Callable[[], None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            close()

        task = asyncio.ensure_future(self._in_time(work))
        self._tasks.add(task)
        task.add_done_callback(ended)  # also of one that was cancelled before it began

    async def _in_time(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await work()
        except (TimeoutError, aiohttp.ClientError, OSError, RuntimeError):
            pass  # nobody waits for it


async def _answered(request: asyncio.Task[aiohttp.ClientResponse]) -> None:
    await _until_first_token(await request, CompletionDecoder())


async def _until_first_token(response: aiohttp.ClientResponse, decoder: CompletionDecoder) -> None:
    if response.status == 200:
        while data := await read_arrived(response.content):
            if decoder.feed(data, 0.0) or decoder.ended:
                break


def _close(request: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if not request.cancelled() and request.exception() is None:
        request.result().close()
