"""Bodies of HTTP answers, read only as far as an answer can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

__all__ = ["MOST_BYTES", "read_body"]

MOST_BYTES = 1 << 24
"""Of what a server says about itself."""


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body of an answer; None if it has more than `most` bytes, or no end at all."""
    body = bytearray()
    while data := await response.content.readany():
        body += data
        if len(body) > most:
            return None
    return bytes(body)
