from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from lmcache_stream import portal
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.completions.http import _Sent
from lmcache_stream.errors import EngineStreamError, LMCacheError, UsageError
from lmcache_stream.testing.fake_engine import End, FakeEngine, Reply

from .asking import consume, first, in_use


@pytest.fixture
async def lingering(engine: FakeEngine) -> AsyncIterator[CompletionsClient]:
    async with CompletionsClient(engine.base_url, model="tiny", linger=30) as client:
        yield client


async def leave(engine: FakeEngine, client: CompletionsClient, how: Reply | None = None) -> None:
    """Ask, and leave before anything of the answer was read."""
    if how is not None:
        engine.script(how)
    asked = len(engine.requests)
    task = asyncio.create_task(consume(client))
    await engine.until(lambda: len(engine.requests) > asked)
    await asyncio.sleep(0.05)
    assert task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.parametrize(
    "how",
    [
        Reply(ttft=0.5, pace=60),
        Reply(header_delay=0.5, ttft=0.01, pace=60),
        Reply(ttft=0.5, keep_alive=0.02, pace=60),
        Reply(ttft=0.5, write_size=60, pace=0.05, tokens=500),
    ],
    ids=["no token yet", "no answer yet", "keep-alives", "an event in parts"],
)
async def test_a_request_left_before_its_first_token_stays_open_until_it_comes(
    engine: FakeEngine, lingering: CompletionsClient, how: Reply
) -> None:
    await leave(engine, lingering, how)
    assert in_use(lingering) == 1
    assert engine.disconnects == 0
    await engine.disconnected()
    assert in_use(lingering) == 0


async def test_a_request_left_behind_its_first_token_is_closed_at_once(
    engine: FakeEngine, lingering: CompletionsClient
) -> None:
    engine.script(Reply(end_after=1, end=End.STALL))
    items = lingering([1], {})
    await anext(items)
    await items.aclose()
    assert in_use(lingering) == 0
    await engine.disconnected()


async def test_one_that_waits_for_a_connection_is_not_sent_any_more(engine: FakeEngine) -> None:
    engine.script(Reply(end_after=1, end=End.STALL))
    async with CompletionsClient(engine.base_url, model="tiny", linger=30, max_connections=1) as client:
        items = client([1], {})
        await anext(items)
        waiting = asyncio.create_task(consume(client))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait({waiting})
        await items.aclose()
        tokens, _ = await consume(client)
        assert len(tokens) == 16
    assert len(engine.requests) == 2


@pytest.mark.parametrize("how", [Reply(header_delay=60), Reply(end_after=0, end=End.STALL)])
async def test_a_first_token_that_does_not_come_is_not_waited_for_longer(engine: FakeEngine, how: Reply) -> None:
    async with CompletionsClient(engine.base_url, model="tiny", linger=0.2) as client:
        await leave(engine, client, how)
        assert in_use(client) == 1
        await engine.disconnected()
        assert in_use(client) == 0
        assert (await consume(client))[0] == first(16)


@pytest.mark.parametrize(
    "how",
    [
        Reply(header_delay=0.2, status=500, body=b"no"),
        Reply(header_delay=0.2, raw=b"no HTTP"),
        Reply(ttft=0.2, error_after=0),
        Reply(ttft=0.2, end_after=0, end=End.RESET),
        Reply(ttft=0.2, end_after_bytes=0, end=End.CUT),
        Reply(ttft=0.2, body=b"data: nonsense\n\n"),
    ],
)
async def test_one_that_fails_is_closed(engine: FakeEngine, lingering: CompletionsClient, how: Reply) -> None:
    await leave(engine, lingering, how)
    async with asyncio.timeout(10):
        while in_use(lingering):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await consume(lingering))[0] == first(16)


async def test_closing_the_client_waits_for_first_tokens(engine: FakeEngine) -> None:
    client = CompletionsClient(engine.base_url, model="tiny")
    for how in (Reply(ttft=0.3, pace=60), Reply(header_delay=0.3, ttft=0.01, pace=60)):
        await leave(engine, client, how)
    assert engine.disconnects == 0
    await client.aclose()
    await engine.disconnected(2)


async def test_closing_the_client_waits_for_what_is_left_meanwhile(engine: FakeEngine) -> None:
    client = CompletionsClient(engine.base_url, model="tiny", linger=30)
    engine.script(Reply(ttft=0.3, pace=60), Reply(ttft=0.8, pace=60))
    asking = [asyncio.create_task(consume(client)) for _ in range(2)]
    await engine.until(lambda: len(engine.requests) == 2)
    await asyncio.sleep(0.05)
    asking[0].cancel()
    await asyncio.wait({asking[0]})
    closing = asyncio.create_task(client.aclose())
    await asyncio.sleep(0.05)
    asking[1].cancel()
    await asyncio.wait({asking[1]})
    assert engine.disconnects == 0
    await engine.disconnected()
    assert not closing.done()
    await closing
    await engine.disconnected(2)


