from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, CacheTimeout, UsageError
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.kvcache.mp.registry import Client, Registry
from lmcache_stream.kvcache.mp.session import Session
from lmcache_stream.testing.fake_cache_server import FakeCacheServer, Fault, FaultKind

from .opened import GEOMETRY, MODEL, TOKENS, C, made_kv, opened, retrieved, until_let_go


async def test_a_store_tells_what_became_of_each_chunk(ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv[:, :, : 2 * C], TOKENS[: 2 * C])
    changed = kv.clone()
    changed[0, 0, C, 0] += 1
    assert await ctx.put(changed, TOKENS) == StoreOutcome(4, taken=2, same=1, kept=1)
    assert not await ctx.store(changed, TOKENS)
    assert await ctx.store(kv, TOKENS)


async def test_nan_equals_itself(ctx: MPKVCacheContext) -> None:
    kv = torch.full_like(made_kv(), float("nan"))
    await ctx.put(kv, TOKENS)
    assert await ctx.put(kv, TOKENS) == StoreOutcome(4, same=4)


async def test_more_pickled_chunks_than_one_request_takes_are_refused_before_they_are_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeCacheServer(chunk_size=C, shared_memory=False) as server:
        server.serve(MODEL, GEOMETRY)
        async with opened(server) as context:
            kv = made_kv()
            monkeypatch.setattr(context._transport, "longest_request", kv.nbytes - 1)
            with pytest.raises(CacheError, match="--shm-name NAME --no-l1-use-lazy, on this machine, or store less"):
                await context.put(kv, TOKENS)
            assert server.chunks == 0
            monkeypatch.setattr(context._transport, "longest_request", kv.nbytes)
            assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert server.held == {}


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_no_room(shared_memory: bool) -> None:
    with FakeCacheServer(chunk_size=C, shared_memory=shared_memory, pool_bytes=3 * 4096) as server:
        server.serve(MODEL, GEOMETRY)
        async with opened(server) as context:
            assert await context.put(made_kv(), TOKENS) == StoreOutcome(4, missing=4)
            assert await context.put(made_kv(C), TOKENS[:C]) == StoreOutcome(1, taken=1)
        assert server.held == {}


