"""KV in and out of a cache, addressed by token ids.

`connect` gives a synchronous context, `aconnect` an async one. The URL's scheme names the backend: `memory://NAME` is
the embedded cache of this process, `tcp://`, `ipc://`, `grpc://` and `grpc+unix://` a running LMCache MP server.
"""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING

from lmcache_stream import portal
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import AsyncKVCacheContext, KVCacheContext, StoreOutcome, open_context
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from types import TracebackType

    import torch

    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = [
    "AsyncKVCacheContext",
    "CacheKind",
    "KVCacheContext",
    "KVGeometry",
    "StoreOutcome",
    "aconnect",
    "close",
    "connect",
    "retrieve",
    "store",
]


def connect(
    url: str | EllipsisType | None,
    http_url: str | EllipsisType | None = None,
    model_name: str | None = None,
    timeout: float = 60.0,
    *,
    geometry: KVGeometry | None = None,
    probe: PostCompletion | AsyncPostCompletion | None = None,
) -> KVCacheContext:
    """Connect to a cache, learn its chunk size and the shape of its KV, and register.

    Args:
        url: Where the cache is: `memory://NAME?chunk_size=32&max_bytes=2GiB` for the embedded one of this process, or
            the request endpoint of an LMCache MP server, such as `tcp://localhost:5555`. None or `...`: what
            `LMCACHE_STREAM_KV_URL` says in the environment, or else `memory://default`.
        http_url: The same server's HTTP API, such as `http://localhost:8080`; `memory://` needs none. `...`, or None
            where `url` comes from the environment: what `LMCACHE_STREAM_KV_HTTP_URL` says there, if anything.
        model_name: The model's name in the cache: on an LMCache server vLLM's `--model`, not its
            `--served-model-name`; on `memory://` the name that the embedded engine serves. None: the only one there.
        timeout: Seconds that connecting, and later each call, takes at most unless the call says otherwise.
        geometry: Shape of the KV, where it cannot be learnt from the cache, or to be checked against it.
        probe: An engine to prove the reading of the KV with, by one request of one token; `memory://` needs none.

    Raises:
        UsageError: The arguments cannot be right, or no engine in this process serves the model from `memory://`.
        CacheError: The cache cannot be reached, or the shape of its KV cannot be learnt.
    """
    return KVCacheContext(portal.run(open_context, url, http_url, model_name, timeout, geometry=geometry, probe=probe))


def aconnect(
    url: str | EllipsisType | None,
    http_url: str | EllipsisType | None = None,
    model_name: str | None = None,
    timeout: float = 60.0,
    *,
    geometry: KVGeometry | None = None,
    probe: PostCompletion | AsyncPostCompletion | None = None,
) -> Connecting:
    """Connect to a cache from async code: `ctx = await aconnect(...)`, or `async with aconnect(...) as ctx`.

    The arguments and errors are those of `connect`.
    """
    return Connecting(lambda: open_context(url, http_url, model_name, timeout, geometry=geometry, probe=probe))


class Connecting:
    """A connection to be made: awaited, it gives the context; entered, it also closes it on the way out."""

    def __init__(self, open_: Callable[[], Awaitable[AsyncKVCacheContext]]) -> None:
        self._open = open_
        self._context: AsyncKVCacheContext | None = None

    def __await__(self) -> Generator[object, None, AsyncKVCacheContext]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncKVCacheContext:
        self._context = await self._open()
        return self._context

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._context is not None:
            await self._context.close()


def retrieve(ctx: KVCacheContext, tokens: Sequence[int], cache_salt: str = "") -> torch.Tensor | None:
    """Fetch the longest cached prefix of `tokens` in whole chunks.

    Returns:
        A private, contiguous copy on the CPU, `[2, L, hit_tokens, D]` (`[1, L, hit_tokens, D]` for MLA); None for less
        than a chunk of tokens or nothing cached.

    Raises:
        TypeError: `ctx` is no synchronous context.
        UsageError, CacheError: As `KVCacheContext.retrieve`.
    """
    return _sync(ctx, "retrieve").retrieve(tokens, cache_salt)


def store(ctx: KVCacheContext, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str = "") -> bool:
    """Store `kv` `[2, L, T, D]` for `T` tokens, both cut to whole chunks.

    Returns:
        True when the cache now holds exactly these bytes for every whole chunk; False when it had no room, or kept
        other bytes that it already had for these ids under this salt.

    Raises:
        TypeError: `ctx` is no synchronous context.
        UsageError, CacheError: As `KVCacheContext.store`.
    """
    return _sync(ctx, "store").store(kv, tokens, cache_salt)


def close(ctx: KVCacheContext) -> None:
    """Let go of everything that `ctx` holds. A second close does nothing.

    Raises:
        TypeError: `ctx` is no synchronous context.
    """
    _sync(ctx, "close").close()


def _sync(ctx: object, name: str) -> KVCacheContext:
    if isinstance(ctx, AsyncKVCacheContext):
        raise TypeError(f"{name}() takes the context of connect(); with an async one, await ctx.{name}(...)")
    if not isinstance(ctx, KVCacheContext):
        raise TypeError(f"{name}() takes the context of connect(), not {type(ctx).__name__}")
    return ctx
