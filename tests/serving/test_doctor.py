from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from aiohttp import web

from lmcache_stream import portal
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.kvcache.mp.wire import END_SESSION
from lmcache_stream.rotary import rerotate_
from lmcache_stream.serving import doctor
from lmcache_stream.serving.doctor import DoctorOptions, Finding, diagnose
from lmcache_stream.testing import End, FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

CHUNK = 32
KEY = "sk-very-secret-1234"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ARRIVAL", 0.3)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that has a model's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def geometry_of(model: str, **changes: Any) -> KVGeometry:
    return replace(KVGeometry.from_config(model, dtype="float32"), **changes)


def kv_of(ids: list[int], geometry: KVGeometry) -> torch.Tensor:
    """KV `[2, L, T, D]` as a model's first layer has it: what a token's id tells, and keys rotated by position."""
    by_id = torch.randn(2, 256, geometry.hidden_dim, generator=torch.Generator().manual_seed(0))
    kv = by_id[:, None, ids].expand(2, geometry.num_layers, -1, -1).contiguous()
    positions = torch.arange(len(ids))
    rerotate_(kv[0], torch.zeros_like(positions), positions, geometry.rotary)
    return kv


@dataclass(kw_only=True)
class Engine:
    """An engine on a real socket that keeps its KV in a cache server, as vLLM does; each fault is an attribute."""

    model: str
    cache: MPKVCacheContext | None = None
    geometry: KVGeometry | None = None
    offloads: bool = True
    takes: bool = True
    honours_salts: bool = True
    tells_cached: bool = True
    scrambles: bool = False
    max_model_len: int = 4096
    metrics: str = 'vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0"} 1.0\n'

    def __post_init__(self) -> None:
        self.base_url = ""
        self.prompts: list[list[int]] = []
        self.offloading: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Engine:
        application = web.Application(client_max_size=2**24)
        application.add_routes(
            [
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.tell_metrics),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
            ]
        )
        self.runner = web.AppRunner(application)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()
        await asyncio.gather(*self.offloading)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.99.0"})

    async def tell_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": "served", "root": self.model, "max_model_len": self.max_model_len}
        return web.json_response({"data": [card]})

    async def completions(self, request: web.Request) -> web.Response:
        asked = await request.json()
        prompt: list[int] = asked["prompt"]
        salt = asked.get("cache_salt", "") if self.honours_salts else ""
        if len(prompt) >= self.max_model_len:
            error = {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        self.prompts.append(prompt)
        cached = 0
        if self.cache is not None and self.takes:
            cached = min(await self.cache.lookup(prompt, salt), len(prompt) - 1)
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        choice = {"index": 0, "text": "x", "token_ids": [7], "finish_reason": "length"}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        if self.offloads and self.cache is not None:
            task = asyncio.create_task(self.offload(self.cache, prompt, salt))
            self.offloading.add(task)
        return web.Response(text=body, content_type="text/event-stream")

    async def offload(self, cache: MPKVCacheContext, prompt: list[int], salt: str) -> None:
        assert self.geometry is not None
        kv = kv_of(prompt, self.geometry)
        if self.scrambles:
            kv = kv[:, :, torch.randperm(len(prompt), generator=torch.Generator().manual_seed(1))]
        await cache.put(kv, prompt, salt)


def options_for(base_url: str, kv_url: str, kv_http_url: str) -> DoctorOptions:
    return DoctorOptions(base_url=base_url, kv_url=kv_url, kv_http_url=kv_http_url, timeout=20)


@asynccontextmanager
async def stack(
    model: str, *, server: dict[str, Any] | None = None, left: dict[str, int] | None = None, **engine: Any
) -> AsyncIterator[tuple[DoctorOptions, FakeCacheServer]]:
    """A cache server and an engine over it; what doctor is to be told, and the cache server.

    `left` is what the cache server still holds when both have ended: nothing, unless a fault makes it so.
    """
    given: dict[str, Any] = {"chunk_size": CHUNK, "pool_bytes": 64 << 20, **(server or {})}
    with FakeCacheServer(**given) as cache_server:
        geometry = geometry_of(model)
        cache_server.serve(model, geometry)
        cache = await open_context(
            cache_server.url, http_url=cache_server.http_url, model_name=model, geometry=geometry
        )
        async with cache:
            async with Engine(model=model, cache=cache, geometry=geometry, **engine) as running:
                urls = running.base_url, cache_server.url, cache_server.http_url
                yield options_for(*urls), cache_server
            # Not sooner: until it has ended, the engine's own stores hold something too.
            assert cache_server.held == (left or {})


async def examined(options: DoctorOptions) -> dict[str, Finding]:
    findings = await diagnose(options)
    assert [finding.name for finding in findings] == [check.name for check in doctor.CHECKS]
    for finding in findings:
        assert finding.detail
        assert bool(finding.remedy) == (finding.status in ("fail", "warn")), finding
    return {finding.name: finding for finding in findings}


def the(found: dict[str, Finding], status: str) -> list[str]:
    return [name for name, finding in found.items() if finding.status == status]


def only_failure(found: dict[str, Finding], name: str, *words: str) -> None:
    """One cause makes one failure, and its finding says what was seen and what to change."""
    assert the(found, "fail") == [name], found
    said = f"{found[name].detail}\n{found[name].remedy}"
    for word in words:
        assert word in said


class TestWhereAllIsWell:
    async def test_everything_passes_and_nothing_is_left(self, model: str) -> None:
        async with stack(model) as (options, server):
            clients = server.clients
            found = await examined(options)
            assert the(found, "pass") == list(found)
            assert server.clients == clients
            assert server.wrong_publications == server.wrong_unlocks == 0
        assert "0.99.0" in found["engine version"].detail
        assert "2 layers, 2 KV heads of 64" in found["geometry"].detail
        assert f"{model}/config.json" in found["geometry"].detail
        assert "packing split" in found["reading"].detail
        assert "96 tokens" in found["round trip"].detail
        assert found["prefix caching"].detail.startswith("on;")

    async def test_pickles_are_a_warning(self, model: str) -> None:
        async with stack(model, server={"shared_memory": False}) as (options, _):
            found = await examined(options)
        assert the(found, "warn") == ["shared memory"]
        assert "--shm-name NAME --no-l1-use-lazy" in found["shared memory"].remedy
        assert the(found, "pass") == [name for name in found if name != "shared memory"]

    async def test_a_probe_is_left_out_if_asked(self, model: str) -> None:
        async with stack(model) as (options, _):
            found = {each.name: each for each in await diagnose(replace(options, probe=False))}
        assert the(found, "skip") == ["reading"]
        assert found["round trip"].status == "pass"

    async def test_a_short_context_is_examined_with_shorter_prompts(self, model: str) -> None:
        async with stack(model, max_model_len=1000) as (options, _):
            found = await examined(options)
        assert the(found, "pass") == list(found)
        async with stack(model, max_model_len=CHUNK) as (options, _):
            found = await examined(options)
        only_failure(found, "offload", "no chunk of 32", "smaller --chunk-size")

    async def test_what_an_engine_does_not_publish_is_no_fault(self, model: str) -> None:
        async with stack(model, metrics="") as (options, _):
            found = await examined(options)
        assert found["prefix caching"].detail.startswith("not told")
        assert found["cache version"].detail == "not published"
        assert the(found, "pass") == list(found)


class TestTheCacheServer:
    async def test_in_a_wrong_mode(self, model: str) -> None:
        with FakeCacheServer(chunk_size=CHUNK, transfer_mode="lmcache_driven") as server:
            server.serve(model, geometry_of(model))
            async with Engine(model=model) as engine:
                found = await examined(
                    DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
                )
        only_failure(
            found, "transfer mode", "--supported-transfer-mode lmcache_driven", "--supported-transfer-mode auto"
        )
        assert found["geometry"].status == "skip"
        assert found["geometry"].detail == "needs: same server, shared memory"

    async def test_in_a_wrong_mode_that_it_does_not_tell(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "ANSWER", 0.4)
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

    async def test_with_another_model(self, model: str) -> None:
        async with stack(model) as (options, _):
            found = await examined(replace(options, kv_model="nobody/knows"))
        only_failure(found, "registration", "nobody/knows", repr(model), "--kv-model")

    async def test_with_no_model(self, model: str) -> None:
        with FakeCacheServer(chunk_size=CHUNK) as server:
            async with Engine(model=model) as engine:
                found = await examined(
                    DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
                )
        only_failure(found, "registration", "registered: none", "LMCacheMPConnector")

    async def test_with_a_rank_missing(self, model: str) -> None:
        with FakeCacheServer(chunk_size=CHUNK) as server:
            server.serve(model, geometry_of(model, world_size=2))
            async with Engine(model=model) as engine:
                found = await examined(
                    DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
                )
        only_failure(found, "registration", "1 of 2 ranks", "restart vLLM")

    async def test_with_chunks_that_are_no_whole_blocks(self, model: str) -> None:
        with FakeCacheServer(chunk_size=CHUNK) as server:
            server.serve(model, geometry_of(model, block_size=48))
            async with Engine(model=model) as engine:
                found = await examined(
                    DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url)
                )
        only_failure(found, "chunk size", "chunks of 32", "blocks of 48", "--chunk-size 48")

    @pytest.mark.parametrize(("chunk_size", "words"), [(64, "64 tokens by --kv-url, but 32"), (CHUNK, "does not show")])
    async def test_that_is_two_servers(self, model: str, chunk_size: int, words: str) -> None:
        with FakeCacheServer(chunk_size=chunk_size) as other:
            async with stack(model) as (options, _):
                found = await examined(replace(options, kv_url=other.url))
            only_failure(found, "same server", words, "of one LMCache server")
            assert other.clients == []

    async def test_over_another_transport(self, model: str) -> None:
        async with stack(model) as (options, server):
            found = await examined(replace(options, kv_url=server.url.replace("tcp", "grpc")))
        only_failure(found, "transport", "speaks zmq", "tcp://", "--transport grpc")

    async def test_whose_segment_is_not_here(self, model: str) -> None:
        async with stack(model, server={"shared_memory": True}) as (options, server):
            os.unlink(f"/dev/shm/{server.shm_name}")
            found = await examined(options)
        only_failure(found, "shared memory", server.shm_name, "--ipc=host")

    async def test_that_is_not_ready(self, model: str) -> None:
        async with stack(model) as (options, server):
            server.http_status = 503
            found = await examined(options)
        only_failure(found, "cache http", "503", "wait until")
        assert found["cache rpc"].status == "skip"
        assert found["token ids"].status == "pass"

    async def test_that_is_something_else(self, model: str) -> None:
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

    async def test_that_is_unhealthy(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async with stack(model) as (options, server):
            status = {**server.status(), "is_healthy": False}
            monkeypatch.setattr(server, "status", lambda: status)
            found = await examined(options)
        only_failure(found, "cache http", "not healthy", "log")

    async def test_that_is_not_there(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "ANSWER", 0.3)
        async with stack(model) as (options, _):
            nobody = "127.0.0.1:1"
            found = await examined(replace(options, kv_http_url=f"http://{nobody}"))
            only_failure(found, "cache http", nobody, "start the LMCache server", "--kv-http-url")
            found = await examined(replace(options, kv_url=f"tcp://{nobody}"))
            only_failure(found, "cache rpc", nobody, "start the LMCache server", "--kv-url")

    async def test_that_knows_only_the_old_route(self, model: str) -> None:
        async with stack(model, server={"conf_route": True}) as (options, _):
            found = await examined(options)
        assert the(found, "pass") == list(found)

    async def test_that_wipes_salts(self, model: str) -> None:
        async with stack(model, server={"eviction_policy": "IsolatedLRU"}) as (options, _):
            with pytest.warns(UserWarning, match="IsolatedLRU"):  # of the engine's own client
                found = await examined(options)
        assert the(found, "warn") == ["eviction"]
        assert "--eviction-policy LRU" in found["eviction"].remedy

    async def test_that_is_full(self, model: str) -> None:
        async with stack(model, server={"pool_bytes": 5 * CHUNK * 2048}) as (options, _):
            found = await examined(replace(options, probe=False))
        assert the(found, "fail") == ["round trip"]
        assert "--l1-size-gb" in found["round trip"].remedy

    async def test_with_a_geometry_that_nobody_tells(self, model: str) -> None:
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

    async def test_on_which_something_is_left(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "ANSWER", 0.3)
        async with stack(model, offloads=False, left={"sessions": 1}) as (options, server):
            server.fault(END_SESSION, "ignore")
            found = await examined(options)
        assert the(found, "fail") == ["offload", "clean up"]
        assert "1 sessions" in found["clean up"].detail

    async def test_whose_own_sessions_are_left(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "ANSWER", 0.3)
        async with stack(model, left={"sessions": 1}) as (options, server):
            status = server.status
            pulled = {"9": {"model_name": model, "world_size": 1}}
            monkeypatch.setattr(server, "status", lambda: {**status(), "cache_context_meta": pulled})
            server.fault(END_SESSION, "ignore")
            found = await examined(options)
        assert found["clean up"].status == "pass"
        assert "1 sessions are the engine's" in found["clean up"].detail


class TestTheEngine:
    async def engine_fault(self, model: str, path: str, *replies: Reply, key: str | None = None) -> dict[str, Finding]:
        with FakeCacheServer(chunk_size=CHUNK) as server:
            server.serve(model, geometry_of(model))
            async with FakeEngine(root=model) as engine:
                engine.script(*replies, path=path)
                return await examined(
                    DoctorOptions(
                        base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url, api_key=key, timeout=5
                    )
                )

    async def test_is_not_there(self, model: str) -> None:
        async with stack(model) as (options, _):
            found = await examined(replace(options, base_url="http://127.0.0.1:1"))
        only_failure(found, "engine", "127.0.0.1:1", "start vLLM", "--base-url")
        assert found["geometry"].status == "pass"  # the only model that is registered
        assert found["offload"].detail == "needs: token ids, cache salt"

    async def test_is_not_there_and_two_models_are_registered(self, model: str) -> None:
        async with stack(model) as (options, server):
            server.serve("another", geometry_of(model))
            found = await examined(replace(options, base_url="http://127.0.0.1:1"))
        only_failure(found, "engine")
        assert found["registration"].detail == "needs: model"

    async def test_is_not_ready(self, model: str) -> None:
        found = await self.engine_fault(model, "/health", Reply(status=503, body=b"loading"))
        only_failure(found, "engine", "503", "loading", "wait until")

    async def test_says_nothing(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "QUICK", 0.3)
        found = await self.engine_fault(model, "/health", Reply(header_delay=60))
        only_failure(found, "engine", "start vLLM")

    async def test_is_something_else(self, model: str) -> None:
        page = Reply(body=b"<html>Welcome!</html>", content_type="text/html")
        found = await self.engine_fault(model, "/v1/models", page)
        only_failure(found, "model", "Welcome!", "--base-url")

    async def test_wants_a_key(self, model: str) -> None:
        refusal = Reply(status=401, body=b'{"error": "Unauthorized"}', content_type="application/json")
        found = await self.engine_fault(model, "/v1/models", refusal)
        only_failure(found, "model", "401", "--api-key")

    async def test_serves_another_model(self, model: str) -> None:
        async with stack(model) as (options, _):
            found = await examined(replace(options, model="mistaken"))
        only_failure(found, "model", "'mistaken'", "'served'", "--model")

    async def test_serves_several_models(self, model: str) -> None:
        cards = json.dumps({"data": [{"id": "one", "root": model}, {"id": "two"}]}).encode()
        found = await self.engine_fault(model, "/v1/models", Reply(body=cards, content_type="application/json"))
        only_failure(found, "model", "'one', 'two'", "--model")

    async def test_sends_no_ids(self, model: str) -> None:
        found = await self.engine_fault(model, "/v1/completions", Reply(ids=False))
        only_failure(found, "token ids", "0.10.2", "proxy")

    async def test_counts_otherwise(self, model: str) -> None:
        found = await self.engine_fault(model, "/v1/completions", Reply(tokens=2))
        only_failure(found, "token ids", "2 ids", "max_tokens")

    async def test_fails(self, model: str) -> None:
        error = json.dumps({"error": {"message": "EngineCore is dead", "code": 500}}).encode()
        found = await self.engine_fault(
            model, "/v1/completions", Reply(status=500, body=error, content_type="application/json")
        )
        only_failure(found, "token ids", "EngineCore is dead", "log")

    async def test_fails_later(self, model: str) -> None:
        failure = Reply(status=500, body=b"EngineCore is dead", content_type="text/plain")
        found = await self.engine_fault(model, "/v1/completions", Reply(cached_tokens=0), Reply(), failure)
        only_failure(found, "offload", "EngineCore is dead", "engine's log")

    async def test_hangs(self, model: str) -> None:
        with FakeCacheServer(chunk_size=CHUNK) as server:
            server.serve(model, geometry_of(model))
            async with FakeEngine(root=model) as engine:
                engine.script(Reply(end_after=0, end=End.STALL))
                found = await examined(
                    DoctorOptions(base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url, timeout=0.5)
                )
        only_failure(found, "token ids", "0.5 s", "--timeout")

    async def test_refuses_salts(self, model: str) -> None:
        error = json.dumps({"error": {"message": "cache_salt is unknown", "code": 400}}).encode()
        refusal = Reply(status=400, body=error, content_type="application/json")
        found = await self.engine_fault(model, "/v1/completions", Reply(cached_tokens=0), refusal)
        only_failure(found, "cache salt", "cache_salt is unknown", "honour cache_salt")

    async def test_reports_no_usage(self, model: str) -> None:
        found = await self.engine_fault(model, "/v1/completions", Reply(usage=False))
        assert {"token ids", "cached tokens"} <= set(the(found, "warn"))

    async def test_does_not_tell_cached_tokens(self, model: str) -> None:
        async with stack(model, tells_cached=False) as (options, _):
            found = await examined(options)
        assert the(found, "warn") == ["cached tokens", "round trip"]
        for name in the(found, "warn"):
            assert "--enable-prompt-tokens-details" in found[name].remedy

    async def test_keeps_its_kv_to_itself(self, model: str) -> None:
        async with stack(model, offloads=False) as (options, _):
            found = await examined(options)
        only_failure(found, "offload", "0 of 96 tokens", "LMCacheMPConnector")

    async def test_is_an_embedded_one_beside_the_cache_server(self, tiny_model_path: Path) -> None:
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

    async def test_ignores_salts(self, model: str) -> None:
        async with stack(model, honours_salts=False) as (options, _):
            found = await examined(options)
            only_failure(found, "offload", "0 of 96 tokens", "honour cache_salt")
            again = await examined(options)
            only_failure(again, "offload", "96 tokens", "fresh salt")

    async def test_does_not_decode_from_the_cache(self, model: str) -> None:
        async with stack(model, takes=False) as (options, _):
            found = await examined(options)
        only_failure(found, "round trip", "0 of 96", "LMCacheMPConnector")

    async def test_whose_kv_no_reading_fits(self, model: str) -> None:
        async with stack(model, scrambles=True) as (options, _):
            found = await examined(options)
        only_failure(found, "reading", "no reading", "KVGeometry.from_config")
        assert found["round trip"].status == "skip"


async def test_cancelled_it_leaves_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ARRIVAL", 60.0)
    async with stack(model, offloads=False) as (options, server):
        clients = server.clients
        waiting = asyncio.Event()
        wait_for = MPKVCacheContext.wait_for

        async def told(self: MPKVCacheContext, *args: Any, **given: Any) -> int:
            waiting.set()
            return await wait_for(self, *args, **given)

        monkeypatch.setattr(MPKVCacheContext, "wait_for", told)
        task = asyncio.create_task(diagnose(options))
        async with asyncio.timeout(20):
            await waiting.wait()
            assert len(server.clients) > len(clients)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert server.clients == clients
        assert server.held == {}


def test_ctrl_c_leaves_nothing(model: str) -> None:
    held = stack(model, offloads=False)
    options, server = portal.run(held.__aenter__)
    clients = server.clients
    program = """
import argparse, sys
from lmcache_stream.serving import doctor
parser = argparse.ArgumentParser()
doctor.add_arguments(parser)
try:
    doctor.run(parser.parse_args())
except KeyboardInterrupt:
    sys.exit(130)
"""
    urls = ["--base-url", options.base_url, "--kv-url", options.kv_url, "--kv-http-url", options.kv_http_url]
    try:
        with subprocess.Popen([sys.executable, "-c", program, *urls], stdout=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            # It looks again and again for KV that does not come.
            while server.calls["lookup"] < 3 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(server.clients) > len(clients)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20)[0] == b""
            assert process.returncode == 130
        assert server.clients == clients
        assert server.held == {}
    finally:
        portal.run(held.__aexit__, None, None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_url": "memory://default"},
        {"kv_url": "localhost:5555"},
        {"kv_http_url": "localhost:8080"},
        {"timeout": 0.0},
        {"timeout": float("nan")},
    ],
)
def test_refuses_what_cannot_be_right(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"base_url": "http://a", "kv_url": "tcp://a:1", "kv_http_url": "http://a"}
    with pytest.raises(UsageError):
        DoctorOptions(**{**right, **wrong})


