"""Streams that end badly."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import (
    EngineConnectionError,
    EngineError,
    EngineResponseError,
    EngineStreamError,
)
from lmcache_stream.testing.fake_engine import End, FakeEngine, Reply
from lmcache_stream.types import Completion, TokenEvent

from .asking import HOW, consume, first, in_use
from .recorded import RECORDED


@pytest.mark.parametrize("how", HOW)
async def test_error_after_tokens(engine: FakeEngine, client: CompletionsClient, how: str) -> None:
    engine.script(Reply(error_after=3, **HOW[how]))
    tokens, error = await consume(client)
    assert tokens == first(3)
    assert isinstance(error, EngineResponseError)
    assert (error.message, error.type, error.code) == ("the engine failed", "InternalServerError", 500)


async def test_clean_end_of_http_without_an_end_of_the_stream(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.script(Reply(end_after=3))
    tokens, error = await consume(client)
    assert tokens == first(3)
    assert isinstance(error, EngineStreamError)
    assert "broke off after 3 tokens" in str(error)


@pytest.mark.parametrize("chunked", [True, False])
async def test_cut_inside_an_event(engine: FakeEngine, client: CompletionsClient, chunked: bool) -> None:
    body = RECORDED["usage"].body
    cut = body.index(b"mote", body.index(b"\n\n")) + 2
    engine.script(Reply(body=body, end_after_bytes=cut, end=End.CUT, chunked=chunked))
    tokens, error = await consume(client)
    assert tokens == RECORDED["usage"].tokens[:1]
    assert isinstance(error, EngineStreamError)


async def test_tokens_that_arrived_unread_before_a_break_are_not_lost(
    engine: FakeEngine, client: CompletionsClient
) -> None:
    engine.script(Reply(end_after=5, end=End.CUT, pace=0.01))
    tokens: list[int | None] = []

    async def read_late() -> None:
        async for item in client([1], {}):
            if not tokens:
                await engine.until(lambda: engine.connections == 0)
                await connection_lost(client)
            assert isinstance(item, TokenEvent)
            tokens.append(item.token_id)

    with pytest.raises(EngineStreamError):
        await read_late()
    assert tokens == [0, 1, 2, 3, 4]


async def connection_lost(client: CompletionsClient) -> None:
    """Returns when the client's transport has seen that the engine is gone."""
    assert client._http._session is not None
    assert client._http._session.connector is not None
    [protocol] = client._http._session.connector._acquired
    for _ in range(1000):
        if protocol.transport is None:
            return
        await asyncio.sleep(0)
    raise AssertionError("the client still sees a connection")


async def test_done_counts_although_the_connection_breaks_after_it(
    engine: FakeEngine, client: CompletionsClient
) -> None:
    engine.script(Reply(tokens=3, end=End.CUT), Reply(tokens=3, end=End.CUT, pace=0.0))
    for _ in range(2):
        tokens, completion = await consume(client)
        assert tokens == first(3)
        assert isinstance(completion, Completion)


async def test_done_counts_although_the_body_does_not_end(
    engine: FakeEngine, client: CompletionsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.completions.reading._DRAIN_TIMEOUT", 0.01)
    engine.script(Reply(tokens=3, end=End.STALL))
    tokens, completion = await consume(client)
    assert tokens == first(3)
    assert isinstance(completion, Completion)
    await engine.until(lambda: engine.connections == 0)


async def test_idle_timeout_within_the_stream(engine: FakeEngine) -> None:
    engine.script(Reply(end_after=2, end=End.STALL))
    async with CompletionsClient(engine.base_url, model="tiny", idle_timeout=0.05) as client:
        tokens, error = await consume(client)
        assert tokens == first(2)
        assert isinstance(error, EngineStreamError)
        assert "0.05 s (idle_timeout)" in str(error)
        await engine.disconnected()
        assert in_use(client) == 0


async def test_idle_timeout_before_the_answer(engine: FakeEngine) -> None:
    engine.script(Reply(header_delay=60))
    async with CompletionsClient(engine.base_url, model="tiny", idle_timeout=0.05) as client:
        _, error = await consume(client)
    assert isinstance(error, EngineConnectionError)
    assert "idle_timeout" in str(error)
    assert len(engine.requests) == 1


async def test_idle_timeout_measures_the_engine_and_not_its_reader(engine: FakeEngine) -> None:
    engine.script(Reply(tokens=8, pace=0.15))
    async with CompletionsClient(engine.base_url, model="tiny", idle_timeout=0.5) as client:
        batches = client.batches([1], {})
        assert isinstance(await anext(batches), list)
        await asyncio.sleep(0.6)
        assert isinstance([batch async for batch in batches][-1], Completion)


async def test_idle_timeout_does_not_bound_the_whole_stream(engine: FakeEngine) -> None:
    engine.script(Reply(tokens=12, pace=0.05))
    async with CompletionsClient(engine.base_url, model="tiny", idle_timeout=0.5) as client:
        tokens, completion = await consume(client)
    assert len(tokens) == 12
    assert isinstance(completion, Completion)


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Reply(body=b'{"choices": []}', content_type="application/json"), EngineStreamError, "application/json"),
        (Reply(body=b"<html>Sign <b>in</b></html>", content_type="text/html"), EngineStreamError, "text/html.*Sign in"),
        (Reply(body=b"data: x\n\n", content_type=""), EngineStreamError, "no content type"),
        (Reply(body=b'{"error": "no room"}', content_type="application/json"), EngineResponseError, "no room"),
        (Reply(raw=b"220 smtp ready\r\n\r\n"), EngineStreamError, "no HTTP"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"), EngineStreamError, "no HTTP"),
    ],
)
async def test_answer_that_is_no_event_stream(
    engine: FakeEngine, client: CompletionsClient, reply: Reply, kind: type[EngineError], words: str
) -> None:
    engine.script(reply)
    with pytest.raises(kind, match=words):
        async for _ in client([1], {}):
            pass
