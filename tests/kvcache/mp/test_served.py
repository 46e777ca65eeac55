from __future__ import annotations

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, UsageError
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.types import CacheKind

from .opened import MODEL, TOKENS, C, made_kv, opened, retrieved


async def test_a_vanished_engine_is_no_miss(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    await ctx.put(made_kv(), TOKENS)
    server.forget_engines()
    ctx._served._seen.clear()
    with pytest.raises(CacheConnectionError, match="no engine is registered"):
        await ctx.retrieve(TOKENS)


async def test_an_engine_that_offloads_no_queries_has_none(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as context:
        assert await context.lookup(TOKENS, kind=CacheKind.QUERY) == 0
        assert await context.retrieve(TOKENS, kind=CacheKind.QUERY) is None
    assert shm_server.held == {}


async def test_what_nobody_could_find_is_not_stored(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    server.forget_engines()
    with pytest.raises(CacheConnectionError, match="no engine is registered"):
        await ctx.put(made_kv(), TOKENS)
    assert server.chunks == server.calls["prepare_store"] == 0


async def test_a_server_without_a_status_can_still_be_stored_to(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    server.http_status = 503
    assert await ctx.put(made_kv(), TOKENS) == StoreOutcome(4, taken=4)
    server.http_status = 200


async def test_without_an_engine_one_may_serve_the_model_oneself() -> None:
    with FakeCacheServer(chunk_size=C) as server:
        async with opened(server, serve=True) as context:
            kv = made_kv()
            assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
            server.forget()
            assert torch.equal(await retrieved(context, TOKENS), kv)
            server.restart()
            assert await context.retrieve(TOKENS) is None
            assert await context.store(kv, TOKENS)
            assert torch.equal(await retrieved(context, TOKENS), kv)
        assert server.held == {}
        assert server.clients == []
        with pytest.raises(UsageError, match="geometry"):
            await open_context(server.url, http_url=server.http_url, model_name=MODEL, serve=True)
