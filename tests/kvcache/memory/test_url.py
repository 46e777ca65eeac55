from __future__ import annotations

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.memory import EmbeddedCache

from .embedded import opened


@pytest.mark.parametrize(
    ("url", "name", "chunk_size", "max_bytes"),
    [
        ("memory://", "default", 32, 2 << 30),
        ("memory://a-b.c", "a-b.c", 32, 2 << 30),
        ("memory://x?chunk_size=16", "x", 16, 2 << 30),
        ("memory://x?max_bytes=12345", "x", 32, 12345),
        ("memory://x?max_bytes=3MiB&chunk_size=8", "x", 8, 3 << 20),
        ("memory://x?max_bytes=3mb", "x", 32, 3_000_000),
        ("memory://x?max_bytes=1TiB", "x", 32, 1 << 40),
    ],
)
def test_a_url_names_a_cache(url: str, name: str, chunk_size: int, max_bytes: int) -> None:
    with opened(url) as cache:
        assert (cache.name, cache.chunk_size, cache.max_bytes) == (name, chunk_size, max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        "memory:x",
        "tcp://x",
        "memory://x/y",
        "memory://x#y",
        "memory://x?chunk_size=0",
        "memory://x?chunk_size=-1",
        "memory://x?chunk_size=2.5",
        "memory://x?chunk_size=",
        "memory://x?max_bytes=2Gigs",
        "memory://x?max_bytes=0",
        "memory://x?size=3",
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        EmbeddedCache.open(url)
    assert not EmbeddedCache._by_name
