"""A KV cache for code without `await`: the synchronous face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_stream import portal
from lmcache_stream.kvcache.context.contract import AsyncKVCacheContext, StoreOutcome
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.transfer import TransferExecutor

__all__ = ["KVCacheContext"]


class KVCacheContext:
    """The synchronous face of an `AsyncKVCacheContext`, usable from any thread; what `connect` returns.

    Every call blocks its thread until the async one ends; Ctrl-C cancels that one and waits for its clean-up.

    Args:
        async_context: The context that does the work, opened on the background loop.
    """

    def __init__(self, async_context: AsyncKVCacheContext) -> None:
        if not isinstance(async_context, AsyncKVCacheContext):
            raise TypeError(f"KVCacheContext wraps an AsyncKVCacheContext, not {type(async_context).__name__}")
        self._async_context = async_context

    @property
    def async_context(self) -> AsyncKVCacheContext:
        """The context that does the work. It belongs to the background loop."""
        return self._async_context

    @property
    def model_name(self) -> str:
        """Name of the model whose KV this is."""
        return self._async_context.model_name

    @property
    def timeout(self) -> float:
        """Seconds that a call takes at most unless it says otherwise."""
        return self._async_context.timeout

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._async_context.chunk_size

    @property
    def geometry(self) -> KVGeometry | None:
        """Shape of the KV, as far as it is known; None when nothing is."""
        return self._async_context.geometry

    @property
    def executor(self) -> TransferExecutor:
        """Where copies of this cache's KV run."""
        return self._async_context.executor

    def retrieve(
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
            GeometryError: How the chunks are to be read is not known, or they contradict what is known.
            CacheTimeout: The cache did not answer in time.
            CacheError: The cache failed in another way.
        """
        return portal.run(self._async_context.retrieve, tokens, cache_salt, kind=kind, timeout=timeout)

    def put(
        self,
        kv: torch.Tensor,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> StoreOutcome:
        """Store `kv` `[2, L, T, D]` for `T` tokens, both cut to whole chunks, and say what became of each chunk.

        Raises:
            UsageError, GeometryError, CacheTimeout, CacheError: As `store`.
        """
        return portal.run(self._async_context.put, kv, tokens, cache_salt, kind=kind, timeout=timeout)

    def store(
        self,
        kv: torch.Tensor,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> bool:
        """Store `kv` `[2, L, T, D]` for `T` tokens, both cut to whole chunks.

        Returns:
            True when the cache now holds exactly these bytes for every whole chunk. False when it had no room, or kept
            other bytes that it already had for these ids under this salt; `put` tells which.

        Raises:
            UsageError: The input cannot be right, or the context is closed. Nothing was stored.
            GeometryError: The shape of what the cache holds is not known for sure. Nothing was stored.
            CacheTimeout: The cache did not answer in time.
            CacheError: The cache failed in another way.
        """
        return portal.run(self._async_context.store, kv, tokens, cache_salt, kind=kind, timeout=timeout)

    def lookup(
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
            CacheTimeout: The cache did not answer in time, which is no miss.
            CacheError: The cache failed in another way, which is no miss either.
        """
        return portal.run(self._async_context.lookup, tokens, cache_salt, kind=kind, timeout=timeout)

    def wait_for(
        self,
        tokens: Sequence[int],
        *,
        timeout: float,
        poll_interval: float = 0.2,
        cache_salt: str = "",
        kind: CacheKind = CacheKind.KV,
    ) -> int:
        """Wait until every whole chunk of `tokens` is cached, at most `timeout` seconds.

        Args:
            tokens: The ids.
            timeout: Seconds to wait at most.
            poll_interval: Seconds above 0 between two looks, where the cache has to be asked.
            cache_salt: The salt that the chunks are kept under.
            kind: What they hold.

        Returns:
            The tokens covered in the end: less than the whole chunks of `tokens` when time ran out.

        Raises:
            UsageError: The input cannot be right, or the context is closed.
            CacheError: The cache failed.
        """
        return portal.run(
            self._async_context.wait_for,
            tokens,
            timeout=timeout,
            poll_interval=poll_interval,
            cache_salt=cache_salt,
            kind=kind,
        )

    def close(self) -> None:
        """Let go of everything held: sockets, shared memory, the registration. A second close does nothing."""
        portal.run(self._async_context.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
