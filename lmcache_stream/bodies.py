"""Bodies of HTTP answers, read only as far as an answer can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

__all__ = ["MOST_BYTES", "read_body"]

MOST_BYTES = 1 << 24


async def read_body(response: aiohttp.ClientResponse) -> bytes | None:
    """The body of an answer; None if it is longer than `MOST_BYTES`, or has no end at all."""
    body = bytearray()
    while data := await response.content.readany():
        body += data
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)
