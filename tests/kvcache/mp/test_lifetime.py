from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmcache_stream.errors import CacheTimeout, UsageError
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import errand as errand_module
from lmcache_stream.kvcache.mp import lifetime as lifetime_module
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import TOKENS, made_kv, opened


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
    monkeypatch.setattr(errand_module, "CLEAN_UP", 1.0)
    monkeypatch.setattr(lifetime_module, "LOOP_END_TIMEOUT", 0.2)
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


def test_a_context_of_another_loop_is_refused(shm_server: FakeCacheServer) -> None:
    with asyncio.Runner() as runner:
        context = runner.run(opened(shm_server).__aenter__())
        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(context.retrieve(TOKENS))
        runner.run(context.close())
