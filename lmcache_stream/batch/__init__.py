"""Many streams, one phase at a time: prefill, modify, decode.

`AsyncBatchedStream` holds the logic; `LMCacheBatchedStream` is its synchronous face.
"""

from __future__ import annotations

from lmcache_stream.batch.asynchronous import AsyncBatchedStream
from lmcache_stream.batch.synchronous import LMCacheBatchedStream
from lmcache_stream.errors import LMCacheBatchedStreamError

__all__ = ["AsyncBatchedStream", "LMCacheBatchedStream", "LMCacheBatchedStreamError"]
