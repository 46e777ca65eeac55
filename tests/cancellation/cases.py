"""Every public coroutine, ready to be cancelled.

A case is an async generator: it first yields the call, is told whether that was cancelled, checks what is left, goes on
to the end, and yields what must be the same however often it was cancelled.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing import End, FakeEngine, Reply, TcpProxy
from lmcache_stream.transfer import TransferExecutor
from tests.engines import MODEL, kv_of

from .places import (
    BLOCKED,
    CHUNK,
    PROMPT,
    MemoryCache,
    Place,
    ServerCache,
    answer,
    drop_after_a_while,
    drop_every_other,
    keep,
)

Call = Callable[[], Awaitable[Any]]
Case = Callable[[Place], AsyncGenerator[Any, bool]]
KNOWN = list(range(100, 100 + 3 * CHUNK))


# Streams


def state_of(stream: AsyncLMCacheStream) -> tuple[Any, ...]:
    return stream.tokens, stream.suffix_tokens(), stream.cache_salt, stream.output_tokens(), stream.is_done()


async def brought(
    place: Place, stream: AsyncLMCacheStream, suffix: list[int], count: int, call: Call
) -> AsyncGenerator[Any, bool]:
    """A call that brings `count` tokens: all, some, or none and the stream as it was."""
    before, had = state_of(stream), stream.decoded_tokens()
    prompt = [*stream.tokens, *stream.suffix_tokens(), *suffix]
    cancelled = yield call
    arrived = stream.decoded_tokens() - had
    if not arrived:
        assert cancelled
        assert state_of(stream) == before
        await call()
    else:
        assert cancelled or arrived == count
        assert stream.output_tokens()[had:] == answer(prompt, count)[:arrived]
        assert [*stream.tokens, *stream.suffix_tokens()] == [*prompt, *stream.output_tokens()[had:]]
        if arrived < count:
            await stream.generate({"max_tokens": count - arrived})
    yield await to_the_end(place, stream)


async def to_the_end(place: Place, stream: AsyncLMCacheStream) -> Any:
    await stream.generate({"max_tokens": 2}, [73])
    return place.sent[-1], stream.tokens, stream.output_tokens()


def bringing(
    ready: Callable[[Place], Awaitable[AsyncLMCacheStream]],
    suffix: list[int],
    count: int,
    call: Callable[[AsyncLMCacheStream], Awaitable[Any]],
) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        stream = await ready(place)
        steps = brought(place, stream, suffix, count, lambda: call(stream))
        async with aclosing(steps):
            cancelled = yield await anext(steps)
            yield await steps.asend(cancelled)

    return case


async def fresh(place: Place) -> AsyncLMCacheStream:
    return place.stream()


async def consume(stream: AsyncLMCacheStream) -> None:
    async with aclosing(stream.events({"max_tokens": 4}, [71])) as events:
        async for _ in events:
            pass


async def consume_loosely(stream: AsyncLMCacheStream) -> None:
    async for _ in stream.events({"max_tokens": 4}, [71]):
        await asyncio.sleep(0)


def modifying(fn: Any) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        stream = await place.prefilled()
        before = state_of(stream)
        if (yield lambda: stream.modify_kv(fn)):
            assert state_of(stream) == before
            await stream.modify_kv(fn)
        yield await to_the_end(place, stream)

    return case


async def update_kv(place: Place) -> AsyncGenerator[Any, bool]:
    stream = await place.prefilled()
    before = state_of(stream)
    ids = PROMPT[: 2 * CHUNK + 1]

    def call() -> Awaitable[None]:
        return stream.update_kv(kv_of(ids), ids)

    if (yield call):
        assert state_of(stream) == before
        await call()
    yield await to_the_end(place, stream)


async def retrieve_kv(place: Place) -> AsyncGenerator[Any, bool]:
    stream = await place.prefilled()
    before = state_of(stream)
    yield stream.retrieve_kv
    assert state_of(stream) == before
    assert torch.equal(await stream.retrieve_kv(), kv_of(PROMPT[: len(PROMPT) // CHUNK * CHUNK]))
    yield await to_the_end(place, stream)


async def fork(place: Place) -> AsyncGenerator[Any, bool]:
    stream = await place.edited()
    before = state_of(stream)
    yield stream.fork
    assert state_of(stream) == before
    other = await stream.fork()
    yield await to_the_end(place, stream), await to_the_end(place, other)


# Batches


def batch_of(streams: list[AsyncLMCacheStream]) -> AsyncBatchedStream:
    batch = AsyncBatchedStream(progress=False)
    batch.extend(streams)
    return batch


def batch_bringing(
    ready: Callable[[Place, str], Awaitable[AsyncLMCacheStream]],
    count: int,
    call: Callable[[AsyncBatchedStream], Awaitable[Any]],
) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        streams = [await ready(place, salt) for salt in ("one", "two")]
        batch = batch_of(streams)
        had = [stream.decoded_tokens() for stream in streams]
        before = [state_of(stream) for stream in streams]
        prompts = [[*stream.tokens, *stream.suffix_tokens()] for stream in streams]
        cancelled = yield lambda: call(batch)
        for stream, was, state, prompt in zip(streams, had, before, prompts, strict=True):
            arrived = stream.decoded_tokens() - was
            assert cancelled or arrived == count
            assert arrived or state_of(stream) == state
            assert stream.output_tokens()[was:] == answer(prompt, count)[:arrived]
            if arrived < count:
                await stream.generate({"max_tokens": count - arrived})
        yield [await to_the_end(place, stream) for stream in streams]

    return case


def batch_modifying(call: Callable[[AsyncBatchedStream, list[str]], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        streams = [await place.prefilled(salt) for salt in ("one", "two")]
        batch = batch_of(streams)
        before = {stream.stream_id(): state_of(stream) for stream in streams}
        if (yield lambda: call(batch, list(before))):
            left = [of for of, state in before.items() if state_of(batch.get_stream(of)) == state]
            if left:
                await call(batch, left)
        yield [await to_the_end(place, stream) for stream in streams]

    return case


async def fresh_salted(place: Place, salt: str) -> AsyncLMCacheStream:
    return place.stream(salt)


# Caches


async def retrieve(place: Place) -> AsyncGenerator[Any, bool]:
    ctx = place.cache.ctx
    await place.cache.offload(KNOWN, "")
    yield lambda: ctx.retrieve([*KNOWN, 1])
    found = await ctx.retrieve(KNOWN)
    assert found is not None
    yield found.tolist()


def storing(call: Callable[[AsyncKVCacheContext, torch.Tensor, str], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        ctx, salt = place.cache.ctx, uuid.uuid4().hex
        kv = kv_of(KNOWN)
        cancelled = yield lambda: call(ctx, kv, salt)
        if cancelled:
            kv.zero_()  # a caller who was cancelled may do that
        assert await ctx.lookup(KNOWN, salt) in ((0, len(KNOWN)) if cancelled else (len(KNOWN),))
        assert await ctx.store(kv_of(KNOWN), KNOWN, salt)
        found = await ctx.retrieve(KNOWN, salt)
        assert found is not None
        yield found.tolist()

    return case


async def lookup(place: Place) -> AsyncGenerator[Any, bool]:
    await place.cache.offload(KNOWN, "")
    yield lambda: place.cache.ctx.lookup([*KNOWN, *KNOWN])
    yield await place.cache.ctx.lookup([*KNOWN, *KNOWN])


def waiting(tokens: list[int]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        def call() -> Awaitable[int]:
            return place.cache.ctx.wait_for(tokens, timeout=0.01, poll_interval=0.005)

        await place.cache.offload(KNOWN, "")
        yield call
        yield await call()

    return case


async def close_cache(place: Place) -> AsyncGenerator[Any, bool]:
    ctx = await place.cache.connect()
    await ctx.lookup(KNOWN)
    yield ctx.close
    await ctx.close()
    with pytest.raises(UsageError, match="closed"):
        await ctx.lookup(KNOWN)
    yield None


async def enter_cache(place: Place) -> AsyncGenerator[Any, bool]:
    ctx = await place.cache.connect()
    yield ctx.__aenter__
    await ctx.lookup(KNOWN)
    await ctx.close()
    yield None


async def leave_cache(place: Place) -> AsyncGenerator[Any, bool]:
    ctx = await place.cache.connect()
    await ctx.lookup(KNOWN)
    yield lambda: ctx.__aexit__(None, None, None)
    await ctx.close()
    yield None


def connecting(cache: Any) -> Any:
    if isinstance(cache, MemoryCache):
        return aconnect(cache.url)
    assert isinstance(cache, ServerCache)
    return aconnect(cache.url, cache.server.http_url, MODEL, 10.0, geometry=BLOCKED)


async def connect(place: Place) -> AsyncGenerator[Any, bool]:
    opened: list[AsyncKVCacheContext] = []

    async def call() -> None:
        opened.append(await connecting(place.cache))

    cancelled = yield call
    assert len(opened) == (not cancelled)
    for ctx in [*opened, await connecting(place.cache)]:
        await ctx.lookup(KNOWN)
        await ctx.close()
    yield None


async def connect_and_enter(place: Place) -> AsyncGenerator[Any, bool]:
    async def call() -> None:
        async with connecting(place.cache) as ctx:
            await ctx.lookup(KNOWN)

    yield call
    await call()
    yield None


# The client


def client_of(place: Place) -> CompletionsClient:
    assert place.client is not None
    return place.client


def asking(ask: Callable[[CompletionsClient], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        yield lambda: ask(client_of(place))
        yield await ask(client_of(place))

    return case


async def all_items(client: CompletionsClient) -> list[Any]:
    async with aclosing(client(PROMPT, {"max_tokens": 4})) as items:
        return [getattr(item, "token_id", None) async for item in items]


async def all_batches(client: CompletionsClient) -> Any:
    async with aclosing(client.batches(PROMPT, {"max_tokens": 4})) as batches:
        return [token.token_id async for batch in batches if isinstance(batch, list) for token in batch]


def of_a_new_client(call: Callable[[CompletionsClient], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        async with CompletionsClient(client_of(place).base_url) as client:
            assert await client.health()
            yield lambda: call(client)
        with pytest.raises(UsageError, match="closed"):
            await client.health()
        yield None

    return case


# Copies


def executing(call: Callable[[TransferExecutor, torch.Tensor], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        executor = TransferExecutor(1)
        try:
            given = torch.arange(8.0)
            yield lambda: call(executor, given)
            assert torch.equal(given, torch.arange(8.0))
            yield await executor.run(lambda: 3)
        finally:
            executor.close()

    return case


async def copy(executor: TransferExecutor, given: torch.Tensor) -> None:
    out = torch.zeros(8)
    try:
        await executor.copy_(out, given)
    finally:
        # The copy has ended, or will never begin.
        assert out.tolist() in (given.tolist(), [0.0] * 8)


# Fakes


Fake = FakeEngine | TcpProxy


async def answers(fake: Fake) -> bool:
    """Whether somebody listens there."""
    async with CompletionsClient(fake.base_url if isinstance(fake, FakeEngine) else fake.url) as client:
        return await client.health()


def fake_of(kind: type[Fake], place: Place) -> Fake:
    return TcpProxy(client_of(place).base_url) if kind is TcpProxy else FakeEngine()


def starting(kind: type[Fake], call: Callable[[Any], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        fake = fake_of(kind, place)
        cancelled = yield lambda: call(fake)
        if cancelled:
            await fake.stop()
            await fake.start()
        assert await answers(fake)
        await fake.stop()
        yield None

    return case


def stopping(kind: type[Fake], call: Callable[[Any], Awaitable[Any]]) -> Case:
    async def case(place: Place) -> AsyncGenerator[Any, bool]:
        fake = fake_of(kind, place)
        await fake.start()
        async with CompletionsClient(fake.base_url if isinstance(fake, FakeEngine) else fake.url) as client:
            assert await client.health()
            cancelled = yield lambda: call(fake)
            if cancelled:
                await fake.stop()
        assert fake.connections == 0
        await fake.start()
        assert await answers(fake)
        await fake.stop()
        yield None

    return case


async def drop(place: Place) -> AsyncGenerator[Any, bool]:
    async with TcpProxy(client_of(place).base_url) as proxy, CompletionsClient(proxy.url) as client:
        assert await client.health()
        yield proxy.drop
        await proxy.drop()
        assert proxy.connections == 0
        yield await client.health()


async def until(place: Place) -> AsyncGenerator[Any, bool]:
    engine, client = place.http, client_of(place)
    assert engine is not None
    seen = len(engine.requests)
    yield lambda: asyncio.gather(engine.until(lambda: len(engine.requests) > seen), client.health())
    assert engine._waiting == []
    yield await client.health()


async def disconnected(place: Place) -> AsyncGenerator[Any, bool]:
    engine, client = place.http, client_of(place)
    assert engine is not None
    left = engine.disconnects

    async def leave() -> None:
        engine.script(Reply(end_after=1, end=End.STALL, pace=0))
        async with aclosing(client(PROMPT, {"max_tokens": 4})) as items:
            await anext(items)

    yield lambda: asyncio.gather(engine.disconnected(left + 1), leave())
    assert engine._waiting == []
    engine._script.clear()
    yield await client.health()


# The table

STREAMS = ["memory+async", "memory+blocking", "memory+http", "shared memory+async", "pickle+async", "grpc+async"]
CACHES = ["memory+async", "shared memory+async", "pickle+async", "grpc+async"]
HTTP = ["memory+http"]
ALONE = ["memory+async"]

CASES: dict[str, list[tuple[Case, list[str]]]] = {
    "AsyncLMCacheStream.generate": [
        (bringing(fresh, [70], 1, lambda stream: stream.generate({"max_tokens": 1}, [70])), STREAMS),
        (bringing(Place.edited, [71], 4, lambda stream: stream.generate({"max_tokens": 4}, [71])), STREAMS),
        (
            bringing(
                Place.prefilled,
                [71],
                5,
                lambda stream: stream.generate({"max_tokens": 5}, [71], edit_every=2, editor=keep),
            ),
            ["memory+async"],
        ),
    ],
    "AsyncLMCacheStream.events": [
        (bringing(Place.edited, [71], 4, consume), ["memory+async", "memory+blocking", "memory+http"]),
        (bringing(Place.edited, [71], 4, consume_loosely), ["memory+async", "memory+blocking", "memory+http"]),
    ],
    "AsyncLMCacheStream.retrieve_kv": [(retrieve_kv, CACHES)],
    "AsyncLMCacheStream.update_kv": [(update_kv, CACHES)],
    "AsyncLMCacheStream.modify_kv": [
        (modifying(drop_every_other), CACHES),
        (modifying(drop_after_a_while), ALONE),
    ],
    "AsyncLMCacheStream.fork": [(fork, ALONE)],
    "AsyncBatchedStream.prefill": [
        (batch_bringing(fresh_salted, 1, lambda batch: batch.prefill({})), ["memory+async", "memory+http"])
    ],
    "AsyncBatchedStream.decode": [
        (
            batch_bringing(Place.edited, 3, lambda batch: batch.decode({"max_tokens": 3})),
            ["memory+http", "shared memory+async"],
        )
    ],
    "AsyncBatchedStream.run_streams": [
        (batch_bringing(Place.edited, 3, lambda batch: batch.run_streams({"max_tokens": 3})), ["memory+blocking"])
    ],
    "AsyncBatchedStream.modify": [
        (
            batch_modifying(lambda batch, ids: batch.modify(drop_every_other, stream_ids=ids)),
            ALONE,
        )
    ],
    "AsyncBatchedStream.modify_stream": [
        (batch_modifying(lambda batch, ids: batch.modify_stream(drop_every_other, stream_ids=ids)), ALONE)
    ],
    "AsyncKVCacheContext.retrieve": [(retrieve, CACHES)],
    "AsyncKVCacheContext.put": [(storing(lambda ctx, kv, salt: ctx.put(kv, KNOWN, salt)), CACHES)],
    "AsyncKVCacheContext.store": [(storing(lambda ctx, kv, salt: ctx.store(kv, KNOWN, salt)), ALONE)],
    "AsyncKVCacheContext.lookup": [(lookup, CACHES)],
    "AsyncKVCacheContext.wait_for": [(waiting(KNOWN), CACHES), (waiting([1, *KNOWN]), CACHES)],
    "AsyncKVCacheContext.close": [(close_cache, CACHES)],
    "AsyncKVCacheContext.__aenter__": [(enter_cache, ALONE)],
    "AsyncKVCacheContext.__aexit__": [(leave_cache, ["memory+async", "shared memory+async"])],
    "aconnect": [(connect, CACHES), (connect_and_enter, ["memory+async", "shared memory+async"])],
    "CompletionsClient.__call__": [(asking(all_items), HTTP)],
    "CompletionsClient.batches": [(asking(all_batches), HTTP)],
    "CompletionsClient.models": [(asking(lambda client: client.models()), HTTP)],
    "CompletionsClient.tokenize": [(asking(lambda client: client.tokenize("text")), HTTP)],
    "CompletionsClient.detokenize": [(asking(lambda client: client.detokenize([97, 98])), HTTP)],
    "CompletionsClient.health": [(asking(lambda client: client.health()), HTTP)],
    "CompletionsClient.aclose": [(of_a_new_client(lambda client: client.aclose()), HTTP)],
    "CompletionsClient.__aenter__": [(of_a_new_client(lambda client: client.__aenter__()), HTTP)],
    "CompletionsClient.__aexit__": [(of_a_new_client(lambda client: client.__aexit__(None, None, None)), HTTP)],
    "TransferExecutor.run": [(executing(lambda executor, given: executor.run(given.sum)), ALONE)],
    "TransferExecutor.copy_": [(executing(copy), ALONE)],
    "TransferExecutor.to_device": [(executing(TransferExecutor.to_device), ALONE)],
    "TransferExecutor.to_host": [(executing(TransferExecutor.to_host), ALONE)],
    "FakeEngine.start": [(starting(FakeEngine, FakeEngine.start), ALONE)],
    "FakeEngine.__aenter__": [(starting(FakeEngine, FakeEngine.__aenter__), ALONE)],
    "FakeEngine.stop": [(stopping(FakeEngine, FakeEngine.stop), ALONE)],
    "FakeEngine.__aexit__": [(stopping(FakeEngine, lambda fake: fake.__aexit__(None, None, None)), ALONE)],
    "TcpProxy.start": [(starting(TcpProxy, TcpProxy.start), HTTP)],
    "TcpProxy.__aenter__": [(starting(TcpProxy, TcpProxy.__aenter__), HTTP)],
    "TcpProxy.stop": [(stopping(TcpProxy, TcpProxy.stop), HTTP)],
    "TcpProxy.__aexit__": [(stopping(TcpProxy, lambda fake: fake.__aexit__(None, None, None)), HTTP)],
    "TcpProxy.drop": [(drop, HTTP)],
    "FakeEngine.until": [(until, HTTP)],
    "FakeEngine.disconnected": [(disconnected, HTTP)],
}