async def test_no_slots_at_all_are_no_lack_of_room(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as context:
        shm_server.fault(wire.PREPARE_STORE, "wrong-type")
        with pytest.raises(CacheProtocolError, match="no shared memory"):
            await context.put(made_kv(), TOKENS)


@pytest.mark.parametrize("kind", ["few", "outside", "overlap", "shape", "dtype"])
async def test_nothing_is_written_to_slots_that_cannot_be(shm_server: FakeCacheServer, kind: Any) -> None:
    async with opened(shm_server) as context:
        shm_server.fault(wire.PREPARE_STORE, kind)
        with pytest.raises(CacheProtocolError):
            await context.put(made_kv(), TOKENS)
    # The server publishes what is reserved when its client goes away in good order.
    assert shm_server.chunks == 0
    assert shm_server.reservations == 4


async def test_a_late_reservation_is_filled_with_what_was_to_be_stored(
    shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext
) -> None:
    kv = made_kv()
    mine = kv.clone()
    fault = shm_server.fault(wire.PREPARE_STORE, "hold")
    with pytest.raises(CacheTimeout, match="prepare_store"):
        await shm_ctx.put(mine, TOKENS, timeout=0.1)
    mine.zero_()
    fault.release()
    await until_let_go(shm_server)
    assert torch.equal(await retrieved(shm_ctx, TOKENS), kv)


async def test_late_slots_of_a_forgotten_client_are_written(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = made_kv()
    async with opened(shm_server) as context:
        await context.put(kv, [7, *TOKENS[1:]])
        call = context._transport.call
        again = asyncio.Event()
        held: list[wire.Operation[Any]] = []

        async def slow(operation: wire.Operation[Any], *args: Any, **options: Any) -> Any:
            """A server whose first `prepare_store` waits in a queue until the client has registered again."""
            if operation is wire.PREPARE_STORE and not held:
                held.append(operation)
                await again.wait()
            elif operation is wire.PREPARE_STORE:
                again.set()
                await asyncio.sleep(0.1)
            return await call(operation, *args, **options)

        monkeypatch.setattr(context._transport, "call", slow)
        shm_server.forget()
        assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert torch.equal(await retrieved(context, TOKENS), kv)
        assert shm_server.held == {}
    assert shm_server.clients == []
    assert shm_server.wrong_publications == 0


@pytest.mark.parametrize("operation", [wire.PREPARE_STORE, wire.COMMIT_STORE, wire.END_SESSION])
async def test_a_cancelled_store_is_finished(
    server: FakeCacheServer, ctx: MPKVCacheContext, operation: wire.Operation[Any]
) -> None:
    fault = server.fault(operation, "hold")
    task = asyncio.create_task(ctx.put(made_kv(), TOKENS))
    await asyncio.to_thread(fault.struck.wait)
    task.cancel()
    await asyncio.sleep(0)
    fault.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.held == {}
    assert server.wrong_publications == 0


async def test_a_store_that_never_began_leaves_no_registration(server: FakeCacheServer) -> None:
    async with opened(server) as ctx:
        with pytest.raises(CacheTimeout):
            await ctx.put(torch.randn(2, 3, len(TOKENS), 8), TOKENS, timeout=0)
        with pytest.raises(UsageError, match="surrogates"):
            await ctx.put(torch.randn(2, 3, len(TOKENS), 8), TOKENS, "\ud800")
    assert server.clients == []
    assert server.held == {}


async def test_a_store_that_failed_keeps_nothing_alive(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error knows the slots by its traceback: who keeps it keeps the pool mapped, also a server's that is gone."""
    for name in ("REPEAT", "PATIENCE", "CLEAN_UP"):
        monkeypatch.setattr(f"lmcache_stream.kvcache.mp.session.{name}", 0.1)
    async with opened(shm_server) as context:
        shm_server.fault(wire.COMMIT_STORE, "ignore", times=2)
        with pytest.raises(CacheError, match="did not answer commit_store"):
            await context.put(made_kv(), TOKENS, timeout=0.2)
        async with asyncio.timeout(20):
            while any(type(kept) is Session for kept in gc.get_objects()):
                await asyncio.sleep(0.05)
                gc.collect()


async def struck_while_storing(
    server: FakeCacheServer, context: MPKVCacheContext, operation: wire.Operation[Any], kind: FaultKind
) -> tuple[Fault, asyncio.Task[StoreOutcome], Registry, Client]:
    """A store of `made_kv(seed=1)` that has met a fault, by a client that has stored before."""
    await context.put(made_kv(), [7, *TOKENS[1:]])
    (client,) = context._registry._clients.values()
    fault = server.fault(operation, kind)
    storing = asyncio.create_task(context.put(made_kv(seed=1), TOKENS, timeout=30))
    await asyncio.to_thread(fault.struck.wait)
    return fault, storing, context._registry, client


async def test_a_late_reservation_of_a_server_that_is_gone_is_not_written(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PATIENCE", 0.1)
    others = made_kv(64, seed=6)
    async with opened(shm_server) as context:
        late, storing, registry, client = await struck_while_storing(shm_server, context, wire.PREPARE_STORE, "hold")
        registering = shm_server.fault(wire.REGISTER, "hold")
        again = asyncio.create_task(registry.again(client, client.times_registered, timeout=30))
        await asyncio.to_thread(registering.struck.wait)
        await asyncio.sleep(0.5)  # the store gives its request up, and waits for the registration
        late.release()
        await asyncio.sleep(0.1)
        shm_server.restart()
        for salt in ("one", "another"):
            shm_server.offload(MODEL, [1] * 64, salt, others)
        assert await storing == StoreOutcome(4, taken=4)
        with pytest.raises(CacheConnectionError):
            await again
        for salt in ("one", "another"):
            assert torch.equal(shm_server.read(MODEL, [1] * 64, salt), others)
        assert torch.equal(shm_server.read(MODEL, TOKENS), made_kv(seed=1))
    assert shm_server.wrong_publications == 0


async def test_a_commit_at_a_server_that_knows_us_anew_is_none(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as context:
        _, storing, registry, client = await struck_while_storing(shm_server, context, wire.COMMIT_STORE, "ignore")
        shm_server.fault(wire.REGISTER, "lose")
        shm_server.http_answers["/status"] = b"starting"
        shm_server.restart()
        with pytest.raises(CacheTimeout):
            await registry.again(client, client.times_registered, timeout=1)
        with pytest.raises(CacheConnectionError, match="restarted while chunks were stored"):
            await storing
        assert shm_server.covered(MODEL, TOKENS) == 0
        del shm_server.http_answers["/status"]
        assert await context.put(made_kv(seed=1), TOKENS) == StoreOutcome(4, taken=4)


@pytest.mark.parametrize("lost", ["forget", "restart"])
async def test_a_client_forgotten_between_two_ranks_leaves_no_reservation(lost: Any) -> None:
    geometry = replace(GEOMETRY, world_size=2)
    with FakeCacheServer(chunk_size=C) as server:
        server.serve(MODEL, geometry)
        async with opened(server, geometry=geometry) as context:
            server.fault(wire.PREPARE_STORE, lost, after=1)
            with pytest.raises(CacheConnectionError, match="restarted"):
                await context.put(made_kv(), TOKENS)
            await until_let_go(server)
            assert (await context.put(made_kv(), TOKENS)).missing == 0
            assert await context.put(made_kv(), TOKENS, "salt") == StoreOutcome(4, taken=4)
