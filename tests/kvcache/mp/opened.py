"""Contexts on a fake cache server, and what is stored there."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

C = 8
MODEL = "a/model"
GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=4, num_heads=4)
TOKENS = list(range(100, 100 + 4 * C))


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


def made_kv(tokens: int = len(TOKENS), *, seed: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(2, 3, tokens, width, generator=torch.Generator().manual_seed(seed))


async def retrieved(context: MPKVCacheContext, tokens: list[int], salt: str = "", **options: Any) -> torch.Tensor:
    kv = await context.retrieve(tokens, salt, **options)
    assert kv is not None
    return kv


async def until_let_go(server: FakeCacheServer) -> None:
    async with asyncio.timeout(15):
        while server.held:  # noqa: ASYNC110  (another thread's state)
            await asyncio.sleep(0.005)
