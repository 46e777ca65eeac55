from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheTimeout, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.memory import EmbeddedCache, MemoryKVCacheContext, open_context
from lmcache_stream.transfer import TransferExecutor, default_executor
from lmcache_stream.types import CacheKind

from .embedded import GEOMETRY, HEAD_DIM, HEADS, LAYERS, kv_of, opened, until_waiting


async def test_what_is_stored_comes_back(ctx: MemoryKVCacheContext) -> None:
    kv = kv_of(11)
    assert await ctx.store(kv, list(range(11)))
    assert await ctx.lookup(range(11)) == 8
    back = await ctx.retrieve(range(11))
    assert back is not None
    assert back.is_contiguous()
    assert torch.equal(back, kv[:, :, :8])
    assert await ctx.retrieve(range(6)) is not None
    assert await ctx.retrieve(range(3)) is None
    assert await ctx.retrieve([]) is None
    assert await ctx.retrieve(range(11), "salt") is None


async def test_less_than_a_chunk_stores_nothing(ctx: MemoryKVCacheContext) -> None:
    assert await ctx.put(kv_of(3), range(3)) == StoreOutcome(chunks=0)


async def test_edits_in_place_stay_outside_the_cache(ctx: MemoryKVCacheContext) -> None:
    kv = kv_of(8)
    before = kv.clone()
    await ctx.put(kv, range(8))
    kv.zero_()
    first = await ctx.retrieve(range(8))
    assert first is not None
    first.zero_()
    second = await ctx.retrieve(range(8))
    assert second is not None
    assert torch.equal(second, before)


async def test_a_second_store_of_other_bytes_is_no_success(ctx: MemoryKVCacheContext) -> None:
    assert await ctx.store(kv_of(8, fill=1), range(8))
    assert await ctx.store(kv_of(8, fill=1), range(8))
    assert not await ctx.store(kv_of(8, fill=2), range(8))
    assert await ctx.store(kv_of(8, fill=2), range(8), "salt")


async def test_queries_have_a_shape_and_a_coverage_of_their_own(ctx: MemoryKVCacheContext) -> None:
    queries = torch.randn(1, LAYERS, 4, 2 * HEADS * HEAD_DIM)
    await ctx.put(kv_of(8), range(8))
    await ctx.put(queries, range(4), kind=CacheKind.QUERY)
    assert await ctx.lookup(range(8), kind=CacheKind.QUERY) == 4
    back = await ctx.retrieve(range(8), kind=CacheKind.QUERY)
    assert back is not None
    assert torch.equal(back, queries)


async def test_it_waits_for_coverage(ctx: MemoryKVCacheContext) -> None:
    waiting = asyncio.create_task(ctx.wait_for(range(8), timeout=60))
    await until_waiting(ctx.cache, 1)
    await ctx.put(kv_of(8), range(8))
    assert await waiting == 8


@pytest.mark.parametrize(
    ("kv", "tokens", "kind", "message"),
    [
        (kv_of(8), range(7), CacheKind.KV, r"\[2, 2, 7, 3\], not \[2, 2, 8, 3\]"),
        (kv_of(8)[:1], range(8), CacheKind.KV, r"\[2, 2, 8, 3\], not \[1, 2, 8, 3\]"),
        (kv_of(8)[:, :1], range(8), CacheKind.KV, r"not \[2, 1, 8, 3\]"),
        (kv_of(8)[..., :2], range(8), CacheKind.KV, r"not \[2, 2, 8, 2\]"),
        (kv_of(8)[0], range(8), CacheKind.KV, r"not \[2, 8, 3\]"),
        (kv_of(8), range(8), CacheKind.QUERY, r"\[1, 2, 8, 6\], not \[2, 2, 8, 3\]"),
        (kv_of(8).half(), range(8), CacheKind.KV, "torch.float32, not torch.float16"),
        ([1, 2], range(2), CacheKind.KV, "torch.Tensor, not list"),
        (kv_of(2), [1, -1], CacheKind.KV, "at least 0"),
        (kv_of(2), [1.0, 2.0], CacheKind.KV, "integer"),
        (kv_of(2), [[1, 2]], CacheKind.KV, "flat"),
        (kv_of(2), "ab", CacheKind.KV, "flat"),
        (kv_of(2), [1, 2**64], CacheKind.KV, "token"),
        (kv_of(2), [1, None], CacheKind.KV, "integer"),
        (kv_of(2), [[1], [2, 3]], CacheKind.KV, "flat"),
    ],
)
async def test_a_put_that_cannot_be_right_is_refused(
    ctx: MemoryKVCacheContext, kv: Any, tokens: Any, kind: CacheKind, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        await ctx.put(kv, tokens, kind=kind)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, None, 7])
