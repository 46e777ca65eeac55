"""Which backend serves which URL scheme."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, cast

from lmcache_stream.addresses import check_address, is_line, shown
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.context.checks import check_timeout

if TYPE_CHECKING:
    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.kvcache.context.contract import AsyncKVCacheContext
    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = ["BACKENDS", "DEFAULT_URL", "OpenContext", "open_context"]

DEFAULT_URL = "memory://default"

BACKENDS = {
    "memory": "lmcache_stream.kvcache.memory:open_context",
    "tcp": "lmcache_stream.kvcache.mp.connect:open_context",
    "ipc": "lmcache_stream.kvcache.mp.connect:open_context",
    "grpc": "lmcache_stream.kvcache.mp.connect:open_context",
    "grpc+unix": "lmcache_stream.kvcache.mp.connect:open_context",
}
"""URL scheme -> "module:function" of its `OpenContext`, imported at first use."""

_imported: set[str] = set()


class OpenContext(Protocol):
    """Opens a context on one backend."""

    async def __call__(
        self,
        url: str,
        *,
        http_url: str | None,
        model_name: str | None,
        timeout: float,
        geometry: KVGeometry | None,
        probe: PostCompletion | AsyncPostCompletion | None,
    ) -> AsyncKVCacheContext: ...


async def open_context(
    url: str | EllipsisType | None,
    http_url: str | EllipsisType | None,
    model_name: str | None,
    timeout: float,
    *,
    geometry: KVGeometry | None,
    probe: PostCompletion | AsyncPostCompletion | None,
) -> AsyncKVCacheContext:
    """Open a context on the backend that serves the URL's scheme; the arguments are those of `connect`."""
    if url is None or url is ...:
        url = os.environ.get("LMCACHE_STREAM_KV_URL") or DEFAULT_URL
        http_url = ... if http_url is None else http_url
    if http_url is ...:
        http_url = os.environ.get("LMCACHE_STREAM_KV_HTTP_URL") or None
    if not isinstance(url, str):
        raise UsageError(f"url must be a string such as {DEFAULT_URL!r}, not {url!r}")
    if model_name is not None and not is_line(model_name):
        raise UsageError(f"model_name must be the name of the model in the cache, or None, not {model_name!r}")
    if probe is not None and not callable(probe):
        raise UsageError(f"probe must be an engine, such as CompletionsClient(base_url), not {type(probe).__name__}")
    if isinstance(geometry, str | os.PathLike | Mapping):
        raise UsageError("geometry takes a KVGeometry: KVGeometry.from_config('config.json'), or from_config(mapping)")
    check_address(url, "url")
    seconds = check_timeout(timeout)
    opener = await _opener(url)
    return await opener(url, http_url=http_url, model_name=model_name, timeout=seconds, geometry=geometry, probe=probe)


async def _opener(url: str) -> OpenContext:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in BACKENDS:
        known = ", ".join(f"{name}://" for name in BACKENDS)
        raise UsageError(f"no cache backend serves {shown(url)!r}: begin the url with one of {known}")
    module, _, function = BACKENDS[scheme].partition(":")
    if module not in _imported:  # sys.modules has it before it is whole
        await asyncio.to_thread(importlib.import_module, module)  # torch takes a second or two
        _imported.add(module)
    return cast("OpenContext", getattr(sys.modules[module], function))
