"""The contract of a KV cache, its synchronous face, and which backend serves which URL scheme."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from lmcache_stream import portal
from lmcache_stream.addresses import check_address, is_line, shown
from lmcache_stream.errors import UsageError
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    import numpy.typing as npt
    import torch

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.transfer import TransferExecutor
    from lmcache_stream.types import AsyncPostCompletion

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
    it, the model name and the `cache_salt`. Every coroutine takes `timeout` in seconds, None for the context's own,
    and raises `CacheError` when the cache fails, `UsageError` for input that cannot be right.
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
        """Where copies of this cache's KV run; edits of it may run there too."""

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
        """Store `kv` `[2, L, T, D]` for `T` tokens, both cut to whole chunks, and say what became of each chunk."""

    @abstractmethod
    async def lookup(
        self,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> int:
        """Count the tokens of the longest cached prefix of `tokens` in whole chunks, without fetching it."""

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

        Returns:
            The tokens covered in the end: less than the whole chunks of `tokens` when time ran out.
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
        """
        return (await self.put(kv, tokens, cache_salt, kind=kind, timeout=timeout)).complete

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


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
        probe: AsyncPostCompletion | None,
    ) -> AsyncKVCacheContext: ...


async def open_context(
    url: str | EllipsisType | None,
    http_url: str | EllipsisType | None,
    model_name: str | None,
    timeout: float,
    *,
    geometry: KVGeometry | None,
    probe: AsyncPostCompletion | None,
) -> AsyncKVCacheContext:
    """Open a context on the backend that serves the URL's scheme; the arguments are those of `connect`."""
    if url is None or url is ...:
        url = os.environ.get("LMCACHE_STREAM_URL") or DEFAULT_URL
    if http_url is ...:
        http_url = os.environ.get("LMCACHE_STREAM_HTTP_URL") or None
    if not isinstance(url, str):
        raise UsageError(f"url must be a string such as {DEFAULT_URL!r}, not {url!r}")
    if model_name is not None and not is_line(model_name):
        raise UsageError(f"model_name must be the name that the engine serves, or None, not {model_name!r}")
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
        """Store `kv` `[2, L, T, D]` for `T` tokens, both cut to whole chunks, and say what became of each chunk."""
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
        """Count the tokens of the longest cached prefix of `tokens` in whole chunks, without fetching it."""
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

        Returns:
            The tokens covered in the end: less than the whole chunks of `tokens` when time ran out.
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


MAX_CACHE_SALT = 128


def check_cache_salt(cache_salt: str) -> str:
    """Return `cache_salt` if a cache can use it: at most 128 characters, none of `@`, `/`, `\\` and NUL.

    Raises:
        UsageError: It cannot.
    """
    if not isinstance(cache_salt, str):
        raise UsageError(f"cache_salt must be a string, not {type(cache_salt).__name__}")
    if len(cache_salt) > MAX_CACHE_SALT:
        raise UsageError(f"cache_salt must have at most {MAX_CACHE_SALT} characters, not {len(cache_salt)}")
    if bad := [c for c in cache_salt if c in "@/\\\0" or "\ud800" <= c <= "\udfff"]:
        raise UsageError(
            f"cache_salt must not contain {bad[0]!r}: use none of '@', '/', '\\\\', NUL and lone surrogates"
        )
    return cache_salt


def check_tokens(tokens: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return token ids as one int64 array `[T]`.

    Raises:
        UsageError: Not a flat sequence of integers of at least 0.
    """
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty((0, 0))
    if ids.ndim == 1 and not ids.size:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError("tokens must be a flat sequence of integer token ids, such as [1, 2, 3]")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int64).max:
        raise UsageError(f"token ids must be at least 0 and fit 64 bits, not {ids.min()} to {ids.max()}")
    return ids.astype(np.int64, copy=False)


def check_timeout(timeout: float) -> float:
    """Return `timeout` if it is a number of seconds of at least 0.

    Raises:
        UsageError: It is not.
    """
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0:
        raise UsageError(f"timeout must be a number of seconds of at least 0, not {timeout!r}")
    return seconds


def check_kv(
    kv: torch.Tensor, tokens: npt.NDArray[np.int64], geometry: KVGeometry | None, kind: CacheKind = CacheKind.KV
) -> None:
    """Check `kv` `[P, L, T, D]` against its `T` tokens and the geometry, as far as that is known.

    Raises:
        UsageError: The shape or the dtype is not what it must be; the message names both.
    """
    if not hasattr(kv, "layout"):
        raise UsageError(f"kv must be a torch.Tensor, not {type(kv).__name__}")
    if str(kv.layout) != "torch.strided" or kv.is_meta:
        raise UsageError(f"kv must be a dense tensor with values, not {kv.layout} on {kv.device.type}")
    if not kv.dtype.is_floating_point and kv.element_size() != 1:
        raise UsageError(f"{kind.value} must be of floating point (or the bytes of an 8-bit format), not {kv.dtype}")
    shape = kv.shape
    if kind is CacheKind.QUERY:
        expected: list[int | str] = [1, "L", len(tokens), "Dq"]
    else:
        expected = ["2 or 1", "L", len(tokens), "D"]
    if geometry is not None:
        expected[1] = geometry.num_layers
        if kind is CacheKind.KV:
            expected[0], expected[3] = geometry.planes, geometry.hidden_dim
        elif geometry.num_heads is not None and geometry.planes == 2:
            expected[3] = geometry.num_heads * geometry.head_dim
    fits = len(shape) == 4 and all(
        size == want if isinstance(want, int) else size > 0 for size, want in zip(shape, expected, strict=True)
    )
    if not fits or shape[0] not in (1, 2):
        raise UsageError(
            f"{kind.value} of {len(tokens)} tokens must have the shape [{', '.join(map(str, expected))}], "
            f"not {list(shape)}"
        )
    dtype = geometry.dtype if geometry is not None and kind is CacheKind.KV else None
    if dtype is not None and kv.dtype != dtype:
        raise UsageError(f"{kind.value} must have the dtype {dtype}, not {kv.dtype}: convert it first")
