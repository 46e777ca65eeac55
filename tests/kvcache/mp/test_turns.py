from __future__ import annotations

import asyncio

import pytest
import torch

from lmcache_stream.errors import CacheTimeout
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import TOKENS, C, made_kv, opened


async def test_equal_calls_do_not_confuse_the_server(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    outcomes = await asyncio.gather(*(ctx.put(kv, TOKENS) for _ in range(8)))
    assert sum(outcome.taken for outcome in outcomes) == 4
    assert all(outcome.complete for outcome in outcomes)
    many = await asyncio.gather(*(ctx.retrieve(TOKENS) for _ in range(8)))
    assert all(out is not None and torch.equal(out, kv) for out in many)
    assert not ctx._turns._busy


async def test_a_call_that_waits_for_an_equal_one_has_a_deadline(
    server: FakeCacheServer, ctx: MPKVCacheContext
) -> None:
    fault = server.fault(wire.LOOKUP, "hold")
    first = asyncio.create_task(ctx.retrieve(TOKENS))
    await asyncio.to_thread(fault.struck.wait)
    with pytest.raises(CacheTimeout, match="other calls"):
        await ctx.retrieve(TOKENS, timeout=0.05)
    fault.release()
    assert await first is None


async def test_a_store_of_what_is_there_and_retrieves_of_it_leave_no_lock(server: FakeCacheServer) -> None:
    """A store reads what it finds, and the server takes two reads of equal keys for one."""
    kv = torch.randn(2, 3, len(TOKENS), 8)
    async with opened(server) as ctx:
        await ctx.put(kv, TOKENS)
        for _ in range(5):
            await asyncio.gather(ctx.retrieve(TOKENS), ctx.put(torch.randn_like(kv), TOKENS), ctx.retrieve(TOKENS))
            assert server.held == {}
        assert torch.equal(await ctx.retrieve(TOKENS), kv)


async def test_a_store_waits_for_a_shorter_one_that_it_begins_with(
    shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext
) -> None:
    kv = made_kv()
    fault = shm_server.fault(wire.PREPARE_STORE, "hold")
    shorter = asyncio.create_task(shm_ctx.put(kv[:, :, : 2 * C], TOKENS[: 2 * C]))
    await asyncio.to_thread(fault.struck.wait)
    longer = asyncio.create_task(shm_ctx.put(kv, TOKENS))
    async with asyncio.timeout(5):
        while not shm_server.calls["commit_store"]:  # noqa: ASYNC110  (another thread's state)
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)  # for a lookup that came too early
    fault.release()
    assert await shorter == StoreOutcome(2, taken=2)
    assert await longer == StoreOutcome(4, taken=2, same=2)
