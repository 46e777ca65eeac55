from __future__ import annotations

import sys
from typing import Any

import pytest

from lmcache_stream.errors import CacheConnectionError, CacheError, UsageError
from lmcache_stream.kvcache import aconnect
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import GEOMETRY, MODEL, C, opened


async def test_nobody_there() -> None:
    with FakeCacheServer(chunk_size=C) as server:
        http_url = server.http_url
    with pytest.raises(CacheConnectionError, match="start the LMCache server"):
        await open_context("tcp://127.0.0.1:1", http_url=http_url, model_name=MODEL)


async def test_http_but_no_request_endpoint(shm_server: FakeCacheServer) -> None:
    with pytest.raises(CacheConnectionError, match=r"no cache server answers at tcp://127.0.0.1:1 .*--port"):
        await open_context("tcp://127.0.0.1:1", http_url=shm_server.http_url, model_name=MODEL)


async def test_the_wrong_mode() -> None:
    with (
        FakeCacheServer(chunk_size=C, transfer_mode="lmcache_driven") as server,
        pytest.raises(CacheConnectionError, match="--supported-transfer-mode auto"),
    ):
        await open_context(server.url, http_url=server.http_url, model_name=MODEL)


async def test_a_model_that_nobody_serves(shm_server: FakeCacheServer) -> None:
    with pytest.raises(CacheConnectionError, match=MODEL):
        await open_context(shm_server.url, http_url=shm_server.http_url, model_name="another")


async def test_the_only_model_needs_no_name(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server, model_name=None) as context:
        assert context.model_name == MODEL


async def test_two_servers(shm_server: FakeCacheServer) -> None:
    with FakeCacheServer(chunk_size=2 * C) as other, pytest.raises(CacheConnectionError, match="two different"):
        await open_context(other.url, http_url=shm_server.http_url, model_name=MODEL)


async def test_not_ready_yet(shm_server: FakeCacheServer) -> None:
    shm_server.http_status = 503
    with pytest.raises(CacheConnectionError, match="503"):
        await open_context(shm_server.url, http_url=shm_server.http_url, model_name=MODEL)


async def test_the_old_route() -> None:
    with FakeCacheServer(chunk_size=C, conf_route=True) as server:
        server.serve(MODEL, GEOMETRY)
        async with opened(server) as context:
            assert context.chunk_size == C


async def test_no_http_url() -> None:
    with pytest.raises(UsageError, match="http_url="):
        await open_context("tcp://127.0.0.1:1")


async def test_an_address_with_parameters_is_refused_and_not_repeated() -> None:
    with pytest.raises(
        UsageError, match="parameters, which a cache server's address has not: leave them out"
    ) as caught:
        await aconnect("tcp://127.0.0.1:5555?key=hunter2", "http://127.0.0.1:8080")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("given", ["config.json", {"num_hidden_layers": 2}])
async def test_a_geometry_that_has_not_been_read(given: Any) -> None:
    with pytest.raises(UsageError, match=r"geometry takes a KVGeometry: KVGeometry.from_config\('config.json'\)"):
        await aconnect("tcp://127.0.0.1:5555", "http://127.0.0.1:8080", geometry=given)


async def test_a_probe_that_is_no_engine() -> None:
    with pytest.raises(UsageError, match=r"probe must be an engine, such as CompletionsClient\(base_url\), not str"):
        await aconnect("tcp://127.0.0.1:5555", "http://127.0.0.1:8080", probe="http://127.0.0.1:8000")  # type: ignore[arg-type]


async def test_a_refused_registration_leaves_nothing(shm_server: FakeCacheServer) -> None:
    shm_server.fault(wire.REGISTER, "lose")
    with pytest.raises(CacheError, match="register"):
        await open_context(shm_server.url, http_url=shm_server.http_url, model_name=MODEL, geometry=GEOMETRY, timeout=1)
    assert shm_server.clients == []


async def test_grpc_is_imported_beside_the_loop(shm_server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_stream.kvcache.mp.grpc", None, raising=False)
    monkeypatch.delitem(sys.modules, "lmcache_stream.kvcache.mp.grpc", raising=False)
    with pytest.raises(CacheConnectionError, match="speaks zmq"):
        await open_context("grpc://127.0.0.1:1", http_url=shm_server.http_url, model_name=MODEL)
