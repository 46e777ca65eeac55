from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from lmcache_stream.errors import (
    CacheConnectionError,
    CacheError,
    CacheProtocolError,
    CacheTimeout,
    GeometryError,
    UsageError,
)
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import context as context_module
from lmcache_stream.kvcache.mp import registry as registry_module
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.codec import CPUPacked, Fused, Split
from lmcache_stream.kvcache.mp.context import MPKVCacheContext, open_context
from lmcache_stream.kvcache.mp.pool import Pool
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.types import CacheKind

C = 8
MODEL = "a/model"
GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=4, num_heads=4)
TOKENS = list(range(100, 100 + 4 * C))


@pytest.fixture(params=["shared memory", "pickle"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeCacheServer]:
    with FakeCacheServer(chunk_size=C, shared_memory=request.param == "shared memory") as server:
        server.serve(MODEL, GEOMETRY)
        server.serve(f"{MODEL}##query", KVGeometry(num_layers=3, num_kv_heads=1, head_dim=16, planes=1))
        yield server


@pytest.fixture
def shm_server() -> Iterator[FakeCacheServer]:
    with FakeCacheServer(chunk_size=C) as server:
        server.serve(MODEL, GEOMETRY)
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [name for name in os.listdir("/dev/shm") if f"_fake_{os.getpid()}_" in name]
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("lmcache-stream tcp")]
    assert not left


def opened(server: FakeCacheServer, **options: Any) -> Any:
    options = {"geometry": GEOMETRY, "model_name": MODEL, "timeout": 5.0} | options
    return _Opened(server, options)


class _Opened:
    def __init__(self, server: FakeCacheServer, options: dict[str, Any]) -> None:
        self.server = server
        self.options = options

    async def __aenter__(self) -> MPKVCacheContext:
        self.context = await open_context(self.server.url, http_url=self.server.http_url, **self.options)
        return self.context

    async def __aexit__(self, *_: object) -> None:
        await self.context.close()


@pytest.fixture
async def ctx(server: FakeCacheServer) -> AsyncIterator[MPKVCacheContext]:
    async with opened(server) as context:
        yield context
    await _until_let_go(server)
    assert server.wrong_publications == 0
    assert server.wrong_unlocks == 0


@pytest.fixture
async def shm_ctx(shm_server: FakeCacheServer) -> AsyncIterator[MPKVCacheContext]:
    async with opened(shm_server) as context:
        yield context
    await _until_let_go(shm_server)
    assert shm_server.wrong_publications == 0
    assert shm_server.wrong_unlocks == 0


