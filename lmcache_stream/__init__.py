"""Take a request's KV cache out between prefill and decode, edit it, put it back, and go on decoding.

A name is imported when it is first used, since torch takes a second or two.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_stream.batch import AsyncBatchedStream, LMCacheBatchedStream
    from lmcache_stream.completions import CompletionsClient
    from lmcache_stream.editors import Edit, EditInput, Editor
    from lmcache_stream.errors import (
        CacheConnectionError,
        CacheError,
        CacheProtocolError,
        CacheTimeout,
        CoverageTimeout,
        EditNotUsed,
        EngineConnectionError,
        EngineError,
        EngineResponseError,
        EngineStreamError,
        GeometryError,
        LMCacheBatchedStreamError,
        LMCacheError,
        LMCacheStreamError,
        StoreError,
        StreamTimeout,
        UsageError,
    )
    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.kvcache import AsyncKVCacheContext, KVCacheContext, StoreOutcome, aconnect, connect
    from lmcache_stream.metrics import Metrics, StreamPerfMetrics
    from lmcache_stream.progress import PhaseProgress
    from lmcache_stream.rotary import Rotary
    from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream, ModifyReceipt, create_request
    from lmcache_stream.transfer import TransferExecutor
    from lmcache_stream.types import AsyncPostCompletion, CacheKind, Completion, PostCompletion, TokenEvent, Usage

__all__ = [
    "AsyncBatchedStream",
    "AsyncKVCacheContext",
    "AsyncLMCacheStream",
    "AsyncPostCompletion",
    "CacheConnectionError",
    "CacheError",
    "CacheKind",
    "CacheProtocolError",
    "CacheTimeout",
    "Completion",
    "CompletionsClient",
    "CoverageTimeout",
    "Edit",
    "EditInput",
    "EditNotUsed",
    "Editor",
    "EngineConnectionError",
    "EngineError",
    "EngineResponseError",
    "EngineStreamError",
    "GeometryError",
    "KVCacheContext",
    "KVGeometry",
    "LMCacheBatchedStream",
    "LMCacheBatchedStreamError",
    "LMCacheError",
    "LMCacheStream",
    "LMCacheStreamError",
    "Metrics",
    "ModifyReceipt",
    "PhaseProgress",
    "PostCompletion",
    "Rotary",
    "StoreError",
    "StoreOutcome",
    "StreamPerfMetrics",
    "StreamTimeout",
    "TokenEvent",
    "TransferExecutor",
    "Usage",
    "UsageError",
    "aconnect",
    "connect",
    "create_request",
]
__version__ = "0.1.0"

_ROOMS = (
    "errors",
    "types",
    "metrics",
    "progress",
    "completions",
    "geometry",
    "rotary",
    "transfer",
    "editors",
    "kvcache",
    "stream",
    "batch",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in _ROOMS:
            module = importlib.import_module(f"{__name__}.{room}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
