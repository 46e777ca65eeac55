"""Engines without a model, for tests: they offload recognisable KV to the embedded cache, as vLLM would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import closing
from typing import Any

import torch

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.types import CacheKind, Completion, TokenEvent, Usage

LAYERS, HEADS, HEAD_DIM = 2, 2, 4
MODEL = "counting-model"
GEOMETRY = KVGeometry(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)


def kv_of(ids: list[int]) -> torch.Tensor:
    """KV `[2, L, T, D]` in which each token's value tells its id and its position."""
    kv = torch.empty(2, LAYERS, len(ids), HEADS * HEAD_DIM)
    kv[0] = torch.tensor(ids, dtype=torch.float32)[None, :, None]
    kv[1] = torch.arange(len(ids), dtype=torch.float32)[None, :, None]
    return kv


class CountingEngine:
    """Answers prompt `ids` with `next_id`, `next_id + 1`, ...; takes and offloads KV like an engine.

    Args:
        cache: Where it offloads the whole chunks of each prompt.
        output: Tokens to generate; None: `max_tokens`.
        fail_after: Raise `RuntimeError` after this many tokens.
        usage: Whether it reports usage.
        offload: Whether it offloads.
    """

    def __init__(
        self,
        cache: EmbeddedCache,
        *,
        output: int | None = None,
        finish_reason: str | None = "length",
        fail_after: int | None = None,
        usage: bool = True,
        offload: bool = True,
    ) -> None:
        self.cache = cache
        self.output = output
        self.finish_reason = finish_reason
        self.fail_after = fail_after
        self.usage = usage
        self.offload = offload
        self.next_id = 1000
        self.sent: list[tuple[list[int], dict[str, Any], str]] = []
        self.generated: list[list[int]] = []
        self.closed = 0

    def __call__(
        self, ids: list[int], params: Mapping[str, Any], salt: str, /
    ) -> Generator[TokenEvent | Completion, None, None]:
        cached = min(self.cache.covered(MODEL, ids, salt), len(ids) - 1)
        self.sent.append((list(ids), dict(params), salt))
        generated: list[int] = []
        self.generated.append(generated)
        try:
            for index in range(self.output if self.output is not None else params.get("max_tokens", 16)):
                if index == self.fail_after:
                    raise RuntimeError("engine fell over")
                token, self.next_id = self.next_id, self.next_id + 1
                generated.append(token)
                yield TokenEvent(token, f"<{token}>")
            if index_is_end(self.fail_after, len(generated)):
                raise RuntimeError("engine fell over")
            if self.offload:
                self.put(ids, salt)
            usage = Usage(len(ids), len(generated), cached) if self.usage else None
            if usage or self.finish_reason:
                yield Completion(self.finish_reason, None, usage)
        finally:
            self.closed += 1

    def put(self, ids: list[int], salt: str) -> None:
        """Offload the whole chunks of `ids`."""
        size = self.cache.chunk_size
        whole = len(ids) // size * size
        chunks = [kv_of(ids[:whole])[:, :, at : at + size].clone() for at in range(0, whole, size)]
        self.cache.put(MODEL, ids[:whole], chunks, salt, CacheKind.KV)


class AsyncCountingEngine(CountingEngine):
    """The same as an async generator function."""

    async def __call__(  # type: ignore[override]
        self, ids: list[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[TokenEvent | Completion]:
        with closing(super().__call__(ids, params, salt)) as events:
            for item in events:
                await asyncio.sleep(0)
                yield item


def index_is_end(fail_after: int | None, generated: int) -> bool:
    """Whether the fault was ordered for the end of the output."""
    return fail_after is not None and fail_after == generated
