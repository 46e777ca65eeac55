from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import registry as registry_module
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.kvcache.mp.errand import Errand
from lmcache_stream.kvcache.mp.pool import Pool
from lmcache_stream.testing.fake_cache_server import FakeCacheServer, FaultKind
from lmcache_stream.types import CacheKind

from .opened import MODEL, TOKENS, made_kv, opened, retrieved


async def test_a_forgotten_registration_is_made_again(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    server.forget()
    assert torch.equal(await retrieved(ctx, TOKENS), kv)
    server.forget()
    assert await ctx.put(kv, TOKENS, "salt") == StoreOutcome(4, taken=4)
    assert server.calls["register_kv_cache_engine_driven_context"] == 3
    assert len(server.clients) == 1


async def test_a_busy_server_that_has_forgotten_us_is_asked_again(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PATIENCE", 0.1)
    kv = made_kv()
    async with opened(shm_server) as context:
        await context.put(kv, TOKENS)
        shm_server.forget()
        shm_server.http_status = 503
        storing = asyncio.create_task(context.put(kv, TOKENS, "salt", timeout=20))
        await asyncio.sleep(0.3)
        shm_server.http_status = 200
        assert await storing == StoreOutcome(4, taken=4)


async def test_the_same_context_works_after_a_restart(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    server.restart()
    assert await ctx.put(kv + 1, TOKENS) == StoreOutcome(4, taken=4)
    assert torch.equal(await retrieved(ctx, TOKENS), kv + 1)
    async with opened(server) as second:
        assert torch.equal(await retrieved(second, TOKENS), kv + 1)


@pytest.mark.parametrize("kind", ["lose", "garble", "wrong-operation", "wrong-type", "nothing", "frames"])
async def test_a_registration_made_again_without_an_answer_leads_to_no_old_segment(
    shm_server: FakeCacheServer, kind: FaultKind
) -> None:
    kv = made_kv()
    async with opened(shm_server) as context:
        await context.put(kv, TOKENS)
        shm_server.restart()
        shm_server.fault(wire.REGISTER, kind)
        with pytest.raises(CacheError):
            await context.put(kv + 1, TOKENS, timeout=0.5)
        shm_server.offload(MODEL, TOKENS, "engine", kv + 2)
        assert torch.equal(await retrieved(context, TOKENS, "engine"), kv + 2)
        assert await context.put(kv + 3, TOKENS) == StoreOutcome(4, taken=4)
        assert torch.equal(shm_server.read(MODEL, TOKENS), kv + 3)
    assert shm_server.wrong_publications == 0
    assert shm_server.held == {}


async def test_no_call_is_made_while_it_is_uncertain_whose_slots_it_would_be_told_of(
    shm_server: FakeCacheServer,
) -> None:
    async with opened(shm_server) as context:
        await context.put(made_kv(), TOKENS)
        await context.retrieve(TOKENS)
        registry, reader = context._registry, context._fetcher.reader
        assert reader is not None
        shm_server.restart()
        shm_server.fault(wire.REGISTER, "nothing")
        with pytest.raises(CacheProtocolError):
            await registry.again(reader, reader.times_registered, timeout=5)

        async def told() -> bool:
            return registry.pool is not None and registry.pool.is_current()

        current, view = await registry.knowing_us(Errand(5.0, 5.0), reader, told)
        assert current
        assert view == registry.view(reader)


async def test_a_registration_made_again_by_another_call_serves_all(shm_server: FakeCacheServer) -> None:
    tokens = [[number, *TOKENS[1:]] for number in range(3)]
    async with opened(shm_server) as context:
        for number, ids in enumerate(tokens):
            await context.put(made_kv(seed=number), ids)
        shm_server.forget()
        found = await asyncio.gather(*(retrieved(context, ids) for ids in tokens))
    assert all(torch.equal(kv, made_kv(seed=number)) for number, kv in enumerate(found))
    assert shm_server.clients == []


async def test_a_call_waits_for_the_registration_that_another_makes_again(shm_server: FakeCacheServer) -> None:
    others = [7, *TOKENS[1:]]
    async with opened(shm_server) as context:
        await context.put(made_kv(seed=1), TOKENS)
        await context.put(made_kv(seed=2), others)
        shm_server.forget()
        registering = shm_server.fault(wire.REGISTER, "hold")
        first = asyncio.create_task(context.retrieve(TOKENS))
        await asyncio.to_thread(registering.struck.wait)
        second = asyncio.create_task(context.retrieve(others))
        while shm_server.calls["wait_prefetch_status"] < 2:  # noqa: ASYNC110  (another thread's state)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert shm_server.calls["prepare_retrieve"] == 1
        registering.release()
        found = await asyncio.gather(first, second)
    assert all(kv is not None and torch.equal(kv, made_kv(seed=seed)) for seed, kv in enumerate(found, 1))
    assert shm_server.held == {}


async def test_two_layouts_registered_again_at_once(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv, queries = made_kv(), torch.randn(1, 3, len(TOKENS), 16)
    await ctx.put(kv, TOKENS)
    await ctx.put(queries, TOKENS, kind=CacheKind.QUERY)
    for lost in (server.forget, server.restart):
        lost()
        outcomes = await asyncio.gather(
            ctx.put(kv, TOKENS, f"{lost.__name__}"), ctx.put(queries, TOKENS, f"{lost.__name__}", kind=CacheKind.QUERY)
        )
        assert [outcome.taken for outcome in outcomes] == [4, 4]
        assert server.held == {}


async def test_a_registration_under_way_keeps_no_other_call_waiting(
    shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext
) -> None:
    shm_server.serve(f"{MODEL}##query", KVGeometry(num_layers=3, num_kv_heads=1, head_dim=16, planes=1))
    await shm_ctx.put(made_kv(), TOKENS)
    fault = shm_server.fault(wire.REGISTER, "hold")
    first = asyncio.create_task(shm_ctx.put(torch.randn(1, 3, len(TOKENS), 16), TOKENS, kind=CacheKind.QUERY))
    await asyncio.to_thread(fault.struck.wait)
    assert await shm_ctx.put(made_kv(), TOKENS, "salt") == StoreOutcome(4, taken=4)
    assert not first.done()
    fault.release()
    assert await first == StoreOutcome(4, taken=4)


async def test_a_pool_that_could_not_be_mapped_is_mapped_before_the_next_store(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = made_kv()
    async with opened(shm_server) as context:
        await context.put(kv, TOKENS)
        shm_server.restart()
        fails = [OSError("no descriptors"), None]

        def mapping(*args: Any, **options: Any) -> Pool:
            error = fails.pop(0) if fails else None
            if error is not None:
                raise CacheConnectionError(str(error))
            return Pool(*args, **options)

        monkeypatch.setattr(registry_module, "Pool", mapping)
        with pytest.raises(CacheConnectionError, match="no descriptors"):
            await context.put(kv, TOKENS)
        assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert shm_server.held == {}
