from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache
from tests.engines import GEOMETRY, MODEL


@pytest.fixture
def cache() -> Iterator[EmbeddedCache]:
    opened = EmbeddedCache.open(f"memory://{uuid.uuid4().hex}?chunk_size=4")
    opened.register_model(MODEL, GEOMETRY)
    yield opened
    opened.unregister_model(MODEL)
    opened.close()


@pytest.fixture
async def ctx(cache: EmbeddedCache) -> AsyncIterator[AsyncKVCacheContext]:
    async with aconnect(f"memory://{cache.name}") as opened:
        yield opened
