"""The embedded cache: KV in this process's memory, and a context on it."""

from __future__ import annotations

from lmcache_stream.kvcache.memory.cache import EmbeddedCache
from lmcache_stream.kvcache.memory.context import MemoryKVCacheContext, open_context

__all__ = ["EmbeddedCache", "MemoryKVCacheContext", "open_context"]