def made_kv(tokens: int = len(TOKENS), *, seed: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(2, 3, tokens, width, generator=torch.Generator().manual_seed(seed))


async def retrieved(context: MPKVCacheContext, tokens: list[int], salt: str = "", **options: Any) -> torch.Tensor:
    kv = await context.retrieve(tokens, salt, **options)
    assert kv is not None
    return kv


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


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_no_room(shared_memory: bool) -> None:
    with FakeCacheServer(chunk_size=C, shared_memory=shared_memory, pool_bytes=3 * 4096) as server:
        server.serve(MODEL, GEOMETRY)
        async with opened(server) as context:
            assert await context.put(made_kv(), TOKENS) == StoreOutcome(4, missing=4)
            assert await context.put(made_kv(C), TOKENS[:C]) == StoreOutcome(1, taken=1)
        assert server.held == {}


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


async def test_an_engine_that_offloads_no_queries_has_none(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as context:
        assert await context.lookup(TOKENS, kind=CacheKind.QUERY) == 0
        assert await context.retrieve(TOKENS, kind=CacheKind.QUERY) is None
    assert shm_server.held == {}


async def test_wait_for_comes_back_when_a_store_has_come(ctx: MPKVCacheContext) -> None:
    waiting = asyncio.create_task(ctx.wait_for(TOKENS, timeout=10, poll_interval=0.01))
    await ctx.put(made_kv(2 * C), TOKENS[: 2 * C])
    assert await ctx.wait_for(TOKENS, timeout=0.05, poll_interval=0.01) == 2 * C
    await ctx.put(made_kv(), TOKENS)
    assert await waiting == len(TOKENS)
    assert await ctx.wait_for(TOKENS[:3], timeout=10) == 0


async def test_a_vanished_engine_is_no_miss(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    await ctx.put(made_kv(), TOKENS)
    server.forget_engines()
    ctx._seen_served.clear()
    with pytest.raises(CacheConnectionError, match="no engine is registered"):
        await ctx.retrieve(TOKENS)


async def test_a_forgotten_registration_is_made_again(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    server.forget()
    assert torch.equal(await retrieved(ctx, TOKENS), kv)
    server.forget()
    assert await ctx.put(kv, TOKENS, "salt") == StoreOutcome(4, taken=4)
    assert server.calls["register_kv_cache_engine_driven_context"] == 3
    assert len(server.clients) == 1


async def test_the_same_context_works_after_a_restart(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    await ctx.put(kv, TOKENS)
    server.restart()
    assert await ctx.put(kv + 1, TOKENS) == StoreOutcome(4, taken=4)
    assert torch.equal(await retrieved(ctx, TOKENS), kv + 1)
    async with opened(server) as second:
        assert torch.equal(await retrieved(second, TOKENS), kv + 1)


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


async def _until_let_go(server: FakeCacheServer) -> None:
    async with asyncio.timeout(15):
        while server.held:  # noqa: ASYNC110  (another thread's state)
            await asyncio.sleep(0.005)


async def test_a_late_lookup_is_unlocked(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    await ctx.put(made_kv(), TOKENS)
    fault = server.fault(wire.LOOKUP, "hold")
    with pytest.raises(CacheTimeout):
        await ctx.lookup(TOKENS, timeout=0.1)
    assert server.read_locks == 4
    fault.release()
    await _until_let_go(server)


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
    await _until_let_go(shm_server)
    assert torch.equal(await retrieved(shm_ctx, TOKENS), kv)


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
    await _until_let_go(server)
    assert torch.equal(await retrieved(ctx, TOKENS), kv)


@pytest.mark.parametrize("kind", ["few", "outside", "shape", "dtype"])
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


@pytest.mark.parametrize("kind", ["few", "outside", "overlap", "shape", "dtype"])
async def test_nothing_is_written_to_slots_that_cannot_be(shm_server: FakeCacheServer, kind: Any) -> None:
    async with opened(shm_server) as context:
        shm_server.fault(wire.PREPARE_STORE, kind)
        with pytest.raises(CacheProtocolError):
            await context.put(made_kv(), TOKENS)
    # The server publishes what is reserved when its client goes away in good order.
    assert shm_server.chunks == 0
    assert shm_server.reservations == 4


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


async def test_equal_calls_do_not_confuse_the_server(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    kv = made_kv()
    outcomes = await asyncio.gather(*(ctx.put(kv, TOKENS) for _ in range(8)))
    assert sum(outcome.taken for outcome in outcomes) == 4
    assert all(outcome.complete for outcome in outcomes)
    many = await asyncio.gather(*(ctx.retrieve(TOKENS) for _ in range(8)))
    assert all(out is not None and torch.equal(out, kv) for out in many)
    assert not ctx._busy


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


async def test_many_streams_at_once(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    async def stream(number: int) -> bool:
        tokens = [number, *TOKENS[1:]]
        kv = made_kv(seed=number)
        await ctx.put(kv, tokens)
        return torch.equal(await retrieved(ctx, tokens), kv)

    assert all(await asyncio.gather(*(stream(number) for number in range(64))))


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
    assert server.calls == calls


async def test_a_closed_context_refuses(server: FakeCacheServer) -> None:
    async with opened(server) as context:
        assert len(server.clients) == 1
        await context.close()
        assert server.clients == []
        for call in (context.retrieve(TOKENS), context.lookup(TOKENS), context.put(made_kv(), TOKENS)):
            with pytest.raises(UsageError, match="closed"):
                await call


async def test_close_waits_for_calls_under_way(server: FakeCacheServer) -> None:
    async with opened(server) as context:
        fault = server.fault(wire.PREPARE_STORE, "hold")
        put = asyncio.create_task(context.put(made_kv(), TOKENS))
        await asyncio.to_thread(fault.struck.wait)
        closing = asyncio.create_task(context.close())
        await asyncio.sleep(0)
        fault.release()
        await closing
        assert await put == StoreOutcome(4, taken=4)
    assert server.held == {}
    assert server.clients == []


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


async def test_the_chunks_tell_what_nobody_else_does(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as known, opened(shm_server, geometry=None) as unknown:
        kv = made_kv()
        with pytest.raises(GeometryError, match="retrieve some first"):
            await unknown.put(kv, TOKENS)
        await known.put(kv, TOKENS)
        with pytest.raises(GeometryError, match="retrieve some first"):
            await unknown.put(kv, TOKENS)
        assert torch.equal(await retrieved(unknown, TOKENS), kv)


async def test_a_geometry_without_a_dtype_learns_it(shm_server: FakeCacheServer) -> None:
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
    async with opened(shm_server) as known, opened(shm_server, geometry=geometry) as other:
        kv = made_kv()
        with pytest.raises(GeometryError, match="dtype"):
            await other.put(kv, TOKENS)
        await known.put(kv, TOKENS)
        await retrieved(other, TOKENS)
        assert other.geometry is not None
        assert other.geometry.dtype == torch.float32
        assert await other.put(kv, TOKENS, "salt") == StoreOutcome(4, taken=4)


async def test_a_proven_reading_is_enough_to_store(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server, geometry=None) as context:
        context.adopt(Split(3, 2, 4), GEOMETRY)
        kv = made_kv()
        assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert torch.equal(await retrieved(context, TOKENS), kv)


async def test_a_layout_that_can_be_read_in_two_ways_is_refused_until_one_is_proven() -> None:
    latent = KVGeometry(num_layers=3, num_kv_heads=1, head_dim=16, dtype=torch.float32, block_size=32, planes=1)
    with FakeCacheServer(chunk_size=32) as server:
        server.serve(MODEL, latent)
        geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=32)
        async with opened(server, geometry=geometry) as context:
            kv = made_kv()
            with pytest.raises(GeometryError, match="probe=engine"):
                await context.put(kv, TOKENS)
            with pytest.raises(GeometryError, match="probe=engine"):
                await context.retrieve(TOKENS)
            for codec in (Fused(3, 2, 4), CPUPacked(3, 2, 4, 32)):
                context.adopt(codec, geometry)
                assert await context.put(kv, TOKENS, codec.name) == StoreOutcome(1, taken=1)
                assert torch.equal(await retrieved(context, TOKENS, codec.name), kv)
        assert server.held == {}


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (KVGeometry(num_layers=3, num_kv_heads=4, head_dim=4, dtype=torch.float32, block_size=4), r"\[2, 3, 8, 16\]"),
        (KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float16, block_size=4), "float16"),
    ],
)
async def test_chunks_that_contradict_the_geometry_are_refused(
    shm_server: FakeCacheServer, geometry: KVGeometry, words: str
) -> None:
    async with opened(shm_server) as right, opened(shm_server, geometry=geometry) as wrong:
        await right.put(made_kv(), TOKENS)
        with pytest.raises(GeometryError, match=words):
            await wrong.retrieve(TOKENS)
    assert shm_server.held == {}


async def test_a_policy_that_wipes_salts_is_named() -> None:
    with FakeCacheServer(chunk_size=C, eviction_policy="IsolatedLRU") as server:
        server.serve(MODEL, GEOMETRY)
        async with opened(server) as context:
            await context.put(made_kv(), TOKENS)
            with pytest.warns(UserWarning, match="quota"):
                await context.put(made_kv(), TOKENS, "salt")


class TestConnecting:
    async def test_nobody_there(self) -> None:
        with FakeCacheServer(chunk_size=C) as server:
            http_url = server.http_url
        with pytest.raises(CacheConnectionError, match="start the LMCache server"):
            await open_context("tcp://127.0.0.1:1", http_url=http_url, model_name=MODEL)

    async def test_http_but_no_request_endpoint(self, shm_server: FakeCacheServer) -> None:
        with pytest.raises(CacheConnectionError, match=r"no cache server answers at tcp://127.0.0.1:1 .*--port"):
            await open_context("tcp://127.0.0.1:1", http_url=shm_server.http_url, model_name=MODEL)

    async def test_the_wrong_mode(self) -> None:
        with (
            FakeCacheServer(chunk_size=C, transfer_mode="lmcache_driven") as server,
            pytest.raises(CacheConnectionError, match="--supported-transfer-mode auto"),
        ):
            await open_context(server.url, http_url=server.http_url, model_name=MODEL)

    async def test_a_model_that_nobody_serves(self, shm_server: FakeCacheServer) -> None:
        with pytest.raises(CacheConnectionError, match=MODEL):
            await open_context(shm_server.url, http_url=shm_server.http_url, model_name="another")

    async def test_the_only_model_needs_no_name(self, shm_server: FakeCacheServer) -> None:
        async with opened(shm_server, model_name=None) as context:
            assert context.model_name == MODEL

    async def test_two_servers(self, shm_server: FakeCacheServer) -> None:
        with FakeCacheServer(chunk_size=2 * C) as other, pytest.raises(CacheConnectionError, match="two different"):
            await open_context(other.url, http_url=shm_server.http_url, model_name=MODEL)

    async def test_not_ready_yet(self, shm_server: FakeCacheServer) -> None:
        shm_server.http_status = 503
        with pytest.raises(CacheConnectionError, match="503"):
            await open_context(shm_server.url, http_url=shm_server.http_url, model_name=MODEL)

    async def test_the_old_route(self) -> None:
        with FakeCacheServer(chunk_size=C, conf_route=True) as server:
            server.serve(MODEL, GEOMETRY)
            async with opened(server) as context:
                assert context.chunk_size == C

    async def test_no_http_url(self) -> None:
        with pytest.raises(UsageError, match="http_url="):
            await open_context("tcp://127.0.0.1:1")

    async def test_a_refused_registration_leaves_nothing(self, shm_server: FakeCacheServer) -> None:
        shm_server.fault(wire.REGISTER, "lose")
        with pytest.raises(CacheError, match="register"):
            await open_context(
                shm_server.url, http_url=shm_server.http_url, model_name=MODEL, geometry=GEOMETRY, timeout=1
            )
        assert shm_server.clients == []


async def test_a_store_of_what_is_there_and_retrieves_of_it_leave_no_lock(server: FakeCacheServer) -> None:
    """A store reads what it finds, and the server takes two reads of equal keys for one."""
    kv = torch.randn(2, 3, len(TOKENS), 8)
    async with opened(server) as ctx:
        await ctx.put(kv, TOKENS)
        for _ in range(5):
            await asyncio.gather(ctx.retrieve(TOKENS), ctx.put(torch.randn_like(kv), TOKENS), ctx.retrieve(TOKENS))
            assert server.held == {}
        assert torch.equal(await ctx.retrieve(TOKENS), kv)


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


async def test_a_store_that_never_began_leaves_no_registration(server: FakeCacheServer) -> None:
    async with opened(server) as ctx:
        with pytest.raises(CacheTimeout):
            await ctx.put(torch.randn(2, 3, len(TOKENS), 8), TOKENS, timeout=0)
        with pytest.raises(UsageError, match="surrogates"):
            await ctx.put(torch.randn(2, 3, len(TOKENS), 8), TOKENS, "\ud800")
    assert server.clients == []
    assert server.held == {}


async def test_what_nobody_could_find_is_not_stored(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    server.forget_engines()
    with pytest.raises(CacheConnectionError, match="no engine is registered"):
        await ctx.put(made_kv(), TOKENS)
    assert server.chunks == server.calls["prepare_store"] == 0


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
        await _until_let_go(server)

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
        monkeypatch.setattr(session_module, "END_TIMEOUT", 0.2)
        kv = made_kv()
        await ctx.put(kv, TOKENS)
        server.fault(operation, "lose")
        assert torch.equal(await retrieved(ctx, TOKENS, timeout=1.0), kv)
        await _until_let_go(server)

    async def test_keeps_nobody_waiting_whose_result_is_there(
        self, shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "CLEAN_UP", 0.05)
        monkeypatch.setattr(session_module, "END_TIMEOUT", 60.0)
        kv = made_kv()
        faults = [shm_server.fault(wire.END_SESSION, "hold") for _ in range(3)]
        assert await shm_ctx.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert await shm_ctx.lookup(TOKENS) == len(TOKENS)
        assert torch.equal(await retrieved(shm_ctx, TOKENS[: 3 * C]), kv[:, :, : 3 * C])
        for fault in faults:
            fault.release()
        await _until_let_go(shm_server)

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


@pytest.mark.parametrize("timeout", [5.0, 0.1])
def test_a_store_is_finished_when_the_loop_ends(shm_server: FakeCacheServer, timeout: float) -> None:
    kv = made_kv()
    fault = shm_server.fault(wire.PREPARE_STORE, "hold")
    contexts = []

    async def main() -> None:
        contexts.append(await opened(shm_server).__aenter__())
        put = asyncio.create_task(contexts[0].put(kv, TOKENS, timeout=timeout))
        await asyncio.to_thread(fault.struck.wait)
        if timeout < 1:
            with pytest.raises(CacheTimeout):
                await put
        asyncio.get_running_loop().call_later(0.05, fault.release)

    asyncio.run(main())
    assert shm_server.held == {}
    assert shm_server.chunks == 4
    assert shm_server.wrong_publications == 0
    assert shm_server.clients == []


@pytest.mark.parametrize(
    "operation", [wire.LOOKUP, wire.WAIT_PREFETCH_STATUS, wire.PREPARE_RETRIEVE, wire.COMMIT_RETRIEVE, wire.END_SESSION]
)
@pytest.mark.parametrize("kind", ["ignore", "lose"])
def test_nothing_is_held_when_the_loop_ends(
    server: FakeCacheServer, operation: wire.Operation[Any], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "CLEAN_UP", 1.0)
    monkeypatch.setattr(context_module, "LOOP_END_TIMEOUT", 0.2)
    if operation is wire.PREPARE_RETRIEVE and kind == "ignore" and not server.shm_name:
        pytest.skip("a pickled retrieve unlocks by itself: whether it did cannot be known")

    async def main() -> None:
        context = await opened(server, timeout=60.0).__aenter__()
        await context.put(made_kv(), TOKENS)
        fault = server.fault(operation, kind)
        task = asyncio.create_task(context.retrieve(TOKENS))
        await asyncio.to_thread(fault.struck.wait)
        assert not task.done()

    asyncio.run(main())
    assert not {"read locks", "reservations", "reads", "writes"} & server.held.keys()
    if operation is not wire.END_SESSION:
        assert server.held == {}
    assert server.wrong_unlocks == 0
    assert server.clients == []


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


async def test_a_registration_made_again_by_another_call_serves_all(shm_server: FakeCacheServer) -> None:
    tokens = [[number, *TOKENS[1:]] for number in range(3)]
    async with opened(shm_server) as context:
        for number, ids in enumerate(tokens):
            await context.put(made_kv(seed=number), ids)
        shm_server.forget()
        found = await asyncio.gather(*(retrieved(context, ids) for ids in tokens))
    assert all(torch.equal(kv, made_kv(seed=number)) for number, kv in enumerate(found))
    assert shm_server.clients == []


async def test_a_call_refused_while_another_registers_again_is_made_again(
    shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PATIENCE", 0.1)
    others = [7, *TOKENS[1:]]
    async with opened(shm_server) as context:
        await context.put(made_kv(seed=1), TOKENS)
        await context.put(made_kv(seed=2), others)
        shm_server.forget()
        registering = shm_server.fault(wire.REGISTER, "hold")
        first = asyncio.create_task(context.retrieve(TOKENS))
        await asyncio.to_thread(registering.struck.wait)
        refused = shm_server.fault(wire.PREPARE_RETRIEVE, "ignore")
        second = asyncio.create_task(context.retrieve(others, timeout=4))
        await asyncio.to_thread(refused.struck.wait)
        registering.release()
        found = await asyncio.gather(first, second)
    assert all(kv is not None and torch.equal(kv, made_kv(seed=seed)) for seed, kv in enumerate(found, 1))
    assert shm_server.held == {}


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
        reader = context._reader
        assert reader is not None
        await context._registry.again(reader, 1, timeout=5)
        fault.release()
        with pytest.raises(CacheConnectionError, match="restarted meanwhile"):
            await late
    assert shm_server.held == {}


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


@pytest.mark.parametrize("operation", [wire.LOOKUP, wire.PREPARE_RETRIEVE])
async def test_a_cancelled_call_without_an_answer_blocks_nobody(
    shm_server: FakeCacheServer,
    shm_ctx: MPKVCacheContext,
    operation: wire.Operation[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "CLEAN_UP", 0.5)
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


@pytest.mark.parametrize("kind", ["ignore", "lose", "garble"])
async def test_read_locks_are_freed_whatever_became_of_the_preparation(
    shm_server: FakeCacheServer, shm_ctx: MPKVCacheContext, kind: Any
) -> None:
    await shm_ctx.put(made_kv(), TOKENS)
    shm_server.fault(wire.PREPARE_RETRIEVE, kind)
    with pytest.raises((CacheTimeout, CacheProtocolError)):
        await shm_ctx.retrieve(TOKENS, timeout=0.2)
    await _until_let_go(shm_server)


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


async def test_a_server_without_a_status_can_still_be_stored_to(server: FakeCacheServer, ctx: MPKVCacheContext) -> None:
    server.http_status = 503
    assert await ctx.put(made_kv(), TOKENS) == StoreOutcome(4, taken=4)
    server.http_status = 200


async def test_no_slots_at_all_are_no_lack_of_room(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as context:
        shm_server.fault(wire.PREPARE_STORE, "wrong-type")
        with pytest.raises(CacheProtocolError, match="no shared memory"):
            await context.put(made_kv(), TOKENS)


def test_a_context_of_another_loop_is_refused(shm_server: FakeCacheServer) -> None:
    with asyncio.Runner() as runner:
        context = runner.run(opened(shm_server).__aenter__())
        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(context.retrieve(TOKENS))
        runner.run(context.close())