async def test_a_salt_that_cannot_be_right_is_refused_everywhere(ctx: MemoryKVCacheContext, salt: Any) -> None:
    for call in (
        ctx.retrieve(range(4), salt),
        ctx.lookup(range(4), salt),
        ctx.put(kv_of(4), range(4), salt),
        ctx.wait_for(range(4), timeout=0, cache_salt=salt),
    ):
        with pytest.raises(UsageError, match="cache_salt"):
            await call
    assert await ctx.lookup(range(4), "x" * 128) == 0


async def test_a_long_prompt_is_hashed_off_the_loop(ctx: MemoryKVCacheContext, monkeypatch: Any) -> None:
    hashed_in: list[str] = []
    keys = ctx.cache._keys

    def spy(*args: Any) -> list[bytes]:
        hashed_in.append(threading.current_thread().name)
        return keys(*args)

    monkeypatch.setattr(ctx.cache, "_keys", spy)
    tokens = list(range(50_000))
    await ctx.lookup(tokens)
    await ctx.retrieve(tokens)
    await ctx.wait_for(tokens, timeout=0)
    await ctx.put(kv_of(len(tokens)), tokens)
    assert len(hashed_in) == 4
    assert all(name.startswith("lmcache-stream-transfer") for name in hashed_in)


async def test_a_look_that_does_not_get_its_turn_times_out(ctx: MemoryKVCacheContext) -> None:
    hold = threading.Event()
    executor = default_executor()
    busy = [executor.submit(hold.wait, 30) for _ in range(executor.lanes)]
    try:
        with pytest.raises(CacheTimeout, match=r"0\.01 s"):
            await ctx.lookup(range(50_000), timeout=0.01)
    finally:
        hold.set()
        await asyncio.gather(*map(asyncio.wrap_future, busy))


async def test_a_copy_that_does_not_get_its_turn_times_out(cache: EmbeddedCache) -> None:
    executor = TransferExecutor(lanes=1, device="cpu")
    ctx = MemoryKVCacheContext(EmbeddedCache.open("memory://test"), "m", GEOMETRY, timeout=0.01, executor=executor)
    hold = threading.Event()
    busy = executor.submit(hold.wait, 30)
    with pytest.raises(CacheTimeout, match=r"0\.01 s"):
        await ctx.put(kv_of(4), range(4))
    with pytest.raises(CacheTimeout, match=r"0\.02 s"):
        await ctx.retrieve(range(4), timeout=0.02)
    hold.set()
    assert await asyncio.wrap_future(busy)
    assert await ctx.put(kv_of(4), range(4), timeout=60) == StoreOutcome(chunks=1, taken=1)
    await ctx.close()
    executor.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", None])
