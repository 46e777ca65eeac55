"""A cache server that is killed and restarted while a stream is at work."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheTimeout, LMCacheStreamError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.serving.options import CacheOptions
from lmcache_stream.serving.up import CacheServer
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.types import TokenEvent

CHUNK = 32
GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, block_size=CHUNK)
LIMIT = 5.0


async def test_killed_and_restarted_between_prefill_and_modify(real_python: str) -> None:
    prompt = list(range(100, 100 + 6 * CHUNK + 5))
    kv = torch.randn(2, 4, len(prompt), GEOMETRY.hidden_dim)
    model = f"model/{uuid.uuid4().hex}"
    async with CacheServer(CacheOptions(python=real_python, l1_gib=0.25)) as server:
        ctx = await open_context(
            server.kv_url, http_url=server.kv_http_url, model_name=model, geometry=GEOMETRY, serve=True, timeout=LIMIT
        )

        async def offloading(ids: list[int], params: Any, salt: str) -> AsyncIterator[TokenEvent]:
            assert await ctx.store(kv, ids, salt)
            yield TokenEvent(7, "seven")

        stream = AsyncLMCacheStream(ctx, offloading, prompt)
        await stream.generate({"max_tokens": 1})
        tokens = stream.tokens
        await server.kill()
        started = time.monotonic()
        with pytest.raises(LMCacheStreamError, match=server.kv_url) as caught:
            await stream.modify_kv(lambda kv, tokens: (-kv, tokens), timeout=LIMIT)
        assert time.monotonic() - started < 2 * LIMIT
        assert isinstance(caught.value.__cause__, CacheConnectionError | CacheTimeout)
        assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == (tokens, [], "")

        await server.start()
        stream = AsyncLMCacheStream(ctx, offloading, prompt)
        await stream.generate({"max_tokens": 1})
        receipt = await stream.modify_kv(lambda kv, tokens: (-kv, tokens))
        assert receipt.chunks_stored == 6
        async with await open_context(server.kv_url, http_url=server.kv_http_url, model_name=model) as second:
            found = await second.retrieve(stream.tokens, stream.cache_salt)
        assert found is not None
        assert torch.equal(found, -kv[:, :, : 6 * CHUNK])
        await ctx.close()
