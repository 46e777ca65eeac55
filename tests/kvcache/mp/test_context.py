from __future__ import annotations

import asyncio
import random

import pytest
import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.types import CacheKind

from .opened import GEOMETRY, MODEL, TOKENS, C, made_kv, opened, retrieved


async def test_what_is_stored_is_retrieved(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    assert await ctx.put(kv, TOKENS, "salt") == StoreOutcome(4, taken=4)
    out = await retrieved(ctx, TOKENS, "salt")
    assert torch.equal(out, kv)
    assert out.is_contiguous()
    assert await ctx.lookup(TOKENS, "salt") == len(TOKENS)
    assert server.held == {}


async def test_only_whole_chunks_count(ctx: MPKVCacheContext) -> None:
    tokens = [*TOKENS, 1, 2, 3]
    kv = made_kv(len(tokens))
    assert await ctx.put(kv, tokens) == StoreOutcome(4, taken=4)
    assert torch.equal(await retrieved(ctx, tokens), kv[:, :, : len(TOKENS)])
    assert await ctx.put(kv[:, :, :3], tokens[:3]) == StoreOutcome(0)
    assert await ctx.retrieve(tokens[:3]) is None
    assert await ctx.lookup([]) == 0


async def test_the_longest_prefix_is_retrieved(ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv[:, :, : 2 * C], TOKENS[: 2 * C])
    assert torch.equal(await retrieved(ctx, TOKENS), kv[:, :, : 2 * C])
    other = [*TOKENS[:C], *[0] * C, *TOKENS[2 * C :]]
    assert await ctx.lookup(other) == C
    assert await ctx.retrieve([7, *TOKENS[1:]]) is None
    assert await ctx.retrieve(TOKENS, "another salt") is None


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_ranks_are_gathered_and_scattered(shared_memory: bool) -> None:
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=4, world_size=2)
    with FakeCacheServer(chunk_size=C, shared_memory=shared_memory) as server:
        server.serve(MODEL, geometry)
        async with opened(server, geometry=geometry) as context:
            kv = made_kv()
            assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
            assert server.chunks == 8
            assert torch.equal(await retrieved(context, TOKENS), kv)
            stored = await context.retrieve_stored(TOKENS)
            assert stored is not None
            assert torch.equal(stored[1][0], kv[:, :, :C, 4:])
            assert await context.put(kv + 1, TOKENS) == StoreOutcome(4, kept=4)
        assert server.held == {}
        assert server.wrong_unlocks == 0


async def test_queries_have_a_name_of_their_own(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    queries = torch.randn(1, 3, 2 * C, 16)
    assert await ctx.put(queries, TOKENS[: 2 * C], kind=CacheKind.QUERY) == StoreOutcome(2, taken=2)
    assert await ctx.lookup(TOKENS) == 0
    assert await ctx.lookup(TOKENS, kind=CacheKind.QUERY) == 2 * C
    assert torch.equal(await retrieved(ctx, TOKENS, kind=CacheKind.QUERY), queries)
    with pytest.raises(UsageError, match=r"\[1, "):
        await ctx.put(queries.bfloat16(), TOKENS[: 2 * C], kind=CacheKind.QUERY)


async def test_many_streams_at_once(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    async def stream(number: int) -> bool:
        tokens = [number, *TOKENS[1:]]
        kv = made_kv(seed=number)
        await ctx.put(kv, tokens)
        return torch.equal(await retrieved(ctx, tokens), kv)

    assert all(await asyncio.gather(*(stream(number) for number in range(64))))


async def test_wait_for_comes_back_when_a_store_has_come(ctx: MPKVCacheContext) -> None:
    waiting = asyncio.create_task(ctx.wait_for(TOKENS, timeout=10, poll_interval=0.01))
    await ctx.put(made_kv(2 * C), TOKENS[: 2 * C])
    assert await ctx.wait_for(TOKENS, timeout=0.05, poll_interval=0.01) == 2 * C
    await ctx.put(made_kv(), TOKENS)
    assert await waiting == len(TOKENS)
    assert await ctx.wait_for(TOKENS[:3], timeout=10) == 0


async def test_bad_input_sends_nothing(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    calls = server.calls.copy()
    with pytest.raises(UsageError, match="shape"):
        await ctx.put(made_kv(width=9), TOKENS)
    with pytest.raises(UsageError, match="shape"):
        await ctx.put(made_kv(9), TOKENS)
    with pytest.raises(UsageError, match="dtype"):
        await ctx.put(made_kv().bfloat16(), TOKENS)
    for odd in (made_kv().to_sparse(), made_kv().to("meta")):
        with pytest.raises(UsageError, match="dense tensor with values"):
            await ctx.put(odd, TOKENS)
    with pytest.raises(UsageError, match="floating point"):
        await ctx.put(torch.ones(1, 3, len(TOKENS), 16, dtype=torch.int64), TOKENS, kind=CacheKind.QUERY)
    with pytest.raises(UsageError, match="cache_salt"):
        await ctx.put(made_kv(), TOKENS, "a@b")
    with pytest.raises(UsageError, match="cache_salt"):
        await ctx.lookup(TOKENS, "x" * 129)
    with pytest.raises(UsageError, match="token"):
        await ctx.retrieve([-1] * C)
    with pytest.raises(UsageError, match="poll_interval must be a number of seconds above 0, not 0"):
        await ctx.wait_for(TOKENS, timeout=0, poll_interval=0)
    assert server.calls == calls


async def test_a_policy_that_wipes_salts_is_named() -> None:
    with FakeCacheServer(chunk_size=C, eviction_policy="IsolatedLRU") as server:
        server.serve(MODEL, GEOMETRY)
        async with opened(server) as context:
            await context.put(made_kv(), TOKENS)
            with pytest.warns(UserWarning, match="quota"):
                await context.put(made_kv(), TOKENS, "salt")


async def test_cancelled_at_any_moment(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)

    async def job(salt: str) -> None:
        await ctx.put(kv, TOKENS, salt)
        await ctx.retrieve(TOKENS, salt)
        await ctx.put(kv + 1, TOKENS)

    rng = random.Random(0)
    for number in range(60):
        task = asyncio.create_task(job(f"salt {number}"))
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0 if rng.random() < 0.5 else 1e-4)
        task.cancel()
        await asyncio.wait([task])
        assert server.held == {}, f"after {number}"
    assert torch.equal(await retrieved(ctx, TOKENS), kv)
