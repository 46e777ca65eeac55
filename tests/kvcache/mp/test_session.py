from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheTimeout
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import errand as errand_module
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import TOKENS, C, made_kv, opened, retrieved, until_let_go


async def test_a_dead_server_is_said_to_be_dead(server: FakeCacheServer) -> None:
    async with opened(server) as context:
        fault = server.fault(wire.LOOKUP, "ignore")
        call = asyncio.create_task(context.retrieve(TOKENS, timeout=30))
        await asyncio.to_thread(fault.struck.wait)
        server.kill()
        with pytest.raises(CacheConnectionError, match="broke before lookup was answered"):
            await call
        server.restart()
        assert await context.lookup(TOKENS) == 0


async def test_a_refused_lookup_times_out_and_says_that_the_server_is_up(
    server: FakeCacheServer, ctx: MPKVCacheContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LINGER", 0.1)
    server.fault(wire.LOOKUP, "ignore")
    with pytest.raises(CacheTimeout, match=r"is up but did not answer lookup within 0\.2 s"):
        await ctx.lookup(TOKENS, timeout=0.2)


async def test_a_late_lookup_is_unlocked(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    await ctx.put(made_kv(), TOKENS)
    fault = server.fault(wire.LOOKUP, "hold")
    with pytest.raises(CacheTimeout):
        await ctx.lookup(TOKENS, timeout=0.1)
    assert server.read_locks == 4
    fault.release()
    await until_let_go(server)


@pytest.mark.parametrize("operation", [wire.LOOKUP, wire.PREPARE_RETRIEVE])
async def test_a_cancelled_call_without_an_answer_blocks_nobody(
    shm_server: FakeCacheServer,
    shm_ctx: MPKVCacheContext,
    operation: wire.Operation[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "CLEAN_UP", 0.5)
    monkeypatch.setattr(errand_module, "CLEAN_UP", 0.5)
    monkeypatch.setattr(session_module, "PATIENCE", 0.2)
    kv = made_kv()
    await shm_ctx.put(kv, TOKENS)
    for _ in range(5):
        fault = shm_server.fault(operation, "ignore")
        task = asyncio.create_task(shm_ctx.retrieve(TOKENS, timeout=1000))
        await asyncio.to_thread(fault.struck.wait)
        task.cancel()
        await asyncio.wait([task])
    assert torch.equal(await retrieved(shm_ctx, TOKENS), kv)


class TestALostReply:
    async def test_to_a_lookup_does_not_block_the_next(
        self, server: FakeCacheServer, ctx: MPKVCacheContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "LINGER", 60.0)
        kv = made_kv()
        await ctx.put(kv, TOKENS)
        fault = server.fault(wire.LOOKUP, "hold")
        with pytest.raises(CacheTimeout):
            await ctx.retrieve(TOKENS, timeout=0.1)
        assert torch.equal(await retrieved(ctx, TOKENS), kv)
        fault.release()
        await until_let_go(server)

    @pytest.mark.parametrize("kind", ["ignore", "lose", "garble", "wrong-operation"])
    async def test_to_a_commit_of_a_store_is_asked_for_again(
        self, shm_server: FakeCacheServer, kind: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "REPEAT", 0.1)
        kv = made_kv()
        async with opened(shm_server) as context:
            shm_server.fault(wire.COMMIT_STORE, kind)
            assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
            assert shm_server.held == {}
            assert torch.equal(await retrieved(context, TOKENS), kv)
        assert shm_server.clients == []
        assert shm_server.wrong_publications == 0

    async def test_to_both_commits_of_a_store_is_an_error(
        self, shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "REPEAT", 0.1)
        monkeypatch.setattr(session_module, "CLEAN_UP", 0.2)
        monkeypatch.setattr(errand_module, "CLEAN_UP", 0.2)
        async with opened(shm_server) as context:
            shm_server.fault(wire.COMMIT_STORE, "ignore", times=2)
            with pytest.raises(CacheTimeout, match="commit_store"):
                await context.put(made_kv(), TOKENS)
        assert len(shm_server.clients) == 1  # what is reserved would be published with its end
        assert shm_server.reservations == 4

    @pytest.mark.parametrize("operation", [wire.COMMIT_RETRIEVE, wire.END_SESSION])
    async def test_at_the_end_of_a_retrieve_takes_no_data_away(
        self,
        server: FakeCacheServer,
        ctx: MPKVCacheContext,
        operation: wire.Operation[Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(session_module, "CLEAN_UP", 0.2)
        monkeypatch.setattr(errand_module, "CLEAN_UP", 0.2)
        monkeypatch.setattr(session_module, "END_TIMEOUT", 0.2)
        kv = made_kv()
        await ctx.put(kv, TOKENS)
        server.fault(operation, "lose")
        assert torch.equal(await retrieved(ctx, TOKENS, timeout=1.0), kv)
        await until_let_go(server)

    async def test_keeps_nobody_waiting_whose_result_is_there(
        self, shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "CLEAN_UP", 0.05)
        monkeypatch.setattr(errand_module, "CLEAN_UP", 0.05)
        monkeypatch.setattr(session_module, "END_TIMEOUT", 60.0)
        kv = made_kv()
        faults = [shm_server.fault(wire.END_SESSION, "hold") for _ in range(3)]
        assert await shm_ctx.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert await shm_ctx.lookup(TOKENS) == len(TOKENS)
        assert torch.equal(await retrieved(shm_ctx, TOKENS[: 3 * C]), kv[:, :, : 3 * C])
        for fault in faults:
            fault.release()
        await until_let_go(shm_server)

    async def test_is_not_carried_over_a_restart(
        self, shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "LINGER", 0.1)
        async with opened(shm_server) as context:
            shm_server.fault(wire.PREPARE_STORE, "lose")
            with pytest.raises(CacheTimeout):
                await context.put(made_kv(), TOKENS, timeout=0.2)
            shm_server.restart()
            assert await context.put(made_kv(), TOKENS) == StoreOutcome(4, taken=4)
        assert shm_server.clients == []


async def test_a_lookup_of_which_it_was_not_said_that_it_had_ended_is_unlocked(
    server: FakeCacheServer, ctx: MPKVCacheContext
) -> None:
    await ctx.put(made_kv(), TOKENS)
    server.fault(wire.WAIT_PREFETCH_STATUS, "nothing")
    await ctx.retrieve(TOKENS)
    assert server.held == {}
