"""Reads of a response's body: what has arrived in one piece, the whole, its start, and a bound on the waiting."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import aiohttp

from lmcache_stream.bodies import read_body
from lmcache_stream.errors import EngineResponseError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["IdleWatch", "drain", "read_arrived", "start_of", "unread", "whole"]

_ONE_EVENT = 512
_ERROR_BODY = 2**16
_ANSWER = 2**26  # the longest there is lists the ids of a text
_DRAIN_TIMEOUT = 1.0


async def read_arrived(content: aiohttp.StreamReader) -> bytes:
    """Waits for bytes and takes all that are there, as `readany` does; empty only at the end.

    `readany` goes through the HTTP parser again after every HTTP chunk, and engines send one an event. Here a few
    chunks are taken that way and what has piled up behind them at once.

    Args:
        content: The body; nobody else reads from it.
    """
    data = await content.read(_ONE_EVENT)
    if len(data) < _ONE_EVENT or content.exception() is not None:
        return data
    buffer = _buffer(content)
    if len(buffer) > 1:
        piled_up = b"".join(buffer)
        buffer.clear()
        buffer.append(piled_up)
    return data + content.read_nowait()


def unread(content: aiohttp.StreamReader) -> bytes:
    """What arrived before a body broke and was not read yet; aiohttp does not hand it out after an error."""
    return b"".join(_buffer(content))[getattr(content, "_buffer_offset", 0) :]


class IdleWatch:
    """Breaks a read off that waits too long, with one timer a response instead of one a read.

    Args:
        response: What is read.
        timeout: Seconds.
        among: Where it is kept while the response is read.

    Attributes:
        waiting_since: When the wait began, in seconds of `time.perf_counter`; None: nothing is waited for.
    """

    def __init__(self, response: aiohttp.ClientResponse, timeout: float, among: set[IdleWatch]) -> None:
        self._among = among
        self.waiting_since: float | None = None
        self._content = response.content
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        connection = response.connection
        if connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = None

    def __enter__(self) -> Self:
        self._handle = self._loop.call_later(self._timeout, self._check)
        self._among.add(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()
        self._among.discard(self)

    def break_off(self) -> None:
        """Have the read fail, which aiohttp does not see to when the session is closed."""
        self._content.set_exception(aiohttp.ClientConnectionError("the client was closed"))

    def _check(self) -> None:
        waited = 0.0 if self.waiting_since is None else time.perf_counter() - self.waiting_since
        if waited >= self._timeout:
            self._content.set_exception(aiohttp.SocketTimeoutError("idle"))
        else:
            self._handle = self._loop.call_later(self._timeout - waited, self._check)


async def whole(response: aiohttp.ClientResponse) -> bytes:
    """All of a body; one that goes on beyond what an answer can be is refused."""
    body = await read_body(response, _ANSWER)
    if body is None:
        raise EngineResponseError(f"{response.url} answered more than {_ANSWER} bytes", status=200)
    return body


async def start_of(response: aiohttp.ClientResponse) -> bytes:
    """As much of a body as an error needs, and perhaps some more."""
    body = bytearray()
    while len(body) < _ERROR_BODY and (data := await response.content.readany()):
        body += data
    return bytes(body)


async def drain(content: aiohttp.StreamReader) -> None:
    """Reads the end of the body, so that the connection can serve another request."""
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT):
            while not content.at_eof():
                await content.readany()
    except (TimeoutError, aiohttp.ClientError):
        pass


def _buffer(content: aiohttp.StreamReader) -> deque[bytes]:
    """The chunks that aiohttp keeps, or none, should a version keep them otherwise."""
    buffer = getattr(content, "_buffer", None)
    return buffer if isinstance(buffer, deque) else deque()
