"""The contract of a KV cache, its synchronous face, and which backend serves which URL scheme."""

from __future__ import annotations

from lmcache_stream.kvcache.context.backends import BACKENDS, DEFAULT_URL, OpenContext, open_context
from lmcache_stream.kvcache.context.checks import (
    MAX_CACHE_SALT,
    check_cache_salt,
    check_kv,
    check_poll_interval,
    check_timeout,
    check_tokens,
    whole_chunks,
)
from lmcache_stream.kvcache.context.contract import AsyncKVCacheContext, StoreOutcome
from lmcache_stream.kvcache.context.synchronous import KVCacheContext

__all__ = [
    "BACKENDS",
    "DEFAULT_URL",
    "MAX_CACHE_SALT",
    "AsyncKVCacheContext",
    "KVCacheContext",
    "OpenContext",
    "StoreOutcome",
    "check_cache_salt",
    "check_kv",
    "check_poll_interval",
    "check_timeout",
    "check_tokens",
    "open_context",
    "whole_chunks",
]
