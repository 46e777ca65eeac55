"""A cache server and an engine over it, with faults to order."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from aiohttp import web

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.rotary import rerotate_
from lmcache_stream.serving.doctor import DoctorOptions
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNK = 32
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