async def test_a_time_that_cannot_be_is_refused(ctx: MemoryKVCacheContext, timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout must be a number of seconds"):
        await ctx.wait_for(range(4), timeout=timeout)
    if timeout is not None:
        with pytest.raises(UsageError, match="timeout must be a number of seconds"):
            await ctx.retrieve(range(4), timeout=timeout)
        with pytest.raises(UsageError, match="timeout must be a number of seconds"):
            await ctx.lookup(range(4), timeout=timeout)


@pytest.mark.parametrize("interval", [0, -1, float("nan"), 10**400, "often", None])
async def test_a_poll_interval_that_cannot_be_is_refused(ctx: MemoryKVCacheContext, interval: Any) -> None:
    with pytest.raises(UsageError, match="poll_interval must be a number of seconds above 0, not "):
        await ctx.wait_for(range(4), timeout=0, poll_interval=interval)


async def test_a_closed_context_refuses_everything(cache: EmbeddedCache) -> None:
    ctx = await open_context("memory://test", geometry=GEOMETRY)
    await ctx.close()
    await ctx.close()
    for call in (
        ctx.retrieve(range(4)),
        ctx.lookup(range(4)),
        ctx.put(kv_of(4), range(4)),
        ctx.wait_for(range(4), timeout=0),
        ctx.__aenter__(),
    ):
        with pytest.raises(UsageError, match="closed"):
            await call
    assert cache.put("m", range(4), [kv_of(4)]).taken == 1  # the second close took no reference


async def test_a_context_keeps_its_cache_alive() -> None:
    with opened("memory://kept?chunk_size=4") as cache:
        ctx = await open_context("memory://kept", model_name="m", geometry=GEOMETRY)
        cache.close()
        assert await ctx.store(kv_of(4), range(4))
        assert EmbeddedCache.open("memory://kept") is cache
        await ctx.close()


# --- which model --------------------------------------------------------------------------------------------------


async def test_the_only_model_needs_no_name(cache: EmbeddedCache) -> None:
    cache.register_model("only", GEOMETRY)
    async with await open_context("memory://test") as ctx:
        assert ctx.model_name == "only"
        assert ctx.geometry == cache.models()["only"]
        assert ctx.chunk_size == ctx.geometry.chunk_size == 4


async def test_several_models_need_a_name(cache: EmbeddedCache) -> None:
    cache.register_model("one", GEOMETRY)
    cache.register_model("two", GEOMETRY)
    with pytest.raises(UsageError, match="model_name, one of one, two"):
        await open_context("memory://test")
    async with await open_context("memory://test", model_name="two") as ctx:
        assert ctx.model_name == "two"


async def test_a_model_that_nobody_serves_is_refused_with_those_served(cache: EmbeddedCache) -> None:
    cache.register_model("one", GEOMETRY)
    with pytest.raises(UsageError, match=r"no engine serves 'three'.*one of one"):
        await open_context("memory://test", model_name="three")


async def test_without_an_engine_it_says_how_to_get_one() -> None:
    with pytest.raises(UsageError, match=r'EmbeddedEngine with cache="memory://alone".*geometry='):
        await open_context("memory://alone")
    assert not EmbeddedCache._by_name


async def test_a_given_geometry_does_without_an_engine(cache: EmbeddedCache) -> None:
    async with await open_context("memory://test", geometry=GEOMETRY) as ctx:
        assert ctx.geometry.chunk_size == 4


async def test_a_given_geometry_must_be_that_of_the_engine(cache: EmbeddedCache) -> None:
    cache.register_model("m", GEOMETRY)
    wider = KVGeometry(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM + 1)
    with pytest.raises(UsageError, match="head_dim is 3, not 4"):
        await open_context("memory://test", model_name="m", geometry=wider)
    with pytest.raises(UsageError, match="chunk_size=5"):
        await open_context("memory://test", geometry=KVGeometry(num_layers=2, num_kv_heads=1, head_dim=3, chunk_size=5))
    bare = KVGeometry(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, layer_types=("full_attention",) * 2)
    async with await open_context("memory://test", model_name="m", geometry=bare) as ctx:
        assert ctx.geometry.dtype == torch.float32
        assert ctx.geometry.layer_types == ("full_attention",) * 2
