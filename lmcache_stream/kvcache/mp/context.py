"""Retrieve and store on a running LMCache MP server.

::

    retrieve   lookup -> wait_prefetch_status -> prepare_retrieve -> copy out -> commit_retrieve -> end_session
    store      prepare_store -> copy in -> commit_store -> end_session; a lookup tells what became of the chunks that
               the server offered no slot for
"""

from __future__ import annotations

import asyncio
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.kvcache.buffers import BufferPool
from lmcache_stream.kvcache.context import (
    AsyncKVCacheContext,
    StoreOutcome,
    check_cache_salt,
    check_kv,
    check_poll_interval,
    check_timeout,
    check_tokens,
    whole_chunks,
)
from lmcache_stream.kvcache.mp.chunk_format import ChunkFormat
from lmcache_stream.kvcache.mp.discovery import fetch_status
from lmcache_stream.kvcache.mp.errand import Errand
from lmcache_stream.kvcache.mp.fetch import Fetcher
from lmcache_stream.kvcache.mp.lifetime import Lifetime
from lmcache_stream.kvcache.mp.lookup import Sessions
from lmcache_stream.kvcache.mp.prefix import Prefix, name_of_chunks
from lmcache_stream.kvcache.mp.probe import ProbeResult, probe
from lmcache_stream.kvcache.mp.registry import Registry
from lmcache_stream.kvcache.mp.served import Served
from lmcache_stream.kvcache.mp.store import Source, Storer
from lmcache_stream.kvcache.mp.turns import Turns
from lmcache_stream.transfer import TransferExecutor, default_executor
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from torch import Tensor

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.kvcache.mp.codec import Codec
    from lmcache_stream.kvcache.mp.status import ServerFacts
    from lmcache_stream.kvcache.mp.transport import Transport
    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = ["MPKVCacheContext"]

T = TypeVar("T")

LOOKUP_TIMEOUT = 1.0
"""Seconds that the last lookup of a wait has, whatever is left of its time."""


