"""One request over several passes: prefill, modify its KV, decode.

`AsyncLMCacheStream` holds the logic; `LMCacheStream` is its synchronous face.
"""

from __future__ import annotations

from lmcache_stream.errors import LMCacheStreamError
from lmcache_stream.metrics import StreamPerfMetrics
from lmcache_stream.stream.asynchronous import AsyncLMCacheStream
from lmcache_stream.stream.edits import ModifyFn
from lmcache_stream.stream.state import ModifyReceipt
from lmcache_stream.stream.synchronous import LMCacheStream, create_request, generate, get, update
from lmcache_stream.types import PostCompletion, TokenEvent

__all__ = [
    "AsyncLMCacheStream",
    "LMCacheStream",
    "LMCacheStreamError",
    "ModifyFn",
    "ModifyReceipt",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
    "generate",
    "get",
    "update",
]
