from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, CacheTimeout, GeometryError
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import TOKENS, made_kv, opened, retrieved, until_let_go


async def test_a_retrieved_tensor_is_private(ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    (await retrieved(ctx, TOKENS)).zero_()
    assert torch.equal(await retrieved(ctx, TOKENS), kv)


async def test_an_output_is_not_reused_while_a_view_of_it_lives(ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    view = (await retrieved(ctx, TOKENS))[:, :, :1]
    for _ in range(3):
        (await retrieved(ctx, TOKENS)).zero_()
    assert torch.equal(view, kv[:, :, :1])


@pytest.mark.parametrize("kind", ["few", "outside", "overlap", "shape", "dtype"])
async def test_slots_that_cannot_be_are_not_touched(
    shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext, kind: Any
) -> None:
    kv = made_kv()
    await shm_ctx.put(kv, TOKENS)
    shm_server.fault(wire.PREPARE_RETRIEVE, kind)
    with pytest.raises((CacheProtocolError, GeometryError)):
        await shm_ctx.retrieve(TOKENS)
    assert shm_server.held == {}
    assert torch.equal(await retrieved(shm_ctx, TOKENS), kv)


@pytest.mark.parametrize("registered_again", [False, True])
async def test_a_retrieve_that_was_refused_and_given_up_lets_go_of_what_its_lookup_locked(
    server: FakeCacheServer, ctx: MPKVCacheContext, registered_again: bool
) -> None:
    await ctx.put(made_kv(), TOKENS)
    await retrieved(ctx, TOKENS)
    server.forget()
    asked = server.calls["prepare_retrieve"]
    given_up = asyncio.create_task(ctx.retrieve(TOKENS, timeout=60))
    while server.calls["prepare_retrieve"] == asked:  # noqa: ASYNC110  (another thread's state)
        await asyncio.sleep(0.001)
    assert server.read_locks == 4
    if registered_again:
        reader = ctx._fetcher.reader
        assert reader is not None
        await ctx._registry.again(reader, reader.times_registered, timeout=5)
    given_up.cancel()
    await asyncio.wait([given_up])
    await until_let_go(server)
    assert (server.read_locks, server.wrong_unlocks) == (0, 0)


async def test_slots_of_an_earlier_registration_are_not_read(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PATIENCE", 60.0)
    async with opened(shm_server) as context:
        await context.put(made_kv(), TOKENS)
        fault = shm_server.fault(wire.PREPARE_RETRIEVE, "hold")
        late = asyncio.create_task(context.retrieve(TOKENS))
        await asyncio.to_thread(fault.struck.wait)
        shm_server.forget()
        reader = context._fetcher.reader
        assert reader is not None
        await context._registry.again(reader, 1, timeout=5)
        fault.release()
        with pytest.raises(CacheConnectionError, match="restarted meanwhile"):
            await late
    assert shm_server.held == {}


@pytest.mark.parametrize("operation", [wire.LOOKUP, wire.WAIT_PREFETCH_STATUS, wire.PREPARE_RETRIEVE])
@pytest.mark.parametrize("kind", ["lose", "hold", "duplicate", "garble", "wrong-operation"])
async def test_no_lock_outlives_a_failed_retrieve(
    server: FakeCacheServer,
    ctx: MPKVCacheContext,
    operation: wire.Operation[Any],
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "lose":
        monkeypatch.setattr(session_module, "LINGER", 0.1)
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    fault = server.fault(operation, kind)
    try:
        assert torch.equal(await retrieved(ctx, TOKENS, timeout=0.3), kv)
        assert kind == "duplicate"
    except CacheTimeout:
        assert kind in ("lose", "hold")
    except CacheProtocolError:
        assert kind in ("garble", "wrong-operation")
    fault.release()
    await until_let_go(server)
    assert torch.equal(await retrieved(ctx, TOKENS), kv)


@pytest.mark.parametrize("kind", ["ignore", "lose", "garble"])
async def test_read_locks_are_freed_whatever_became_of_the_preparation(
    shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext, kind: Any
) -> None:
    await shm_ctx.put(made_kv(), TOKENS)
    shm_server.fault(wire.PREPARE_RETRIEVE, kind)
    with pytest.raises((CacheTimeout, CacheProtocolError)):
        await shm_ctx.retrieve(TOKENS, timeout=0.2)
    await until_let_go(shm_server)


@pytest.mark.parametrize(
    "operation",
    [wire.LOOKUP, wire.WAIT_PREFETCH_STATUS, wire.PREPARE_RETRIEVE, wire.COMMIT_RETRIEVE, wire.END_SESSION],
)
async def test_a_cancelled_retrieve_lets_go(
    server: FakeCacheServer, ctx: MPKVCacheContext, operation: wire.Operation[Any]
) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    fault = server.fault(operation, "hold")
    task = asyncio.create_task(ctx.retrieve(TOKENS))
    await asyncio.to_thread(fault.struck.wait)
    task.cancel()
    await asyncio.sleep(0)
    fault.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.held == {}
    assert torch.equal(await retrieved(ctx, TOKENS), kv)


async def test_cancelled_twice_still_lets_go(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    await ctx.put(made_kv(), TOKENS)
    fault = server.fault(wire.LOOKUP, "hold")
    task = asyncio.create_task(ctx.retrieve(TOKENS))
    await asyncio.to_thread(fault.struck.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    fault.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.held == {}


async def test_a_restart_while_a_retrieve_ends_does_not_block_the_next(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server, timeout=60.0) as ctx:
        await ctx.put(torch.randn(2, 3, len(TOKENS), 8), TOKENS)
        fault = shm_server.fault(wire.COMMIT_RETRIEVE, "hold")
        call = asyncio.create_task(ctx.retrieve(TOKENS))
        assert await asyncio.to_thread(fault.struck.wait, 10)
        shm_server.restart()
        fault.release()
        with contextlib.suppress(CacheError):
            await call
        async with asyncio.timeout(10):
            assert await ctx.retrieve(TOKENS) is None
    assert shm_server.held == {}


async def test_a_result_that_is_there_survives_a_broken_connection(shm_server: FakeCacheServer) -> None:
    kv = made_kv()
    async with opened(shm_server) as context:
        await context.put(kv, TOKENS)
        fault = shm_server.fault(wire.COMMIT_RETRIEVE, "ignore")
        call = asyncio.create_task(context.retrieve(TOKENS))
        await asyncio.to_thread(fault.struck.wait)
        shm_server.restart()
        found = await call
    assert found is not None
    assert torch.equal(found, kv)
