from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import GEOMETRY, MODEL, C, opened, until_let_go


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


@pytest.fixture
async def ctx(server: FakeCacheServer) -> AsyncIterator[MPKVCacheContext]:
    async with opened(server) as context:
        yield context
    await until_let_go(server)
    assert server.wrong_publications == 0
    assert server.wrong_unlocks == 0


@pytest.fixture
async def shm_ctx(shm_server: FakeCacheServer) -> AsyncIterator[MPKVCacheContext]:
    async with opened(shm_server) as context:
        yield context
    await until_let_go(shm_server)
    assert shm_server.wrong_publications == 0
    assert shm_server.wrong_unlocks == 0