class MPKVCacheContext(AsyncKVCacheContext):
    """A connection to an LMCache MP server; `open_context` makes one. It belongs to the event loop that made it.

    Attributes:
        facts: What the server said about itself and the model.
    """

    def __init__(
        self,
        transport: Transport,
        facts: ServerFacts,
        *,
        timeout: float = 60.0,
        geometry: KVGeometry | None = None,
        explicit: bool = False,
        executor: TransferExecutor | None = None,
        populate: bool = False,
    ) -> None:
        self.model_name: str = facts.model.model_name
        self.timeout = timeout
        self.facts = facts
        self._executor = executor or default_executor()
        buffers = BufferPool()
        self._transport = transport
        self._format = ChunkFormat(facts, geometry, explicit=explicit)
        self._registry = Registry(transport, partial(fetch_status, facts.http_url), populate=populate)
        self._lifetime = Lifetime(self._registry, transport, buffers)
        self._turns = Turns(self._lifetime, at_once=max(4, 2 * self._executor.lanes), chunk_size=facts.chunk_size)
        self._served = Served(self._registry, facts.http_url, facts.model.world_size)
        self._sessions = Sessions(transport, self._registry, self._served, facts)
        self._fetcher = Fetcher(self._registry, self._sessions, self._format, self._executor, buffers, facts)
        self._storer = Storer(
            self._registry,
            self._sessions,
            self._served,
            self._turns,
            self._fetcher,
            self._format,
            self._executor,
            facts,
        )
        self._warned = False

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self.facts.chunk_size

    @property
    def geometry(self) -> KVGeometry | None:
        """Shape of the KV, as far as it is known; None when nothing is."""
        return self._format.geometry

    @property
    def executor(self) -> TransferExecutor:
        """Where copies run; edits may run there too."""
        return self._executor

    @property
    def codec(self) -> Codec | None:
        """How stored chunks are read; None while that is open."""
        return self._format.codec

    def adopt(self, codec: Codec, geometry: KVGeometry) -> None:
        """Read chunks with `codec` from now on, since chunks of the cache have proven it."""
        self._format.adopt(codec, geometry)

    async def probe(self, engine: PostCompletion | AsyncPostCompletion, *, timeout: float | None = None) -> ProbeResult:
        """Prove how the KV is to be read from one request of one token, and read it so from now on.

        Args:
            engine: The engine that keeps its KV in this cache.
            timeout: Seconds for the KV to come into the cache, and again to fetch it.

        Raises:
            UsageError: `engine` gives nothing that can be iterated.
            GeometryError: No reading proves itself; the message has the measured spreads.
            CacheTimeout: The engine's KV did not come into the cache.
        """
        result = await probe(self, engine, timeout=self._seconds(timeout))
        self.adopt(result.codec, result.geometry)
        return result

    async def retrieve(
        self,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> Tensor | None:
        """See `AsyncKVCacheContext.retrieve`.

        Raises:
            GeometryError: How the chunks are to be read is not known, or they contradict what is known.
            CacheError: The server failed, or no engine serves the model.
        """
        prefix = self._prefix(tokens, cache_salt, kind)
        if kind is CacheKind.KV:
            self._format.check_readable()
        if not prefix.ids:
            return None
        return await self._in_turn(lambda errand: self._fetcher.kv(errand, prefix), prefix, timeout)

    async def retrieve_stored(
        self, tokens: Sequence[int], cache_salt: str = "", *, timeout: float | None = None
    ) -> list[list[Tensor]] | None:
        """Fetch the longest cached prefix as the cache holds it: private copies of the chunks of each rank."""
        prefix = self._prefix(tokens, cache_salt, CacheKind.KV)
        if not prefix.ids:
            return None
        return await self._in_turn(lambda errand: self._fetcher.chunks(errand, prefix), prefix, timeout)

    async def put(
        self,
        kv: Tensor,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> StoreOutcome:
        """Store `kv` `[2, L, T, D]`; see `AsyncKVCacheContext.put`.

        A cancelled store is still finished where it has begun to write.

        Raises:
            GeometryError: The shape of what the cache holds is not known for sure, so nothing was stored.
            CacheError: The server failed, or no engine serves the model.
        """
        check_kv(kv, check_tokens(tokens), self.geometry, kind)
        prefix = self._prefix(tokens, cache_salt, kind)
        codec, dtype = self._format.for_writing(kind, kv)
        if not prefix.ids:
            return StoreOutcome(0)
        if cache_salt and self.facts.config.eviction_policy == "IsolatedLRU" and not self._warned:
            self._warned = True
            warnings.warn(
                "this cache server evicts by IsolatedLRU: chunks under a cache_salt without a quota are wiped; set a "
                "quota, or start it with --eviction-policy LRU",
                stacklevel=2,
            )
        source = Source(kv[:, :, : len(prefix.ids)].detach(), self._executor)

        async def work(errand: Errand) -> StoreOutcome:
            await source.to_host()
            errand.before_leaving = source.keep
            return await self._storer.store(errand, source, prefix, codec, dtype)

        return await self._in_turn(work, prefix, timeout)

    async def lookup(
        self,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float | None = None,
    ) -> int:
        """See `AsyncKVCacheContext.lookup`.

        Raises:
            CacheError: The server failed, or no engine serves the model: that is no miss.
        """
        prefix = self._prefix(tokens, cache_salt, kind)
        self._lifetime.check_open()
        if not prefix.ids:
            return 0

        async def work(errand: Errand) -> int:
            async with self._sessions.looked_up(errand, prefix) as (_, hit):
                errand.know(hit * self.chunk_size)
                return hit * self.chunk_size

        return await self._lifetime.run(work, Errand(self._seconds(timeout)))

    async def wait_for(
        self,
        tokens: Sequence[int],
        *,
        timeout: float,
        poll_interval: float = 0.2,
        cache_salt: str = "",
        kind: CacheKind = CacheKind.KV,
    ) -> int:
        """See `AsyncKVCacheContext.wait_for`: a lookup every `poll_interval` seconds, each with its locks let go of."""
        wanted = whole_chunks(len(check_tokens(tokens)), self.chunk_size)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + check_timeout(timeout)
        interval = check_poll_interval(poll_interval)
        while True:
            remaining = max(deadline - loop.time(), 0.0)
            covered = await self.lookup(tokens, cache_salt, kind=kind, timeout=max(remaining, LOOKUP_TIMEOUT))
            remaining = deadline - loop.time()
            if covered >= wanted or remaining <= 0:
                return covered
            await asyncio.sleep(min(interval, remaining))

    async def close(self) -> None:
        """See `AsyncKVCacheContext.close`. Calls under way are given a few seconds to let go of what they hold."""
        await self._lifetime.close()

    async def start(self, *, serve: bool = False, timeout: float) -> None:
        """Register at the server and map its shared memory.

        Args:
            serve: Register the model's own name as well, and that of its queries: for a cache without an engine.
            timeout: Seconds for each registration.
        """
        await self._lifetime.begin()
        layout = self._format.layout_to_read()
        self._fetcher.reader = await self._registry.client(layout, timeout=timeout)
        if serve:
            for kind in (CacheKind.KV, CacheKind.QUERY):
                name = name_of_chunks(self.model_name, kind)
                client = await self._registry.client(layout, timeout=timeout, model_name=name)
                self._served.by_us(name, client)

    async def _in_turn(
        self, work: Callable[[Errand], Coroutine[Any, Any, T]], prefix: Prefix, timeout: float | None
    ) -> T:
        self._lifetime.check_open()
        return await self._turns.run(work, prefix, self._seconds(timeout))

    def _prefix(self, tokens: Sequence[int], cache_salt: str, kind: CacheKind) -> Prefix:
        ids = check_tokens(tokens)
        whole = ids[: whole_chunks(len(ids), self.chunk_size)]
        return Prefix(kind, check_cache_salt(cache_salt), tuple(whole.tolist()))

    def _seconds(self, timeout: float | None) -> float:
        return check_timeout(self.timeout if timeout is None else timeout)
