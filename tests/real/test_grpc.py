"""The gRPC transport against a running LMCache server, without an engine."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from lmcache_stream.errors import CacheError
from lmcache_stream.kvcache.mp.grpc import GrpcTransport
from lmcache_stream.kvcache.mp.wire import (
    COMMIT_RETRIEVE,
    COMMIT_STORE,
    END_SESSION,
    FREE_LOOKUP_LOCKS,
    GET_CHUNK_SIZE,
    LOOKUP,
    NOOP,
    PING,
    PREPARE_RETRIEVE,
    PREPARE_STORE,
    QUERY_PREFETCH_STATUS,
    REGISTER,
    UNREGISTER,
    WAIT_PREFETCH_STATUS,
    CacheKey,
    Registration,
)

if TYPE_CHECKING:
    from lmcache_stream.serving.up import CacheServer

pytestmark = pytest.mark.parametrize("cache_server", [{"transport": "grpc"}], indirect=True)

TOKENS = tuple(range(64))
SHAPE = (2, 4, 32, 128)


async def test_every_operation(cache_server: CacheServer) -> None:
    name, instance, request = uuid.uuid4().hex, uuid.uuid4().int >> 65, uuid.uuid4().hex
    key = CacheKey(name, 1, 0, TOKENS, 0, 64, request)
    lookup_key = CacheKey(name, 1, None, TOKENS, 0, 64, request)
    transport = GrpcTransport(cache_server.kv_url)
    try:
        assert await transport.call(NOOP, timeout=10) == "OK"
        assert await transport.call(GET_CHUNK_SIZE, timeout=10) == 32
        registration = Registration(instance, name, 1, 32, 4, 128, "float32", False)
        registered = await transport.call(REGISTER, registration, timeout=10)
        assert registered.shm_name
        assert registered.pool_size > 0
        assert await transport.call(PING, instance, timeout=10)

        prepared = await transport.call(PREPARE_STORE, key, instance, timeout=10, lane=1)
        assert prepared.context.chunk_indices == (0, 1)
        assert prepared.context.slots is not None
        assert [(slot.shape, slot.dtype, slot.length) for slot in prepared.context.slots] == [
            (SHAPE, "float32", 4 * 2 * 4 * 32 * 128)
        ] * 2
        assert await transport.call(COMMIT_STORE, key, instance, b"", timeout=10, lane=1)

        await transport.call(LOOKUP, lookup_key, 1, timeout=10)
        assert await transport.call(WAIT_PREFETCH_STATUS, request, 5.0, timeout=10) == 2
        read = await transport.call(PREPARE_RETRIEVE, key, instance, timeout=10, lane=2)
        assert read.success
        assert read.context.slots == prepared.context.slots
        assert await transport.call(COMMIT_RETRIEVE, key, instance, timeout=10, lane=2)
        await transport.call(END_SESSION, request, timeout=10)

        await transport.call(LOOKUP, lookup_key, 1, timeout=10)
        assert await transport.call(WAIT_PREFETCH_STATUS, request, 5.0, timeout=10) == 2
        await transport.call(FREE_LOOKUP_LOCKS, lookup_key, 1, timeout=10)
        await transport.call(END_SESSION, request, timeout=10)
        assert await transport.call(QUERY_PREFETCH_STATUS, uuid.uuid4().hex, timeout=10) == 0

        held = (await cache_server.status())["storage_manager"]["l1_manager"]
        assert (held["read_locked_count"], held["write_locked_count"]) == (0, 0)
        await transport.call(UNREGISTER, instance, timeout=10)
    finally:
        await transport.close()


async def test_the_servers_own_words(cache_server: CacheServer) -> None:
    transport = GrpcTransport(cache_server.kv_url)
    try:
        with pytest.raises(CacheError, match=r"refused prepare_store: .*not registered .*instance ID 5"):
            await transport.call(PREPARE_STORE, CacheKey("m", 1, 0, TOKENS, 0, 64, "r"), 5, timeout=10)
    finally:
        await transport.close()