async def test_a_close_that_is_cancelled_closes(engine: FakeEngine) -> None:
    client = CompletionsClient(engine.base_url, model="tiny", linger=60)
    await leave(engine, client, Reply(ttft=60))
    session = client._http._session
    assert session is not None
    closing = asyncio.create_task(client.aclose())
    await asyncio.sleep(0.05)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert session.closed
    await engine.until(lambda: engine.connections == 0)


async def test_closing_the_client_breaks_off_who_waits_for_a_token(engine: FakeEngine) -> None:
    client = CompletionsClient(engine.base_url, model="tiny", idle_timeout=60)
    engine.script(Reply(pace=60))
    asking = asyncio.create_task(consume(client))
    await engine.until(lambda: len(engine.requests) == 1)
    await asyncio.sleep(0.05)
    await client.aclose()
    _, error = await asyncio.wait_for(asking, 10)
    assert isinstance(error, EngineStreamError)
    assert "the client was closed" in str(error)


async def test_a_request_that_is_not_sent_as_a_whole_is_closed_at_once() -> None:
    connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        connected.set_result(None)
        await released.wait()
        with contextlib.suppress(ConnectionError):
            while await reader.read(2**16):
                pass
        gone.set_result(None)
        writer.close()

    released = asyncio.Event()
    server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=2**10)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with CompletionsClient(f"http://127.0.0.1:{port}", model="tiny", linger=60) as client:
            asking = asyncio.create_task(anext(client([100_000] * 4_000_000, {})))
            await connected
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait({asking})
            assert in_use(client) == 0
            released.set()
            await asyncio.wait_for(gone, 10)


async def test_closing_the_client_waits_no_longer_than_it_may(engine: FakeEngine) -> None:
    client = CompletionsClient(engine.base_url, model="tiny", linger=60)
    for how in (Reply(header_delay=60), Reply(ttft=60)):
        await leave(engine, client, how)
    await client.aclose(timeout=0.1)
    await engine.until(lambda: engine.connections == 0)


@pytest.mark.parametrize("asking", [False, True])
def test_a_loop_that_ends_leaves_nothing_open(asking: bool) -> None:
    tasks: list[asyncio.Task[object]] = []

    async def ask(engine: FakeEngine) -> None:
        client = CompletionsClient(engine.base_url, model="tiny", linger=60)
        for how in (Reply(header_delay=60), Reply(ttft=60)):
            if asking:
                engine.script(how)
                tasks.append(asyncio.create_task(consume(client)))
            else:
                await leave(engine, client, how)
        await engine.until(lambda: len(engine.requests) == 2)
        await asyncio.sleep(0.05)
        assert in_use(client) == 2
        clients.append(client)

    clients: list[CompletionsClient] = []
    with FakeEngine(model="tiny") as engine:
        asyncio.run(ask(engine))
        assert in_use(clients[0]) == 0
        portal.run(engine.until, lambda: engine.connections == 0)
        session = clients[0]._http._session
        assert session is not None
        asyncio.run(session.close())
    assert all(task.cancelled() for task in tasks)


async def test_an_answer_in_the_pass_in_which_the_time_is_over_is_closed(
    engine: FakeEngine, lingering: CompletionsClient
) -> None:
    engine.script(Reply(ttft=60))
    session = lingering._http.open()
    body = {"prompt": [1], "stream": True}
    asking = session.post(f"{engine.base_url}/v1/completions", json=body, trace_request_ctx=_Sent(0))
    request = asyncio.ensure_future(asking)
    request.add_done_callback(lambda _: [task.cancel() for task in lingering._http.lingering._tasks])
    lingering._http.lingering.leave_request(request)
    await engine.disconnected()
    assert in_use(lingering) == 0


async def test_one_that_was_left_as_the_loop_ends_is_closed(engine: FakeEngine, lingering: CompletionsClient) -> None:
    lingers = lingering._http.lingering
    for how in (Reply(ttft=60), Reply(header_delay=60)):
        engine.script(how)
        asking = asyncio.create_task(consume(lingering))
        asked = len(engine.requests)
        await engine.until(lambda asked=asked: len(engine.requests) > asked)  # type: ignore[misc]
        await asyncio.sleep(0.05)
        asking.cancel()
        asking.add_done_callback(lambda _: [task.cancel() for task in lingers._tasks])
        await asyncio.wait({asking})
    await engine.disconnected(2)
    assert in_use(lingering) == 0


async def test_a_request_that_failed_is_kept_by_nobody(engine: FakeEngine, lingering: CompletionsClient) -> None:
    async def failed() -> weakref.ref[BaseException]:
        engine.script(Reply(raw=b"no HTTP"))
        _, error = await consume(lingering)
        assert isinstance(error, LMCacheError)
        assert error.__cause__ is not None
        return weakref.ref(error.__cause__)

    await failed()
    gc.collect()
    gc.disable()
    try:
        gone = await failed()
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


def test_linger_is_checked() -> None:
    with pytest.raises(UsageError, match="linger cannot be negative"):
        CompletionsClient("http://localhost:1", linger=-1)
