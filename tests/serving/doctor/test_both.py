from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.wire import END_SESSION
from lmcache_stream.serving.doctor import DoctorOptions
from lmcache_stream.testing import Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.serving.doctor.examination import examined, only_failure, the, with_engine_fault
from tests.serving.doctor.stack import CHUNK, stack


async def test_an_engine_that_fails_later(model: str) -> None:
    failure = Reply(status=500, body=b"EngineCore is dead", content_type="text/plain")
    found = await with_engine_fault(model, "/v1/completions", Reply(cached_tokens=0), Reply(), failure)
    only_failure(found, "offload", "EngineCore is dead", "engine's log")


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_keeps_its_kv_to_itself(model: str) -> None:
    async with stack(model, offloads=False) as (options, _):
        found = await examined(options)
    only_failure(found, "offload", "0 of 96 tokens", "LMCacheMPConnector")


@pytest.mark.usefixtures("impatient")
async def test_an_embedded_engine_beside_the_cache_server(tiny_model_path: Path) -> None:
    geometry = replace(KVGeometry.from_config(tiny_model_path), dtype=torch.float32)
    name = str(tiny_model_path)
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(name, geometry)
        async with EmbeddedEngine(tiny_model_path, cache="memory://doctor") as engine:
            found = await examined(
                DoctorOptions(
                    base_url=engine.base_url,
                    kv_url=server.url,
                    kv_http_url=server.http_url,
                    kv_model=name,
                    timeout=30,
                )
            )
    only_failure(found, "offload", "0 of 96 tokens")
    assert found["cached tokens"].status == found["cache salt"].status == "pass"


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_ignores_salts(model: str) -> None:
    async with stack(model, honours_salts=False) as (options, _):
        found = await examined(options)
        only_failure(found, "offload", "0 of 96 tokens", "honour cache_salt")
        again = await examined(options)
        only_failure(again, "offload", "96 tokens", "fresh salt")


async def test_an_engine_that_does_not_decode_from_the_cache(model: str) -> None:
    async with stack(model, takes=False) as (options, _):
        found = await examined(options)
    only_failure(found, "round trip", "0 of 96", "LMCacheMPConnector")


async def test_kv_that_no_reading_fits(model: str) -> None:
    async with stack(model, scrambles=True) as (options, _):
        found = await examined(options)
    only_failure(found, "reading", "no reading", "KVGeometry.from_config")
    assert found["round trip"].status == "skip"


async def test_a_cache_server_that_is_full(model: str) -> None:
    async with stack(model, server={"pool_bytes": 5 * CHUNK * 2048}) as (options, _):
        found = await examined(replace(options, probe=False))
    assert the(found, "fail") == ["round trip"]
    assert "--l1-size-gb" in found["round trip"].remedy


@pytest.mark.usefixtures("impatient")
async def test_a_cache_server_on_which_something_is_left(model: str) -> None:
    async with stack(model, offloads=False, left={"sessions": 1}) as (options, server):
        server.fault(END_SESSION, "ignore")
        found = await examined(options)
    assert the(found, "fail") == ["offload", "clean up"]
    assert "1 sessions" in found["clean up"].detail


@pytest.mark.parametrize("earlier", [0, 60])
async def test_a_cache_server_on_which_the_engines_sessions_are_left(
    model: str, earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(model, left={"sessions": 1}) as (options, server):
        status = server.status
        pulled = {"9": {"model_name": model, "world_size": 1}}

        def with_the_engines() -> dict[str, Any]:
            now = status()
            return {**now, "cache_context_meta": pulled, "active_sessions": now["active_sessions"] + earlier}

        monkeypatch.setattr(server, "status", with_the_engines)
        server.fault(END_SESSION, "ignore")
        found = await examined(options)
    assert found["clean up"].status == "pass"
    assert "1 sessions are the engine's" in found["clean up"].detail
