"""Requests and connections, over a socket."""

from __future__ import annotations

import asyncio
import gzip
import socket
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import (
    EngineConnectionError,
    EngineError,
    EngineResponseError,
    EngineStreamError,
    UsageError,
)
from lmcache_stream.testing.fake_engine import End, FakeEngine, Reply
from lmcache_stream.types import Completion

from .asking import consume, first, recorded_reply

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_busy_engine_is_asked_again(engine: FakeEngine, client: CompletionsClient, status: int) -> None:
    engine.script(*[Reply(status=status, body=b"busy", headers={"retry-after": "0"})] * 2)
    tokens, completion = await consume(client)
    assert isinstance(completion, Completion)
    assert (len(tokens), completion.attempts) == (16, 3)
    assert len(engine.requests) == 3


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_other_errors_are_final(engine: FakeEngine, client: CompletionsClient, status: int) -> None:
    engine.script(Reply(status=status, body=b"no"))
    _, error = await consume(client)
    assert isinstance(error, EngineResponseError)
    assert (error.status, error.message, len(engine.requests)) == (status, "no", 1)


@pytest.mark.parametrize(
    ("reply", "step"),
    [
        (
            Reply(status=401, body=b'{"error": "Unauthorized"}'),
            "HTTP 401: Unauthorized; give the engine's key as api_key",
        ),
        (Reply(status=403, body=b""), "or set OPENAI_API_KEY to it"),
        (
            Reply(status=404, body=b'{"detail": "Not Found"}'),
            "HTTP 404: Not Found; is base_url the address of an engine",
        ),
        (Reply(status=501, body=b"<h1>no POST</h1>"), "HTTP 501: no POST; is base_url the address of an engine"),
        (
            Reply(status=404, body=b'{"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}}'),
            "HTTP 404: Not Found; is base_url the address of an engine",
        ),
        (
            Reply(status=404, body=b'{"error": {"message": "no model m", "type": "NotFoundError", "code": 404}}'),
            "HTTP 404: no model m$",
        ),
    ],
)
async def test_a_wrong_address_or_key_says_what_to_do(engine: FakeEngine, reply: Reply, step: str) -> None:
    engine.script(reply, path="/v1/models")
    async with CompletionsClient(engine.base_url) as client:
        with pytest.raises(EngineResponseError, match=step):
            await client.models()


async def test_nobody_at_the_address() -> None:
    with FakeEngine() as gone:
        address = gone.base_url
    async with CompletionsClient(address, retries=0) as client:
        with pytest.raises(EngineConnectionError, match=r"\(is the engine running, and its address right\?\)$"):
            await client.models()


async def test_retries_end(engine: FakeEngine) -> None:
    engine.script(*[Reply(status=503, body=b"busy", headers={"retry-after": "0"})] * 3)
    async with CompletionsClient(engine.base_url, model="tiny", retries=1) as client:
        _, error = await consume(client)
    assert isinstance(error, EngineResponseError)
    assert (error.status, error.message, len(engine.requests)) == (503, "busy", 2)


async def test_retry_after_is_honoured_within_a_bound(
    engine: FakeEngine, client: CompletionsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(delay: float) -> None:
        pauses.append(delay)
        await sleep(0)

    monkeypatch.setattr("lmcache_stream.completions.http.asyncio.sleep", recorded)
    for value in ("3", "3600", "Wed, 21 Oct 2065 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", "soon"):
        engine.script(Reply(status=503, body=b"", headers={"retry-after": value}))
        await consume(client)
    assert pauses[:4] == [3.0, 10.0, 10.0, 0.0]
    assert 0.05 <= pauses[4] <= 0.1


async def test_connection_that_breaks_before_the_answer_is_tried_again(
    engine: FakeEngine, client: CompletionsClient
) -> None:
    engine.script(Reply(raw=b""))
    tokens, _ = await consume(client)
    assert (len(tokens), len(engine.requests)) == (16, 2)


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        async with CompletionsClient(f"http://127.0.0.1:{port}", model="tiny", retries=1) as client:
            _, error = await consume(client)
            assert isinstance(error, EngineConnectionError)
            assert f"127.0.0.1:{port}" in str(error)
            assert await client.health() is False


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("end", [End.CUT, End.RESET])
async def test_nothing_is_tried_again_after_the_first_byte(
    engine: FakeEngine, client: CompletionsClient, after: int, end: End
) -> None:
    engine.script(Reply(end_after=after, end=end, pace=0.0))
    tokens, error = await consume(client)
    assert isinstance(error, EngineStreamError)
    assert tokens == first(after)
    assert len(engine.requests) == 1


async def test_connections_are_used_again(engine: FakeEngine, client: CompletionsClient) -> None:
    ways: list[dict[str, Any]] = [{}, {"pace": 0.0}, {"write_size": 100}]
    for how in ways:
        engine.script(recorded_reply("usage", **how))
        await consume(client)
    await client.models()
    assert engine.accepted == 1


async def test_there_is_no_limit_of_connections(engine: FakeEngine, client: CompletionsClient) -> None:
    engine.default = Reply(end_after=1, end=End.STALL)
    tasks = [asyncio.create_task(consume(client)) for _ in range(150)]
    await engine.until(lambda: len(engine.completions) == 150)
    assert engine.connections == 150
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await engine.disconnected(150)


async def test_a_limit_of_connections_makes_requests_wait(engine: FakeEngine) -> None:
    engine.default = Reply(tokens=3, pace=0.0)
    async with CompletionsClient(engine.base_url, model="tiny", max_connections=2, connect_timeout=5) as client:
        results = await asyncio.gather(*(consume(client) for _ in range(9)))
    assert all(isinstance(completion, Completion) for _, completion in results)
    assert engine.accepted <= 2


async def test_client_belongs_to_its_first_loop(engine: FakeEngine, client: CompletionsClient) -> None:
    def on_another_loop(what: Callable[[], Any]) -> None:
        async def call() -> None:
            await what()

        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(call())

    await client.models()
    await asyncio.to_thread(on_another_loop, client.models)
    await asyncio.to_thread(on_another_loop, client.aclose)
    assert await client.health()


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000 + b"\r\n",
        b"HTTP/1.1 200 " + b"a" * 2_000_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n",
    ],
)
async def test_a_head_without_end_is_refused(engine: FakeEngine, client: CompletionsClient, raw: bytes) -> None:
    engine.script(Reply(raw=raw), path="/v1/models")
    with pytest.raises(EngineError) as caught:
        await client.models()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "reply",
    [
        Reply(body=b" " * (1 << 21), content_type="application/json"),
        Reply(
            body=gzip.compress(b" " * (1 << 26)), content_type="application/json", headers={"content-encoding": "gzip"}
        ),
    ],
)
async def test_an_answer_without_end_is_refused(
    engine: FakeEngine, client: CompletionsClient, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.completions.reading._ANSWER", 1 << 20)
    engine.script(reply, path="/v1/models")
    with pytest.raises(EngineResponseError, match="more than 1048576 bytes"):
        await client.models()


async def test_a_close_that_takes_too_long_leaves_no_task(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: object) -> None:
        await asyncio.Event().wait()

    client = CompletionsClient(engine.base_url, model="tiny")
    await consume(client)
    session = client._http._session
    assert session is not None
    before = asyncio.all_tasks()
    with monkeypatch.context() as patched:
        patched.setattr(type(session), "close", never)
        await client.aclose(timeout=0.01)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    await session.close()
