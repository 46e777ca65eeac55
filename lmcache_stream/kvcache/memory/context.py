"""A context on the embedded cache."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.errors import CacheTimeout, UsageError
from lmcache_stream.kvcache.buffers import BufferPool
from lmcache_stream.kvcache.context import (
    AsyncKVCacheContext,
    StoreOutcome,
    check_kv,
    check_poll_interval,
    check_timeout,
    check_tokens,
)
from lmcache_stream.kvcache.memory.cache import EmbeddedCache, difference, hashing
from lmcache_stream.kvcache.memory.url import DEFAULT_NAME
from lmcache_stream.transfer import TransferExecutor, default_executor
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Self

    import torch

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = ["MemoryKVCacheContext", "open_context"]

T = TypeVar("T")

_IDLE_BYTES = 256 << 20


class MemoryKVCacheContext(AsyncKVCacheContext):
    """A context on the embedded cache. It may be used from any event loop.

    Args:
        cache: An open cache; the context takes over the caller's reference and gives it back when closed.
        model_name: Whose KV it is.
        geometry: Shape of that KV.
        timeout: Seconds that a call takes at most unless it says otherwise.
        executor: Where copies run; None for the process's own.
    """

    def __init__(
        self,
        cache: EmbeddedCache,
        model_name: str,
        geometry: KVGeometry,
        *,
        timeout: float = 60.0,
        executor: TransferExecutor | None = None,
    ) -> None:
        self.model_name = model_name
        self.timeout: float = check_timeout(timeout)
        self._cache = cache
        self._geometry = cache.fitted(geometry)
        self._executor = executor or default_executor()
        self._buffers = BufferPool(_IDLE_BYTES)
        self._closed = False

    @property
    def cache(self) -> EmbeddedCache:
        """The cache itself."""
        return self._cache

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._cache.chunk_size

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the KV."""
        return self._geometry

    @property
    def executor(self) -> TransferExecutor:
        """Where copies of this cache's KV run; edits of it may run there too."""
        return self._executor

    async def retrieve(
        self,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> torch.Tensor | None:
        """Fetch the longest cached prefix of `tokens` in whole chunks.

        Returns:
            A private, contiguous copy on the CPU: `[2, L, hit_tokens, D]` (keys, then values), `[1, L, hit_tokens, D]`
            for MLA and `[1, L, hit_tokens, Dq]` for queries; None for less than a chunk of tokens or nothing cached.

        Raises:
            UsageError: The input cannot be right, or the context is closed.
            CacheTimeout: The copy did not begin and end in time.
        """
        self._check_open()
        return await self._run(timeout, self._executor.run, self._retrieve, tokens, cache_salt, kind)

    async def put(
        self,
        kv: torch.Tensor,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> StoreOutcome:
        """Store a copy of `kv` `[2, L, T, D]` for `T` tokens, both cut to whole chunks.

        Returns:
            What became of each chunk.

        Raises:
            UsageError: The input cannot be right, or the context is closed.
            CacheTimeout: The copy did not begin and end in time.
        """
        self._check_open()
        return await self._run(timeout, self._executor.run, self._put, kv, tokens, cache_salt, kind)

    async def lookup(
        self,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> int:
        """Count the tokens of the longest cached prefix of `tokens` in whole chunks, without fetching it.

        Raises:
            UsageError: The input cannot be right, or the context is closed.
            CacheTimeout: The look did not begin and end in time.
        """
        self._check_open()
        return await self._run(timeout, hashing, tokens, self._cache.covered, self.model_name, tokens, cache_salt, kind)

    async def wait_for(
        self,
        tokens: Sequence[int],
        *,
        timeout: float,
        poll_interval: float = 0.2,
        cache_salt: str = "",
        kind: CacheKind = CacheKind.KV,
    ) -> int:
        """Wait until every whole chunk of `tokens` is cached, at most `timeout` seconds; `poll_interval` is not needed.

        Returns:
            The tokens covered in the end: less than the whole chunks of `tokens` when time ran out.

        Raises:
            UsageError: The input cannot be right, or the context is closed.
        """
        self._check_open()
        check_poll_interval(poll_interval)
        return await self._cache.wait_covered(
            self.model_name, tokens, cache_salt, kind=kind, timeout=check_timeout(timeout)
        )

    async def close(self) -> None:
        """Let go of the cache. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self._cache.close()
            self._buffers.clear()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the context is closed: connect again")

    def _retrieve(self, tokens: Sequence[int], cache_salt: str, kind: CacheKind) -> torch.Tensor | None:
        chunks = self._cache.longest_prefix(self.model_name, tokens, cache_salt, kind)
        return self._joined(chunks) if chunks else None

    def _joined(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        planes, layers, size, width = chunks[0].shape
        whole = self._buffers.empty((planes, layers, size * len(chunks), width), chunks[0].dtype)
        for i, chunk in enumerate(chunks):
            whole.narrow(2, i * size, size).copy_(chunk)
        return whole

    def _put(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str, kind: CacheKind) -> StoreOutcome:
        ids = check_tokens(tokens)
        check_kv(kv, ids, self._geometry, kind)
        size = self.chunk_size
        chunks = [kv.narrow(2, start, size) for start in range(0, len(ids) - size + 1, size)]
        return self._cache.put(self.model_name, tokens, chunks, cache_salt, kind, whole=True)

    async def _run(self, timeout: float | None, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        try:
            async with asyncio.timeout(seconds):
                return await fn(*args)
        except TimeoutError as error:
            raise CacheTimeout(f"memory://{self._cache.name} did not finish within {seconds:g} s") from error


async def open_context(
    url: str,
    *,
    http_url: str | None = None,
    model_name: str | None = None,
    timeout: float = 60.0,
    geometry: KVGeometry | None = None,
    probe: PostCompletion | AsyncPostCompletion | None = None,
) -> MemoryKVCacheContext:
    """Open a context on `memory://NAME`. The geometry is the engine's own, so `http_url` and `probe` are not needed.

    Raises:
        UsageError: No engine of this process serves the model with this cache and no geometry is given, or the
            arguments contradict the cache.
    """
    cache = EmbeddedCache.open(url)
    try:
        name, shape = _served(cache, model_name, geometry)
        return MemoryKVCacheContext(cache, name, shape, timeout=timeout)
    except BaseException:
        cache.close()
        raise


def _served(cache: EmbeddedCache, model_name: str | None, geometry: KVGeometry | None) -> tuple[str, KVGeometry]:
    models = cache.models()
    names = ", ".join(sorted(models))
    if model_name is None:
        if len(models) > 1:
            raise UsageError(f"memory://{cache.name} serves several models: pass model_name, one of {names}")
        model_name = next(iter(models), DEFAULT_NAME)
    served = models.get(model_name)
    if served is None and geometry is None:
        if models:
            raise UsageError(f"no engine serves {model_name!r} with memory://{cache.name}: pass one of {names}")
        raise UsageError(
            f"no engine in this process serves memory://{cache.name}: start an EmbeddedEngine with "
            f'cache="memory://{cache.name}" in this process first, or pass geometry=KVGeometry(...)'
        )
    if served is None or geometry is None:
        shape = served or geometry
        assert shape is not None
        return model_name, shape
    if found := difference(served, geometry):
        raise UsageError(
            f"the given geometry is not the one of the engine that serves {model_name!r} ({found}): leave it out"
        )
    cache.fitted(geometry)
    return model_name, dataclasses.replace(geometry, **_known(served))


def _known(geometry: KVGeometry) -> dict[str, Any]:
    fields = {field.name: getattr(geometry, field.name) for field in dataclasses.fields(geometry)}
    return {name: value for name, value in fields.items() if value is not None}
