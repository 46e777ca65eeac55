"""Whether a server is healthy, and what is said of one that is not."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import anyio.to_thread

from lmcache_stream import bodies
from lmcache_stream.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lmcache_stream.serving.process import ServerProcess

__all__ = ["answers_healthy", "comes_true", "get_json", "has_ended", "not_in_time"]

POLL_INTERVAL = 0.25
ANSWER = 5.0


async def comes_true(
    condition: Callable[[], Awaitable[bool]], check: Callable[[], Awaitable[None]], timeout: float
) -> bool:
    """Ask `condition` until it holds or `timeout` seconds are over; `check` raises when it never will hold."""
    deadline = time.monotonic() + timeout
    while True:
        await check()
        if await condition():
            return True
        if time.monotonic() >= deadline:
            return False
        await anyio.sleep(POLL_INTERVAL)


async def answers_healthy(url: str) -> bool:
    """Whether `url` answers 200, and does not say that it is unhealthy."""
    try:
        async with http_session() as session, session.get(url) as response:
            if response.status != 200:
                return False
            body = await bodies.read_body(response, bodies.MOST_BYTES)
    except (aiohttp.ClientError, TimeoutError):
        return False
    if body is None:
        return False
    with contextlib.suppress(ValueError):
        said = json.loads(body)
        return not isinstance(said, dict) or bool(said.get("is_healthy", True))
    return True


async def get_json(url: str) -> dict[str, Any]:
    """The JSON object at `url`.

    Raises:
        CacheError: No answer, one that is none, or one without an end.
    """
    try:
        async with http_session() as session, session.get(url) as response:
            response.raise_for_status()
            body = await bodies.read_body(response, bodies.MOST_BYTES)
        if body is None:
            raise CacheError(f"{url} answers more than {bodies.MOST_BYTES} bytes")
        answer: Any = json.loads(body)
    except TimeoutError as error:
        raise CacheError(f"{url} did not answer in time") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise CacheError(f"{url} did not answer: {error}") from error
    if not isinstance(answer, dict):
        raise CacheError(f"{url} answered no JSON object")
    return answer


def http_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER))


async def has_ended(process: ServerProcess) -> str:
    """What is said of a server that has ended."""
    return f"{process.name} ended with status {process.returncode}. {await log_end(process)}"


async def not_in_time(process: ServerProcess, seconds: float) -> str:
    """What is said of a server that was not healthy in time."""
    return f"{process.name} was not healthy within {seconds:g} s. {await log_end(process)}"


async def log_end(process: ServerProcess) -> str:
    lines = await anyio.to_thread.run_sync(process.last_lines)
    return f"The end of its log ({process.log}):\n{lines}"
