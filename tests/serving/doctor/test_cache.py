from __future__ import annotations

import os
from dataclasses import replace

import pytest

from lmcache_stream import bodies
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.serving.doctor import DoctorOptions, limits
from lmcache_stream.testing import FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.serving.doctor.examination import examined, only_failure, the
from tests.serving.doctor.stack import CHUNK, Engine, geometry_of, stack
from tests.serving.endless import endless


async def test_in_a_wrong_mode(model: str) -> None:
    with FakeCacheServer(chunk_size=CHUNK, transfer_mode="lmcache_driven") as server:
        server.serve(model, geometry_of(model))
        async with Engine(model=model) as engine:
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
            )
    only_failure(found, "transfer mode", "--supported-transfer-mode lmcache_driven", "--supported-transfer-mode auto")
    assert found["geometry"].status == "skip"
    assert found["geometry"].detail == "needs: same server, shared memory"


async def test_in_a_wrong_mode_that_it_does_not_tell(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER", 0.4)
    with FakeCacheServer(chunk_size=CHUNK, transfer_mode="lmcache_driven") as server:
        server.serve(model, geometry_of(model))
        config = server.config()
        config["mp"]["supported_transfer_mode"] = None
        monkeypatch.setattr(server, "config", lambda: config)
        async with Engine(model=model) as engine:
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
            )
    only_failure(found, "same server", "--supported-transfer-mode auto")


async def test_with_another_model(model: str) -> None:
    async with stack(model) as (options, _):
        found = await examined(replace(options, kv_model="nobody/knows"))
    only_failure(found, "registration", "nobody/knows", repr(model), "--kv-model")


async def test_with_no_model(model: str) -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        async with Engine(model=model) as engine:
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
            )
    only_failure(found, "registration", "registered: none", "LMCacheMPConnector")


async def test_with_a_rank_missing(model: str) -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(model, geometry_of(model, world_size=2))
        async with Engine(model=model) as engine:
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
            )
    only_failure(found, "registration", "1 of 2 ranks", "restart vLLM")


async def test_with_chunks_that_are_no_whole_blocks(model: str) -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(model, geometry_of(model, block_size=48))
        async with Engine(model=model) as engine:
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
            )
    only_failure(found, "chunk size", "chunks of 32", "blocks of 48", "--chunk-size 48")


@pytest.mark.parametrize(("chunk_size", "words"), [(64, "64 tokens by --kv-url, but 32"), (CHUNK, "does not show")])
async def test_that_is_two_servers(model: str, chunk_size: int, words: str) -> None:
    with FakeCacheServer(chunk_size=chunk_size) as other:
        async with stack(model) as (options, _):
            found = await examined(replace(options, kv_url=other.url))
        only_failure(found, "same server", words, "of one LMCache server")
        assert other.clients == []


async def test_over_another_transport(model: str) -> None:
    async with stack(model) as (options, server):
        found = await examined(replace(options, kv_url=server.url.replace("tcp", "grpc")))
    only_failure(found, "transport", "speaks zmq", "tcp://", "--transport grpc")


async def test_whose_segment_is_not_here(model: str) -> None:
    async with stack(model, server={"shared_memory": True}) as (options, server):
        os.unlink(f"/dev/shm/{server.shm_name}")
        found = await examined(options)
    only_failure(found, "shared memory", server.shm_name, "--ipc=host")


async def test_that_is_not_ready(model: str) -> None:
    async with stack(model) as (options, server):
        server.http_status = 503
        found = await examined(options)
    only_failure(found, "cache http", "503", "wait until")
    assert found["cache rpc"].status == "skip"
    assert found["token ids"].status == "pass"


async def test_that_is_something_else(model: str) -> None:
    page = Reply(body=b"<html><body>Welcome!</body></html>", content_type="text/html")
    async with stack(model) as (options, _), FakeEngine() as other:
        other.script(page, path="/config")
        found = await examined(replace(options, kv_http_url=other.base_url))
        only_failure(found, "cache http", "no JSON object", "Welcome!", "--kv-http-url")
        found = await examined(replace(options, kv_http_url=options.base_url))
        only_failure(found, "cache http", "404", "--kv-http-url")
        other.script(Reply(body=b"[]", content_type="application/json"), path="/config")
        found = await examined(replace(options, kv_http_url=other.base_url))
        only_failure(found, "cache http", "no JSON object")
        other.script(Reply(body=b"{}", content_type="application/json"), path="/config")
        found = await examined(replace(options, kv_http_url=other.base_url))
        only_failure(found, "cache http", "does not tell the chunk size")


async def test_that_is_unhealthy(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(model) as (options, server):
        status = {**server.status(), "is_healthy": False}
        monkeypatch.setattr(server, "status", lambda: status)
        found = await examined(options)
    only_failure(found, "cache http", "not healthy", "log")


async def test_that_is_not_there(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ANSWER", 0.3)
    async with stack(model) as (options, _):
        nobody = "127.0.0.1:1"
        found = await examined(replace(options, kv_http_url=f"http://{nobody}"))
        only_failure(found, "cache http", nobody, "start the LMCache server", "--kv-http-url")
        found = await examined(replace(options, kv_url=f"tcp://{nobody}"))
        only_failure(found, "cache rpc", nobody, "start the LMCache server", "--kv-url")


async def test_that_knows_only_the_old_route(model: str) -> None:
    async with stack(model, server={"conf_route": True}) as (options, _):
        found = await examined(options)
    assert the(found, "pass") == list(found)


async def test_that_wipes_salts(model: str) -> None:
    async with stack(model, server={"eviction_policy": "IsolatedLRU"}) as (options, _):
        with pytest.warns(UserWarning, match="IsolatedLRU"):  # of the engine's own client
            found = await examined(options)
    assert the(found, "warn") == ["eviction"]
    assert "--eviction-policy LRU" in found["eviction"].remedy


async def test_with_a_geometry_that_nobody_tells(model: str) -> None:
    name = "a/name-of-no-folder"
    with FakeCacheServer(chunk_size=CHUNK, pool_bytes=64 << 20) as server:
        geometry = geometry_of(model)
        server.serve(name, geometry)
        cache = await open_context(server.url, http_url=server.http_url, model_name=name, geometry=geometry)
        async with cache, Engine(model=name, cache=cache, geometry=geometry) as engine:
            found = await examined(
                DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url, timeout=20)
            )
    assert the(found, "warn") == ["geometry"]
    assert "probe=engine" in found["geometry"].remedy
    assert found["reading"].status == found["round trip"].status == "pass"


async def test_that_answers_without_end(model: str) -> None:
    async with stack(model) as (options, _), endless() as url:
        found = await examined(replace(options, kv_http_url=url))
    only_failure(found, "cache http", f"{url}/config answers more than {bodies.MOST_BYTES} bytes", "--kv-http-url")
