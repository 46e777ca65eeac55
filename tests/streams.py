"""A stream over the embedded cache and an engine that offloads to it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch

from lmcache_stream.kvcache import aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.stream import AsyncLMCacheStream

from .engines import GEOMETRY, MODEL, CountingEngine

CHUNK = 4
PREFILL: dict[str, Any] = {"max_tokens": 1}


class Setup:
    """A cache, a context on it, and an engine that offloads to it."""

    def __init__(self, cache: EmbeddedCache, ctx: Any, engine: CountingEngine) -> None:
        self.cache, self.ctx, self.engine = cache, ctx, engine

    def stream(self, prompt: int | list[int], engine: Any = None, **options: Any) -> AsyncLMCacheStream:
        ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        return AsyncLMCacheStream(self.ctx, engine or self.engine, ids, **options)


class Exchangeable:
    """An engine in whose place another one can be put under a stream."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __call__(self, ids: list[int], params: Mapping[str, Any], salt: str, /) -> Any:
        return self.engine(ids, params, salt)


def make_url(chunk_size: int = CHUNK, max_bytes: str = "64MiB") -> str:
    return f"memory://{uuid.uuid4().hex}?chunk_size={chunk_size}&max_bytes={max_bytes}"


class opened:
    def __init__(self, engine: type[CountingEngine], url: str | None = None, **options: Any) -> None:
        self._engine, self._url, self._options = engine, url or make_url(), options

    async def __aenter__(self) -> Setup:
        self._cache = EmbeddedCache.open(self._url)
        self._cache.register_model(MODEL, GEOMETRY)
        self._ctx = await aconnect(self._url)
        return Setup(self._cache, self._ctx, self._engine(self._cache, **self._options))

    async def __aexit__(self, *_: object) -> None:
        await self._ctx.close()
        self._cache.unregister_model(MODEL)
        self._cache.close()


def drop_every_other(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def keep(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv, tokens
