from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_stream.kvcache.memory import EmbeddedCache, open_context

from .embedded import GEOMETRY, opened


@pytest.fixture
def cache() -> Iterator[EmbeddedCache]:
    with opened("memory://test?chunk_size=4") as cache:
        yield cache


@pytest.fixture
async def ctx(cache: EmbeddedCache) -> Any:
    async with await open_context("memory://test", model_name="m", geometry=GEOMETRY) as ctx:
        yield ctx
