"""An engine without a model that offloads the KV of its prompts to a cache server, as a vLLM with LMCache does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.rotary import rerotate_
from lmcache_stream.testing import FakeEngine, RecordedRequest, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

CHUNK = 16


def geometry_of(model: Path) -> KVGeometry:
    return replace(KVGeometry.from_config(model), dtype=torch.float32, block_size=CHUNK)


def answer(asked: Mapping[str, Any]) -> list[int]:
    """As many tokens as asked for, that depend on the whole prompt."""
    return [(sum(asked["prompt"]) + 7 * index) % 1000 for index in range(asked["max_tokens"])]


class OffloadingEngine(FakeEngine):
    """Offloads the KV of its prompts to a cache server after it answered, and says what it found there before."""

    def __init__(self, server: FakeCacheServer, geometry: KVGeometry, model: str) -> None:
        super().__init__(model=model, default=Reply(tokens=answer, pace=0.002))
        self._cache = server
        self._geometry = geometry
        width = geometry.num_layers, geometry.hidden_dim
        self._table = torch.randn(2, 2048, *width, generator=torch.Generator().manual_seed(0))
        self._offloads: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._ctx: MPKVCacheContext = await open_context(
            self._cache.url, http_url=self._cache.http_url, model_name=self.model, geometry=self._geometry
        )
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await asyncio.gather(*self._offloads)
        await self._ctx.close()

    def kv_of(self, ids: list[int]) -> torch.Tensor:
        """KV `[2, L, T, D]`: values by id, keys by id and rotated to their positions."""
        kv = self._table[:, ids].transpose(1, 2).contiguous()
        assert self._geometry.rotary is not None
        rerotate_(kv[0], torch.zeros(len(ids), dtype=torch.int64), torch.arange(len(ids)), self._geometry.rotary)
        return kv

    def _reply_to(self, request: RecordedRequest) -> tuple[Reply, Iterable[bytes]]:
        if request.path == "/v1/completions":
            ids, salt = list(request.json["prompt"]), request.json.get("cache_salt", "")
            covered = self._covered(ids, salt)
            self.script(replace(self.default, cached_tokens=min(covered, len(ids) - 1)))
            task = asyncio.get_running_loop().create_task(self._offload(ids, salt))
            self._offloads.add(task)
            task.add_done_callback(self._offloads.discard)
        return super()._reply_to(request)

    def _covered(self, ids: list[int], salt: str) -> int:
        covered = 0
        while (self.model, 1, 0, salt, tuple(ids[: covered + CHUNK])) in self._cache._chunks:
            covered += CHUNK
        return min(covered, len(ids) // CHUNK * CHUNK)

    async def _offload(self, ids: list[int], salt: str) -> None:
        await self._ctx.put(self.kv_of(ids), ids, salt)
