"""Requests that nobody waits for any more, kept open until their first token.

vLLM ends when a request is left while a KV connector such as LMCache's loads its KV (vllm#43226), which it does before
the first token.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from lmcache_stream.completions.reading import read_arrived
from lmcache_stream.completions.sse import CompletionDecoder

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

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

    def leave_request(self, request: asyncio.Task[aiohttp.ClientResponse]) -> None:
        """Leave a request that was sent, and whose answer has not begun."""
        self._see_off(self._answered(request))

    def leave_answer(self, response: aiohttp.ClientResponse, decoder: CompletionDecoder) -> None:
        """Leave an answer whose first token has not come; `decoder` was fed what came of it."""
        if self.seconds:
            self._see_off(self._until_first_token(response, decoder))
        else:
            response.close()

    async def ended(self, seconds: float) -> None:
        """Wait until all have been seen off; after `seconds` they are closed."""
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _see_off(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._in_time(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await work
        except (TimeoutError, aiohttp.ClientError, OSError, RuntimeError):
            pass  # nobody waits for it

    async def _answered(self, request: asyncio.Task[aiohttp.ClientResponse]) -> None:
        await self._until_first_token(await request, CompletionDecoder())

    async def _until_first_token(self, response: aiohttp.ClientResponse, decoder: CompletionDecoder) -> None:
        try:
            if response.status == 200:
                while data := await read_arrived(response.content):
                    if decoder.feed(data, 0.0) or decoder.ended:
                        break
        finally:
            response.close()
