"""Short questions to a server over HTTP."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from lmcache_stream import bodies
from lmcache_stream.serving.doctor.findings import Fails

__all__ = ["decoded", "get", "version_in"]


async def get(session: aiohttp.ClientSession, url: str, remedy: str) -> tuple[int, bytes]:
    """Status and body of what `url` answers.

    Raises:
        Fails: It gives no answer, or one without an end.
    """
    try:
        async with session.get(url, allow_redirects=False) as response:
            body = await bodies.read_body(response, bodies.MOST_BYTES)
    except TimeoutError:
        raise Fails(f"{url} gives no answer in time", remedy) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Fails(f"{url} gives no answer: {error}", remedy) from None
    if body is None:
        raise Fails(f"{url} answers more than {bodies.MOST_BYTES} bytes", remedy)
    return response.status, body


def decoded(body: bytes) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def version_in(status: int, body: bytes) -> str:
    """The version that an answer at `/version` tells, or that it tells none."""
    answer = decoded(body) if status == 200 else None
    if isinstance(answer, dict):
        answer = answer.get("version") or answer.get("lmcache_version")
    return answer if isinstance(answer, str) and answer else "not published"
