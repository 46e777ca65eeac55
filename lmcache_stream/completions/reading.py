"""Reads of a response's body that take all that has arrived in one piece."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

__all__ = ["read_arrived", "unread"]

_ONE_EVENT = 512


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


def _buffer(content: aiohttp.StreamReader) -> deque[bytes]:
    """The chunks that aiohttp keeps, or none, should a version keep them otherwise."""
    buffer = getattr(content, "_buffer", None)
    return buffer if isinstance(buffer, deque) else deque()
