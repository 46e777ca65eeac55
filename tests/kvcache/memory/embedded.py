"""Embedded caches, and KV of a shape that is easy to count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.memory import EmbeddedCache

LAYERS, HEADS, HEAD_DIM = 2, 1, 3
GEOMETRY = KVGeometry(
    num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32, num_heads=2 * HEADS
)
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 4


def kv_of(tokens: int, *, fill: float | None = None) -> torch.Tensor:
    shape = (2, LAYERS, tokens, HEADS * HEAD_DIM)
    return torch.randn(shape) if fill is None else torch.full(shape, float(fill))


def chunks_of(kv: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [kv.narrow(2, start, size) for start in range(0, kv.shape[2] - size + 1, size)]


@contextmanager
def opened(url: str) -> Iterator[EmbeddedCache]:
    cache = EmbeddedCache.open(url)
    try:
        yield cache
    finally:
        cache.close()
        assert cache.name not in EmbeddedCache._by_name


async def until_waiting(cache: EmbeddedCache, waiters: int) -> None:
    while sum(map(len, cache._waiters.values())) < waiters:  # noqa: ASYNC110
        await asyncio.sleep(0)
