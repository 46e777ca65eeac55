"""Asking a fake engine, and what comes of it."""

from __future__ import annotations

from typing import Any

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import LMCacheError
from lmcache_stream.testing.fake_engine import Reply
from lmcache_stream.types import Completion

from .recorded import RECORDED

HOW: dict[str, dict[str, Any]] = {
    "at once": {},
    "an event a write": {"pace": 0.0},
    "61 bytes a write": {"write_size": 61},
    "close ends the body": {"chunked": False, "pace": 0.0},
}


def in_use(client: CompletionsClient) -> int:
    session = client._http._session
    return 0 if session is None or session.connector is None else len(session.connector._acquired)


async def consume(
    client: CompletionsClient, params: dict[str, Any] | None = None, salt: str = ""
) -> tuple[list[tuple[int | None, str]], Completion | LMCacheError]:
    tokens: list[tuple[int | None, str]] = []
    try:
        async for item in client([1, 2, 3], params or {}, salt):
            if isinstance(item, Completion):
                return tokens, item
            tokens.append((item.token_id, item.text))
    except LMCacheError as error:
        return tokens, error
    raise AssertionError("the stream ended without a Completion")


def first(count: int) -> list[tuple[int | None, str]]:
    return [(token_id, f" {token_id}") for token_id in range(count)]


def recorded_reply(name: str, **how: Any) -> Reply:
    recorded = RECORDED[name]
    return Reply(body=recorded.body, status=recorded.status, content_type=recorded.content_type, **how)
