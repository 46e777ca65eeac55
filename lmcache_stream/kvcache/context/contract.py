"""The contract of a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.transfer import TransferExecutor

__all__ = ["AsyncKVCacheContext", "StoreOutcome"]


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    """What became of the whole chunks given to a store.

    Args:
        chunks: Whole chunks given.
        taken: Written by this store.
        same: Already there under these ids and this salt, with the very same bytes.
        kept: Already there with other bytes, which the cache kept.
        missing: Not there now: no room.
    """

    chunks: int
    taken: int = 0
    same: int = 0
    kept: int = 0
    missing: int = 0

    @property
    def complete(self) -> bool:
        """Whether the cache holds exactly the given bytes for every chunk."""
        return self.taken + self.same == self.chunks


class AsyncKVCacheContext(ABC):
    """A connection to a KV cache, addressed by token ids.

    A cache keeps KV in chunks of `chunk_size` tokens. A chunk's identity is the chain of the ids of all chunks up to
    it, the model name and the `cache_salt`. Every coroutine but `close` takes `timeout` in seconds, None for the
    context's own, and raises `CacheError` when the cache fails, `UsageError` for input that cannot be right.
    """

    model_name: str
    timeout: float

    @property
    @abstractmethod
    def chunk_size(self) -> int:
        """Tokens a chunk."""

    @property
    @abstractmethod
    def geometry(self) -> KVGeometry | None:
        """Shape of the KV, as far as it is known; None when nothing is."""

    @property
    @abstractmethod
    def executor(self) -> TransferExecutor:
        """Where copies of this cache's KV run."""

    @abstractmethod
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
            GeometryError: How the chunks are to be read is not known, or they contradict what is known.
            CacheTimeout: The cache did not answer in time.
            CacheError: The cache failed in another way.
        """

    @abstractmethod
    async def put(
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

    @abstractmethod
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
            CacheTimeout: The cache did not answer in time, which is no miss.
            CacheError: The cache failed in another way, which is no miss either.
        """

    @abstractmethod
    async def wait_for(
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

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything held: sockets, shared memory, the registration. A second close does nothing."""

    async def store(
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
        return (await self.put(kv, tokens, cache_salt, kind=kind, timeout=timeout)).complete

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
