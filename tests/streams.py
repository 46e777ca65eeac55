"""A stream over the embedded cache and an engine that offloads to it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
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


@contextmanager
def embedded_cache(url: str | None = None) -> Iterator[tuple[EmbeddedCache, str]]:
    """A cache that serves `MODEL`, and where it is."""
    url = url or make_url()
    cache = EmbeddedCache.open(url)
    cache.register_model(MODEL, GEOMETRY)
    try:
        yield cache, url
    finally:
        cache.unregister_model(MODEL)
        cache.close()


@asynccontextmanager
async def opened(engine: type[CountingEngine], url: str | None = None, **options: Any) -> AsyncIterator[Setup]:
    """A cache, a context on it, and an engine of that kind."""
    with embedded_cache(url) as (cache, there):
        async with aconnect(there) as ctx:
            yield Setup(cache, ctx, engine(cache, **options))


def drop_every_other(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def keep(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv, tokens