async def test_refuses_an_engine_that_is_no_address() -> None:
    with pytest.raises(UsageError, match="--base-url is"):
        await diagnose(DoctorOptions(base_url="here", kv_url="tcp://a:1", kv_http_url="http://a"))


Doctor: TypeAlias = "Callable[..., tuple[int, str]]"


class TestTheCommand:
    @pytest.fixture
    def command(self, capsys: pytest.CaptureFixture[str]) -> Doctor:
        def call(*arguments: str) -> tuple[int, str]:
            parser = argparse.ArgumentParser()
            doctor.add_arguments(parser)
            status = doctor.run(parser.parse_args(arguments))
            printed = capsys.readouterr()
            assert printed.err == ""
            return status, printed.out

        return call

    @pytest.fixture
    def arguments(self, model: str) -> Iterator[list[str]]:
        """A whole stack behind the command, on the background loop."""
        held = stack(model)
        options, _ = portal.run(held.__aenter__)
        yield ["--base-url", options.base_url, "--kv-url", options.kv_url, "--kv-http-url", options.kv_http_url]
        portal.run(held.__aexit__, None, None, None)

    def test_prints_a_table_and_exits_with_0(self, command: Doctor, arguments: list[str]) -> None:
        status, out = command(*arguments, "--timeout", "20")
        assert status == 0
        for check in doctor.CHECKS:
            assert f" {check.name} " in out
        assert f"{len(doctor.CHECKS)} pass\n" in out

    def test_prints_one_json_document(self, command: Doctor, arguments: list[str]) -> None:
        status, out = command(*arguments, "--json", "--no-probe")
        said = json.loads(out)
        assert status == 0
        assert said["ok"] is True
        assert said["base_url"] == arguments[1]
        assert [finding["name"] for finding in said["findings"]] == [check.name for check in doctor.CHECKS]
        assert {finding["status"] for finding in said["findings"]} == {"pass", "skip"}

    def test_a_failure_is_told_in_words_on_a_narrow_terminal(
        self, command: Doctor, arguments: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        status, out = command(*arguments, "--kv-model", "nobody/" + "x" * 100)
        assert status == 1
        assert max(map(len, out.splitlines())) <= 60
        assert "\x1b" not in out
        words = " ".join(out.replace("│", " ").split())
        assert "registration fail no engine has registered" in words
        assert "To change: give --kv-model" in words
        assert "geometry skip needs: registration" in words
        assert " 1 fail" in out.splitlines()[-1]
        status, out = command(*arguments, "--kv-model", "nobody", "--json")
        assert status == 1
        assert json.loads(out)["ok"] is False

    def test_takes_urls_from_the_environment(
        self, command: Doctor, arguments: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ("LMCACHE_STREAM_BASE_URL", "LMCACHE_STREAM_KV_URL", "LMCACHE_STREAM_KV_HTTP_URL")
        for name, value in zip(names, arguments[1::2], strict=True):
            monkeypatch.setenv(name, value)
        status, out = command("--json", "--no-probe")
        assert status == 0
        assert json.loads(out)["kv_url"] == arguments[3]

    def test_wants_all_three_urls(self, command: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            command("--base-url", "http://localhost:8000")
        assert "--kv-url" in capsys.readouterr().err

    @pytest.mark.parametrize("json_", [True, False])
    def test_never_prints_the_key(
        self, command: Doctor, arguments: list[str], json_: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "400")
        with FakeEngine() as engine:
            echo = f"Bearer {KEY} is no key of ours".encode()
            engine.script(Reply(status=500, body=echo), path="/health")
            engine.script(Reply(status=401, body=echo), path="/v1/models")
            for _ in range(2):
                given = [*arguments, "--base-url", engine.base_url, "--api-key", KEY]
                status, out = command(*given, *(["--json"] if json_ else []))
                assert status == 1
                assert KEY not in out
                assert "*** is no key of ours" in out
            assert {request.headers.get("authorization") for request in engine.requests} == {f"Bearer {KEY}"}

    def test_the_key_is_not_given_to_the_cache_server(self, command: Doctor, arguments: list[str]) -> None:
        with FakeEngine() as other:
            command(*arguments, "--kv-http-url", other.base_url, "--api-key", KEY, "--json")
            assert other.requests
            assert not any(KEY in str(request.headers) for request in other.requests)


def test_servers_words_do_not_steer_the_terminal() -> None:
    assert "\x1b" not in doctor.printable("\x1b[2Jgone\nand more")


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "http://user:hunter2@127.0.0.1:1"},
        {"kv_url": "tcp://user:hunter2@127.0.0.1:1"},
        {"kv_http_url": "http://user:hunter2@127.0.0.1:1"},
        {"kv_http_url": "http://127.0.0.1:1?key=hunter2"},
    ],
)
async def test_an_address_with_a_secret_is_refused_and_not_repeated(wrong: dict[str, Any]) -> None:
    right = options_for("http://127.0.0.1:1", "tcp://127.0.0.1:1", "http://127.0.0.1:1")
    with pytest.raises(UsageError) as caught:
        await diagnose(replace(right, **wrong))
    assert "hunter2" not in str(caught.value)
