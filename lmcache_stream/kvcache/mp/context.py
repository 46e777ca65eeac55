"""Retrieve and store on a running LMCache MP server.

::

    retrieve   lookup -> wait_prefetch_status -> prepare_retrieve -> copy out -> commit_retrieve -> end_session
    store      prepare_store -> copy in -> commit_store -> end_session; a lookup tells what became of the chunks that
               the server offered no slot for
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import torch

from lmcache_stream.addresses import check_address
from lmcache_stream.errors import (
    CacheConnectionError,
    CacheError,
    CacheProtocolError,
    CacheTimeout,
    GeometryError,
    UsageError,
)
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.buffers import BufferPool
from lmcache_stream.kvcache.context import (
    AsyncKVCacheContext,
    StoreOutcome,
    check_cache_salt,
    check_kv,
    check_timeout,
    check_tokens,
)
from lmcache_stream.kvcache.mp.codec import Codec, Latent, Split, codec_for
from lmcache_stream.kvcache.mp.discovery import (
    QUERY_SUFFIX,
    ModelLayout,
    ServerFacts,
    ServerState,
    check_http_url,
    check_server,
    discover,
    fetch_json,
    find_model_config,
    parse_config,
    resolve_geometry,
)
from lmcache_stream.kvcache.mp.pickles import dump_tensors, load_tensors
from lmcache_stream.kvcache.mp.pool import Lease
from lmcache_stream.kvcache.mp.probe import ProbeResult, probe
from lmcache_stream.kvcache.mp.registry import Client, Layout, PoolView, Registry
from lmcache_stream.kvcache.mp.session import (
    CLEAN_UP,
    AbandonedError,
    Errand,
    ForgottenError,
    Session,
    detach,
    finish,
    run_errand,
)
from lmcache_stream.kvcache.mp.transport import open_transport
from lmcache_stream.kvcache.mp.wire import GET_CHUNK_SIZE
from lmcache_stream.transfer import TransferExecutor, default_executor
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable, Iterator, Sequence
    from types import TracebackType

    from torch import Tensor

    from lmcache_stream.kvcache.mp.transport import Transport
    from lmcache_stream.kvcache.mp.wire import PreparedRetrieve, Slot, StoreSlots
    from lmcache_stream.types import AsyncPostCompletion

__all__ = ["MPKVCacheContext", "open_context"]

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 3.0
"""Seconds for each of the few questions that connecting asks."""

STATUS_TIMEOUT = 1.0
"""Seconds for the server's `/status` where one can do without."""

LOOKUP_TIMEOUT = 1.0
"""Seconds that the last lookup of a wait has, whatever is left of its time."""

LOOP_END_TIMEOUT = 2.0
"""The same as `CLOSE_TIMEOUT` where the loop ends under an open context."""

CLOSE_TIMEOUT = 5.0
"""Seconds that a close waits for calls under way before it asks them to let go of what they hold."""

TRUST = 1.0
"""Seconds for which a model once seen registered is taken to be so."""

STORE_TRUST = 10.0
"""The same before a store, which can do without."""


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
        self._transport = transport
        self._registry = Registry(transport, self._status, populate=populate)
        self._executor = executor or default_executor()
        self._buffers = BufferPool()
        self._geometry = geometry
        self._world_size = facts.model.world_size
        self._codec: Codec | None = None
        self._unreadable: GeometryError | None = None
        self._shape_known = explicit or None not in (facts.model.num_layers, facts.model.dtype, facts.model.width)
        self._queries: tuple[Latent, torch.dtype] | None = None
        self._reader: Client | None = None
        self._served: dict[str, Client] = {}
        self._errands: set[Errand] = set()
        self._busy: dict[Hashable, tuple[asyncio.Lock, int]] = {}
        self._turns = asyncio.Semaphore(max(4, 2 * self._executor.lanes))
        self._lane = itertools.cycle(range(1, transport.lanes + 1))
        self._seen_served: dict[str, float] = {}
        self._may_store: dict[str, float] = {}
        self._written: dict[Hashable, set[asyncio.Future[None]]] = {}
        self._warned = False
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop_end = self._at_loop_end()
        self._loop_ends = self._closed = False
        if geometry is not None:
            try:
                self._read_with(codec_for(facts, geometry))
            except GeometryError as error:
                self._unreadable = error

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self.facts.chunk_size

    @property
    def geometry(self) -> KVGeometry | None:
        """Shape of the KV, as far as it is known; None when nothing is."""
        return self._geometry

    @property
    def executor(self) -> TransferExecutor:
        """Where copies run; edits may run there too."""
        return self._executor

    @property
    def codec(self) -> Codec | None:
        """How stored chunks are read; None while that is open."""
        return self._codec

    def adopt(self, codec: Codec, geometry: KVGeometry) -> None:
        """Read chunks with `codec` from now on, since chunks of the cache have proven it."""
        self._read_with(codec)
        self._geometry = geometry
        self._unreadable = None
        self._shape_known = True

    async def probe(self, engine: AsyncPostCompletion, *, timeout: float | None = None) -> ProbeResult:
        """Prove how the KV is to be read from one request of one token, and read it so from now on.

        Args:
            engine: The engine that keeps its KV in this cache.
            timeout: Seconds for the KV to come into the cache, and again to fetch it.

        Raises:
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
        ids = self._whole_chunks(tokens)
        salt = check_cache_salt(cache_salt)
        if kind is CacheKind.KV and self._unreadable is not None:
            raise self._unreadable
        if not ids:
            return None

        async def work(errand: Errand) -> Tensor | None:
            return await self._fetch(errand, ids, salt, kind, self._copy_out)

        return await self._one_at_a_time(work, (kind, salt, ids), timeout)

    async def retrieve_stored(
        self, tokens: Sequence[int], cache_salt: str = "", *, timeout: float | None = None
    ) -> list[list[Tensor]] | None:
        """Fetch the longest cached prefix as the cache holds it: private copies of the chunks of each rank."""
        ids = self._whole_chunks(tokens)
        salt = check_cache_salt(cache_salt)
        if not ids:
            return None

        async def copy(kind: CacheKind, chunks: list[list[Tensor]]) -> list[list[Tensor]]:
            return await self._executor.run(lambda: [[chunk.clone() for chunk in of_rank] for of_rank in chunks])

        async def work(errand: Errand) -> list[list[Tensor]] | None:
            return await self._fetch(errand, ids, salt, CacheKind.KV, copy)

        return await self._one_at_a_time(work, (CacheKind.KV, salt, ids), timeout)

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
        all_ids = check_tokens(tokens)
        check_kv(kv, all_ids, self._geometry, kind)
        salt = check_cache_salt(cache_salt)
        codec, dtype = self._writing(kind, kv)
        ids = self._whole_chunks(tokens)
        if not ids:
            return StoreOutcome(0)
        if salt and self.facts.config.eviction_policy == "IsolatedLRU" and not self._warned:
            self._warned = True
            warnings.warn(
                "this cache server evicts by IsolatedLRU: chunks under a cache_salt without a quota are wiped; set a "
                "quota, or start it with --eviction-policy LRU",
                stacklevel=2,
            )
        source = _Source(kv[:, :, : len(ids)].detach(), self._executor)

        async def work(errand: Errand) -> StoreOutcome:
            await source.to_host()
            errand.before_leaving = source.keep
            return await self._store(errand, source, ids, salt, kind, codec, dtype)

        return await self._one_at_a_time(work, (kind, salt, ids), timeout)

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
        ids = self._whole_chunks(tokens)
        salt = check_cache_salt(cache_salt)
        self._check_open()
        if not ids:
            return 0

        async def work(errand: Errand) -> int:
            async with self._looked_up(errand, ids, salt, kind) as (_, hit):
                errand.know(hit * self.chunk_size)
                return hit * self.chunk_size

        return await run_errand(work, Errand(self._seconds(timeout)), self._errands)

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
        wanted = len(self._whole_chunks(tokens))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + check_timeout(timeout)
        while True:
            remaining = max(deadline - loop.time(), 0.0)
            covered = await self.lookup(tokens, cache_salt, kind=kind, timeout=max(remaining, LOOKUP_TIMEOUT))
            remaining = deadline - loop.time()
            if covered >= wanted or remaining <= 0:
                return covered
            await asyncio.sleep(min(poll_interval, remaining))

    async def close(self) -> None:
        """See `AsyncKVCacheContext.close`. Calls under way are given a few seconds to let go of what they hold."""
        if self._closing is None:
            self._closing = detach(self._close_in_time())
        await asyncio.shield(self._closing)

    async def start(self, *, serve: bool = False, timeout: float = CONNECT_TIMEOUT) -> None:
        """Register at the server and map its shared memory.

        Args:
            serve: Register the model's own name as well, and that of its queries: for a cache without an engine.
            timeout: Seconds for each registration.
        """
        await anext(self._loop_end)
        layout = self._layout_to_read_with()
        self._reader = await self._registry.client(layout, timeout=timeout)
        if serve:
            for name in (self.model_name, _name(self.model_name, CacheKind.QUERY)):
                client = await self._registry.client(layout, timeout=timeout, model_name=name)
                self._served[name] = client

    # What a chunk is.

    def _read_with(self, codec: Codec) -> None:
        if isinstance(codec, Latent) and self._world_size > 1:
            raise GeometryError(
                f"MLA over {self._world_size} ranks is not supported: serve {self.model_name!r} with one"
            )
        self._codec = codec

    def _layout_to_read_with(self) -> Layout:
        model, geometry = self.facts.model, self._geometry
        dtype = (geometry.dtype if geometry is not None else None) or model.dtype
        if self._codec is not None and dtype is not None:
            return self._layout(self._codec, dtype)
        # Reads do not depend on it.
        return Layout(1, 1, torch.uint8, True, model.block_size or self.chunk_size, self._world_size)

    def _layout(self, codec: Codec, dtype: torch.dtype) -> Layout:
        shape = codec.stored_shape(self.chunk_size)
        block_size = self.facts.model.block_size or self.chunk_size
        return Layout(codec.num_layers, shape[-1], dtype, codec.stored_mla, block_size, self._world_size)

    def _writing(self, kind: CacheKind, kv: Tensor) -> tuple[Codec, torch.dtype]:
        if kind is CacheKind.QUERY:
            return self._writing_queries(kv)
        if self._unreadable is not None:
            raise self._unreadable
        geometry = self._geometry
        dtype = geometry.dtype if geometry is not None else None
        if self._codec is None or dtype is None or not self._shape_known:
            raise GeometryError(
                f"the shape of the KV that the cache holds for {self.model_name!r} is not known for sure yet: retrieve "
                "some first, or connect with geometry=KVGeometry(..., dtype=...)"
            )
        return self._codec, dtype

    def _writing_queries(self, kv: Tensor) -> tuple[Codec, torch.dtype]:
        layers, width = kv.shape[1], kv.shape[3]
        if self._queries is not None:
            codec, dtype = self._queries
            if (layers, width, kv.dtype) != (codec.num_layers, codec.width * self._world_size, dtype):
                shape = f"[1, {codec.num_layers}, T, {codec.width * self._world_size}] of {dtype}"
                raise UsageError(f"queries are {shape} in the cache, not {list(kv.shape)} of {kv.dtype}")
            return self._queries
        if self._geometry is None or self._geometry.num_heads is None:
            raise GeometryError(
                f"the shape of the queries of {self.model_name!r} is not known: retrieve some first, or connect with "
                "geometry=KVGeometry(..., num_heads=...)"
            )
        if width % self._world_size:
            raise UsageError(f"queries of width {width} do not divide over {self._world_size} ranks")
        return Latent(layers, 1, width // self._world_size), kv.dtype

    def _reading(self, kind: CacheKind, chunk: Tensor) -> Codec:
        """Choose how to read chunks; what comes back from the cache is the truth about their shape and dtype."""
        shape = tuple(chunk.shape[1:] if chunk.dim() == 4 and chunk.shape[0] == 1 else chunk.shape)
        if len(shape) not in (3, 4) or shape[-2] != self.chunk_size:
            raise CacheProtocolError(f"the cache holds chunks of shape {list(shape)} for {self.chunk_size} tokens")
        if kind is CacheKind.QUERY:
            if len(shape) != 3:
                raise CacheProtocolError(f"the cache holds queries of shape {list(shape)}, not one plane")
            self._queries = Latent(shape[0], 1, shape[2]), chunk.dtype
            return self._queries[0]
        if self._codec is None and self._geometry is None and len(shape) == 4:
            self._codec = Split(shape[1], 1, shape[3])
        if self._codec is None:
            raise self._unreadable or GeometryError(
                f"{self.facts.model.described} lies in chunks of shape {list(shape)}, which can be read in several "
                "ways: connect with probe=engine, or with geometry=KVGeometry(...)"
            )
        expected = self._codec.stored_shape(self.chunk_size)
        if shape != expected:
            raise GeometryError(
                f"the cache holds chunks of {list(shape)} for {self.model_name!r}, but the geometry in use makes them "
                f"{list(expected)} ({self._codec.name}): {self._geometry}"
            )
        if self._geometry is not None:
            known = self._geometry.dtype
            if known is not None and known != chunk.dtype:
                raise GeometryError(
                    f"the cache holds {chunk.dtype} for {self.model_name!r}, but the geometry in use says {known}"
                )
            self._geometry = dataclasses.replace(self._geometry, dtype=chunk.dtype)
        self._shape_known = True
        return self._codec

    # Calls and their sessions.

    async def _one_at_a_time(
        self, work: Callable[[Errand], Coroutine[Any, Any, T]], key: Hashable, timeout: float | None
    ) -> T:
        """Run `work` when a copy can start and no call with the same key is under way: the server confuses those."""
        self._check_open()
        seconds = self._seconds(timeout)
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(seconds):
                    await held.enter_async_context(_Alone(self._busy, key))
                    await held.enter_async_context(self._turns)
            except TimeoutError as error:
                raise CacheTimeout(f"other calls kept this one from starting within {seconds:g} s") from error
            self._check_open()
            release = held.pop_all()

            async def held_work(errand: Errand) -> T:
                errand.step_aside = release.aclose
                async with release:
                    return await work(errand)

            errand = Errand(seconds, seconds - (loop.time() - started))
            return await run_errand(held_work, errand, self._errands)

    @contextlib.contextmanager
    def _writing_to(self, place: tuple[CacheKind, str], ids: tuple[int, ...]) -> Iterator[None]:
        """Say that chunks of `ids` are being written, which the server offers to nobody else and does not have yet."""
        written = asyncio.get_running_loop().create_future()
        key = (place, ids[: self.chunk_size])
        self._written.setdefault(key, set()).add(written)
        try:
            yield
        finally:
            written.set_result(None)
            self._written[key].discard(written)
            if not self._written[key]:
                del self._written[key]

    async def _others_written(self, errand: Errand, place: tuple[CacheKind, str], ids: tuple[int, ...]) -> None:
        """Wait until what others were writing that begins with the same chunk can be seen."""
        under_way = self._written.get((place, ids[: self.chunk_size]))
        if under_way:
            await asyncio.wait(under_way, timeout=errand.remaining)

    def _session(self, errand: Errand, ids: tuple[int, ...], salt: str, kind: CacheKind) -> Session:
        return Session(
            self._transport,
            errand,
            model_name=_name(self.model_name, kind),
            world_size=self._world_size,
            tokens=ids,
            chunk_size=self.chunk_size,
            cache_salt=salt,
            lane=next(self._lane),
            in_place=self._registry.pool is not None,
            forgotten=self._registry.forgotten,
        )

    def _looked_up(
        self, errand: Errand, ids: tuple[int, ...], salt: str, kind: CacheKind, *, trust: float = TRUST
    ) -> _LookedUp:
        """A session that has read-locked the chunks found, and their number."""
        name = _name(self.model_name, kind)

        async def found_nobody(hit: int) -> bool:
            if hit:
                self._may_store[name] = asyncio.get_running_loop().time()
            return not hit and await self._register_served(name, errand, trust)

        return _LookedUp(lambda: self._session(errand, ids, salt, kind), found_nobody)

    async def _register_served(self, name: str, errand: Errand, trust: float) -> bool:
        """Tell a miss from a model that nobody serves any more; one that we serve is registered again: look again."""
        now = asyncio.get_running_loop().time()
        if now < self._seen_served.get(name, -math.inf) + trust:
            return False
        again = False
        served = self._served.get(name)
        if served is not None:
            seen = served.times_registered
            if await self._registry.forgotten(served):
                await self._registry.again(served, seen, timeout=max(errand.remaining, CONNECT_TIMEOUT))
                again = True
        else:
            # An engine that offloads no queries is a miss, no error.
            self._check_served(name.removesuffix(QUERY_SUFFIX), await self._status())
        if trust:
            self._seen_served[name] = now
        return again

    async def _check_before_store(self, name: str, errand: Errand) -> None:
        """Refuse to store what nobody could find, unless somebody could a short time ago."""
        now = asyncio.get_running_loop().time()
        if now >= self._may_store.get(name, -math.inf) + STORE_TRUST:
            if name in self._served:
                await self._register_served(name, errand, 0.0)
            else:
                try:
                    status = await self._status(min(errand.remaining / 2, STATUS_TIMEOUT))
                except CacheError:
                    return  # the store tells what is wrong
                self._check_served(name, status)
            self._may_store[name] = now

    def _check_served(self, name: str, status: Any) -> None:
        metas = [status.get(key) for key in ("cache_context_meta", "non_cuda_context_meta")]
        entries = [entry for meta in metas if isinstance(meta, dict) for entry in meta.values()]
        served = {(entry.get("model_name"), entry.get("world_size", 1)) for entry in entries if isinstance(entry, dict)}
        if (name, self._world_size) not in served:
            raise CacheConnectionError(
                f"nothing can be found for {name!r} with {self._world_size} ranks: no engine is registered for it at "
                f"the cache server {self.facts.http_url} (any more). Start the engine, or restart it after the server"
            )

    async def _knowing_us(self, errand: Errand, client: Client, call: Callable[[], Awaitable[T]]) -> tuple[T, PoolView]:
        """Make a call that needs our registration; a forgotten one is made again, once.

        Returns:
            The answer, and the pool as it was when the call was made, which is what the answer is about.
        """
        seen = client.times_registered
        try:
            view = self._registry.view(client)
            return await call(), view
        except ForgottenError:
            await self._registry.again(client, seen, timeout=max(errand.remaining, CONNECT_TIMEOUT))
        try:
            view = self._registry.view(client)
            return await call(), view
        except ForgottenError:
            raise CacheConnectionError(f"the cache server {self._transport.url} keeps forgetting this client") from None

    async def _fetch(
        self,
        errand: Errand,
        ids: tuple[int, ...],
        salt: str,
        kind: CacheKind,
        use: Callable[[CacheKind, list[list[Tensor]]], Awaitable[T]],
    ) -> T | None:
        async with self._looked_up(errand, ids, salt, kind) as (session, hit):
            if hit == 0:
                errand.know(None)
                return None

            async def used(chunks: list[list[Tensor]]) -> T:
                result = await use(kind, chunks)
                errand.know(result)
                return result

            return await self._read(errand, session, hit, used)

    async def _read(
        self, errand: Errand, session: Session, hit: int, use: Callable[[list[list[Tensor]]], Awaitable[T]]
    ) -> T:
        """Let `use` look at the first `hit` chunks of each rank, in place where there is shared memory."""
        assert self._reader is not None
        client = await self._registry.client(self._reader.layout, timeout=max(errand.remaining, CONNECT_TIMEOUT))
        prepared: list[PreparedRetrieve] = []
        views: list[PoolView] = []
        for rank in range(self._world_size):
            call = _bind(session.prepare_retrieve, rank, hit, client)
            answer, view = await self._knowing_us(errand, client, call)
            prepared.append(answer)
            views.append(view)
        errand.check()
        with self._lease(client, views) as lease:
            chunks = [await self._chunks(of_rank, lease, hit) for of_rank in prepared]
            if any(len(of_rank) != hit for of_rank in chunks):
                raise CacheProtocolError(
                    f"the cache server gave {[len(of_rank) for of_rank in chunks]} chunks, not {hit}"
                )
            result = await use(chunks)
            del chunks
        for rank in range(self._world_size):
            await session.commit_retrieve(rank)
        return result

    async def _chunks(self, prepared: PreparedRetrieve, lease: Lease | None, count: int) -> list[Tensor]:
        if prepared.context.slots:
            return _views(prepared.context.slots[: count + 1], lease)
        return await self._executor.run(load_tensors, prepared.data, count)

    @contextlib.contextmanager
    def _lease(self, client: Client, views: list[PoolView]) -> Any:
        pool = views[0].pool
        now = self._registry.view(client)
        if any(view != now for view in views) or (pool is not None and pool.closed):
            raise CacheConnectionError("the cache server restarted meanwhile: try again")
        if pool is None:
            yield None
            return
        with pool.lease() as lease:
            yield lease

    async def _copy_out(self, kind: CacheKind, chunks: list[list[Tensor]]) -> Tensor:
        codec = self._reading(kind, chunks[0][0])
        count = len(chunks[0])
        shape = (codec.planes, codec.num_layers, count * self.chunk_size, codec.width * self._world_size)
        out = self._buffers.empty(shape, chunks[0][0].dtype)

        def copy(first: int, last: int) -> None:
            for rank, of_rank in enumerate(chunks):
                for index in range(first, last):
                    codec.decode(of_rank[index], self._part(out, codec, rank, index))

        await self._in_parts(copy, count)
        return out

    async def _store(
        self,
        errand: Errand,
        source: _Source,
        ids: tuple[int, ...],
        salt: str,
        kind: CacheKind,
        codec: Codec,
        dtype: torch.dtype,
    ) -> StoreOutcome:
        layout = self._layout(codec, dtype)
        client = await self._registry.client(layout, timeout=max(errand.remaining, CONNECT_TIMEOUT))
        count = len(ids) // self.chunk_size
        await self._check_before_store(_name(self.model_name, kind), errand)
        if self._registry.pool is None:
            return await self._store_pickled(errand, client, source, ids, salt, kind, codec, count)
        with self._writing_to((kind, salt), ids):
            async with self._session(errand, ids, salt, kind) as session:
                offered = await self._write(errand, session, client, source, codec, count)
                everywhere = set.intersection(*offered)
                if len(everywhere) == count:
                    errand.know(StoreOutcome(count, taken=count))
        if len(everywhere) == count:
            return StoreOutcome(count, taken=count)
        errand.check()
        await self._others_written(errand, (kind, salt), ids)
        open_ = [index for index in range(count) if index not in everywhere]
        hit, same = await self._compare(errand, source, ids, salt, kind, codec, open_)
        somewhere = set.union(*offered)
        taken = len(everywhere) + len(same & somewhere)
        missing = sum(index >= hit for index in open_)
        return StoreOutcome(
            count,
            taken=taken,
            same=len(same - somewhere),
            kept=len(open_) - missing - len(same),
            missing=missing,
        )

    async def _write(
        self, errand: Errand, session: Session, client: Client, source: _Source, codec: Codec, count: int
    ) -> list[set[int]]:
        """Write the chunks that the server offers slots for.

        Returns:
            For each rank the chunks that it took.
        """
        prepared: list[StoreSlots] = []
        views: list[PoolView] = []
        failure: Exception | None = None
        taken: list[set[int]] = [set() for _ in range(self._world_size)]
        errand.check()  # from here on, something may be left reserved
        client.writing.add(session)
        try:
            for rank in range(self._world_size):
                try:
                    call = _bind(session.prepare_store, rank, client)
                    slots, view = await self._knowing_us(errand, client, call)
                    prepared.append(slots)
                    views.append(view)
                except (CacheError, AbandonedError) as error:
                    # What was reserved for other ranks is published sooner or later: see that it is right.
                    failure = error
                    break
            if prepared:
                with self._lease(client, views) as lease:
                    targets: list[tuple[int, int, Tensor]] = []
                    good: list[int] = []
                    for rank, slots in enumerate(prepared):
                        try:
                            _check_apart([slot for of_rank in prepared for slot in of_rank.slots or ()])
                            places = self._targets(slots, lease, codec, client.layout.dtype, count)
                        except CacheProtocolError as error:
                            failure = error
                            continue
                        good.append(rank)
                        targets += [(rank, index, place) for index, place in places]

                    def copy(kv: Tensor, first: int, last: int) -> None:
                        for rank, index, place in targets[first:last]:
                            codec.encode(self._part(kv, codec, rank, index), place)

                    await source.use(lambda kv: self._in_parts(copy, len(targets), kv))
                for rank in good:
                    indices = prepared[rank].chunk_indices
                    if indices and await session.commit_store(rank, client):
                        taken[rank].update(indices)
        except BaseException:
            client.lost.add(session)
            raise
        finally:
            client.writing.discard(session)
        if failure is not None:
            if not isinstance(failure, AbandonedError):
                client.lost.add(session)
            raise failure
        return taken

    def _targets(
        self, slots: StoreSlots, lease: Lease, codec: Codec, dtype: torch.dtype, count: int
    ) -> list[tuple[int, Tensor]]:
        if slots.slots is None:
            raise CacheProtocolError("the cache server offers no shared memory, which it said it has")
        indices, places = slots.chunk_indices or (), slots.slots
        if len(indices) != len(places) or len(set(indices)) != len(indices):
            raise CacheProtocolError(f"the cache server offers {len(places)} slots for the chunks {list(indices)}")
        if any(not 0 <= index < count for index in indices):
            raise CacheProtocolError(f"the cache server offers slots for the chunks {list(indices)} of {count}")
        expected = codec.stored_shape(self.chunk_size)
        views = _views(places, lease)
        for view in views:
            if tuple(view.shape) not in (expected, (1, *expected)) or view.dtype != dtype:
                raise CacheProtocolError(
                    f"the cache server offers slots of {list(view.shape)} of {view.dtype} for chunks of "
                    f"{list(expected)} of {dtype}"
                )
        return list(zip(indices, views, strict=True))

    async def _store_pickled(
        self,
        errand: Errand,
        client: Client,
        source: _Source,
        ids: tuple[int, ...],
        salt: str,
        kind: CacheKind,
        codec: Codec,
        count: int,
    ) -> StoreOutcome:
        # The server does not say which of pickled chunks it took: compare what it has afterwards.
        async with self._session(errand, ids, salt, kind) as session:
            before = await session.lookup()

        def pickled(kv: Tensor, rank: int) -> bytes:
            shape = codec.stored_shape(self.chunk_size)
            chunks = [torch.empty(shape, dtype=kv.dtype) for _ in range(count)]
            for index, chunk in enumerate(chunks):
                codec.encode(self._part(kv, codec, rank, index), chunk)
            return dump_tensors(chunks)

        async with self._session(errand, ids, salt, kind) as session:
            for rank in range(self._world_size):
                prepare = _bind(session.prepare_store, rank, client)
                prepared, _ = await self._knowing_us(errand, client, prepare)
                if prepared.slots is not None:
                    raise CacheProtocolError("the cache server offers shared memory that it said it does not have")
                errand.check()
                data = await source.use(lambda kv, rank=rank: self._executor.run(pickled, kv, rank))  # type: ignore[misc]
                await session.store_pickled(rank, client, data)
        errand.check()
        hit, same = await self._compare(errand, source, ids, salt, kind, codec, list(range(count)))
        old = sum(index < before for index in same)
        return StoreOutcome(count, taken=len(same) - old, same=old, kept=hit - len(same), missing=count - hit)

    async def _compare(
        self,
        errand: Errand,
        source: _Source,
        ids: tuple[int, ...],
        salt: str,
        kind: CacheKind,
        codec: Codec,
        indices: list[int],
    ) -> tuple[int, set[int]]:
        """Count the chunks in the cache now, and find those of `indices` among them that hold the source's bytes."""
        async with self._looked_up(errand, ids, salt, kind, trust=0.0) as (session, hit):
            present = [index for index in indices if index < hit]
            if not present:
                return hit, set()

            def same(kv: Tensor, chunks: list[list[Tensor]]) -> set[int]:
                ours = torch.empty(codec.stored_shape(self.chunk_size), dtype=kv.dtype)
                equal = set(present)
                for index in present:
                    for rank, of_rank in enumerate(chunks):
                        codec.encode(self._part(kv, codec, rank, index), ours)
                        if not _equal_bytes(ours, of_rank[index]):
                            equal.discard(index)
                            break
                return equal

            async def use(chunks: list[list[Tensor]]) -> set[int]:
                self._reading(kind, chunks[0][0])
                return await source.use(lambda kv: self._executor.run(same, kv, chunks))

            return hit, await self._read(errand, session, hit, use)

    def _part(self, kv: Tensor, codec: Codec, rank: int, index: int) -> Tensor:
        of_rank = kv.narrow(3, rank * codec.width, codec.width)
        return of_rank.narrow(2, index * self.chunk_size, self.chunk_size)

    async def _in_parts(self, copy: Callable[..., None], count: int, *args: Any) -> None:
        """Run `copy(*args, first, last)` over `count` items, side by side; all of it has ended when this returns."""
        lanes = max(1, min(self._executor.lanes, count))
        bounds = [count * part // lanes for part in range(lanes + 1)]
        runs = (self._executor.run(copy, *args, first, last) for first, last in itertools.pairwise(bounds))
        for failed in await asyncio.gather(*runs, return_exceptions=True):
            if failed is not None:
                raise failed

    # Small things.

    def _whole_chunks(self, tokens: Sequence[int]) -> tuple[int, ...]:
        ids = check_tokens(tokens)
        return tuple(ids[: len(ids) // self.chunk_size * self.chunk_size].tolist())

    def _seconds(self, timeout: float | None) -> float:
        return check_timeout(self.timeout if timeout is None else timeout)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise UsageError("the context is closed: connect again")
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("the context belongs to another event loop: connect once in each")

    async def _status(self, timeout: float = CONNECT_TIMEOUT) -> Any:
        status = await _fetch_json(f"{self.facts.http_url}/status", timeout=timeout)
        if not isinstance(status, dict):
            raise CacheProtocolError(f"{self.facts.http_url}/status answers no JSON object")
        return status

    async def _close(self, patience: float) -> None:
        """Give the calls under way `patience` seconds, and then `CLEAN_UP` more to let go of what they hold."""
        try:
            if self._errands:
                await asyncio.wait(self._running(), timeout=patience)
            for errand in self._errands:
                errand.hurry()
            if self._errands:
                await asyncio.wait(self._running(), timeout=CLEAN_UP + 1)
            left = self._running()
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=CONNECT_TIMEOUT)
            await self._registry.close(timeout=CONNECT_TIMEOUT)
        finally:
            await self._transport.close()
            self._buffers.clear()

    async def _close_in_time(self) -> None:
        try:
            await self._close(CLOSE_TIMEOUT)
        finally:
            if not self._loop_ends:
                self._closed = True
                await self._loop_end.aclose()

    def _running(self) -> list[asyncio.Task[Any]]:
        return [errand.task for errand in self._errands if errand.task is not None]

    async def _at_loop_end(self) -> AsyncGenerator[None]:
        """What a loop that ends closes behind all tasks, which it has cancelled."""
        try:
            yield
        finally:
            if not self._closed:
                self._loop_ends = True
                if self._closing is None:
                    self._closing = detach(self._close(LOOP_END_TIMEOUT))
                await finish(self._closing, None)


class _Alone:
    """Waits until no other call with the same key is under way."""

    def __init__(self, busy: dict[Hashable, tuple[asyncio.Lock, int]], key: Hashable) -> None:
        self._busy = busy
        self._key = key

    async def __aenter__(self) -> None:
        lock, users = self._busy.get(self._key, (asyncio.Lock(), 0))
        self._busy[self._key] = lock, users + 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._busy[self._key][0].release()
        self._leave()

    def _leave(self) -> None:
        lock, users = self._busy.pop(self._key)
        if users > 1:
            self._busy[self._key] = lock, users - 1


class _LookedUp:
    """A session after its lookup; another one where the first found nobody who serves the model, which was mended."""

    def __init__(self, make: Callable[[], Session], found_nobody: Callable[[int], Awaitable[bool]]) -> None:
        self._make = make
        self._found_nobody = found_nobody

    async def __aenter__(self) -> tuple[Session, int]:
        hit, again = await self._enter()
        if again:
            await self._session.__aexit__(None, None, None)
            hit, _ = await self._enter(last=True)
        return self._session, hit

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._session.__aexit__(exc_type, exc, tb)

    async def _enter(self, *, last: bool = False) -> tuple[int, bool]:
        self._session = self._make()
        try:
            hit = await self._session.lookup()
            return hit, not last and await self._found_nobody(hit)
        except BaseException as error:
            await self._session.__aexit__(type(error), error, error.__traceback__)
            raise


class _Source:
    """The KV to store. While it may still be written, the caller's tensor is either not let go of, or copied."""

    def __init__(self, kv: Tensor, executor: TransferExecutor) -> None:
        self._kv = kv
        self._executor = executor
        self._private = False
        self._in_use = asyncio.Lock()

    async def to_host(self) -> None:
        if self._kv.device.type != "cpu":
            self._kv = await self._executor.to_host(self._kv)
            self._private = True

    async def use(self, work: Callable[[Tensor], Awaitable[T]]) -> T:
        async with self._in_use:
            return await work(self._kv)

    async def keep(self) -> None:
        """Take a copy, since the caller may change the tensor from now on."""
        async with self._in_use:
            if not self._private:
                self._kv = await asyncio.to_thread(self._kv.clone)
                self._private = True


def _bind(call: Callable[..., Awaitable[T]], *args: Any) -> Callable[[], Awaitable[T]]:
    return lambda: call(*args)


def _name(model_name: str, kind: CacheKind) -> str:
    return f"{model_name}{QUERY_SUFFIX}" if kind is CacheKind.QUERY else model_name


def _views(slots: Sequence[Slot], lease: Lease | None) -> list[Tensor]:
    if lease is None:
        raise CacheProtocolError("the cache server names shared-memory slots, but said that it has no shared memory")
    return [lease.view(slot) for slot in slots]


def _check_apart(slots: Sequence[Slot]) -> None:
    for one, other in itertools.pairwise(sorted(slots, key=lambda slot: slot.offset)):
        if one.offset + one.length > other.offset:
            raise CacheProtocolError(
                f"the cache server offers slots that overlap, at offsets {one.offset} and {other.offset}"
            )


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


async def _fetch_json(url: str, *, missing_ok: bool = False, timeout: float = CONNECT_TIMEOUT) -> Any:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        return await fetch_json(session, url, missing_ok=missing_ok)


async def open_context(
    url: str,
    *,
    http_url: str | None = None,
    model_name: str | None = None,
    timeout: float = 60.0,
    geometry: KVGeometry | None = None,
    probe: AsyncPostCompletion | None = None,
    executor: TransferExecutor | None = None,
    lanes: int = 2,
    serve: bool = False,
    populate: bool = False,
) -> MPKVCacheContext:
    """Connect to an LMCache MP server.

    Args:
        url: Its request endpoint, `tcp://host:port`, `ipc://path`, `grpc://host:port` or `grpc+unix://path`.
        http_url: Its HTTP address, such as `http://localhost:8080`.
        model_name: The model's name in the cache, which is vLLM's `--model`; None: the only one registered.
        timeout: Seconds that connecting, a probe left out, and later each call takes at most unless it says otherwise.
        geometry: Shape of the KV, where the server does not tell, or to be checked against what it tells.
        probe: An engine to prove the reading of the KV with.
        executor: Where copies run; None: the process's own.
        lanes: Connections that move data side by side.
        serve: Register the model's name too, for a cache that no engine uses. Needs `model_name` and `geometry`.
        populate: Map the server's whole shared memory ahead, in the background: first stores are faster, but its memory
            is taken at once, and counts as this process's.

    Raises:
        UsageError: The arguments cannot be right.
        CacheConnectionError: The server cannot be reached or used; the message says what to change.
        GeometryError: What is known of the KV is contradictory.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + check_timeout(timeout)

    def left() -> float:
        return max(0.001, min(CONNECT_TIMEOUT, deadline - loop.time()))

    check_address(url, "url")
    if http_url is None:
        raise UsageError(f"{url} needs the same server's HTTP address: http_url='http://host:8080' (its --http-port)")
    check_http_url(http_url)
    if serve and (model_name is None or geometry is None):
        raise UsageError("serve=True needs model_name and geometry: nobody else tells them")
    transport = open_transport(url, lanes=lanes)
    context: MPKVCacheContext | None = None
    try:
        facts = await _discover(url, http_url, model_name, geometry if serve else None, left)
        chunk_size = await transport.call(GET_CHUNK_SIZE, timeout=left())
        if chunk_size != facts.chunk_size:
            raise CacheConnectionError(
                f"{url} has chunks of {chunk_size} tokens, but {http_url} says {facts.chunk_size}: url and http_url "
                "are two different servers"
            )
        shape = await _geometry(facts, geometry)
        context = MPKVCacheContext(
            transport,
            facts,
            timeout=timeout,
            geometry=shape,
            explicit=geometry is not None,
            executor=executor,
            populate=populate,
        )
        await context.start(serve=serve, timeout=left())
        if probe is not None:
            await context.probe(probe)
        shape = context.geometry
        logger.info("connected to %s: %s, chunks of %d tokens, %s", url, facts.model.described, chunk_size, shape)
    except BaseException:
        closing = context.close() if context is not None else transport.close()
        await finish(asyncio.ensure_future(closing), CLOSE_TIMEOUT)
        raise
    return context


async def _discover(
    url: str, http_url: str, model_name: str | None, served: KVGeometry | None, left: Callable[[], float]
) -> ServerFacts:
    base = check_http_url(http_url)
    answer = await _fetch_json(f"{base}/config", missing_ok=True, timeout=left())
    if answer is None:
        answer = await _fetch_json(f"{base}/conf", timeout=left())
    config = parse_config(answer, url=f"{base}/config")
    check_server(config, url=url, http_url=base)
    if served is None:
        return await discover(base, model_name, timeout=left())
    assert model_name is not None
    model = ModelLayout(
        model_name=model_name,
        world_size=served.world_size,
        one_plane=served.planes == 1,
        block_size=served.block_size,
    )
    state = ServerState(healthy=None, model=model, model_names=(model_name,))
    return ServerFacts(http_url=base, config=config, state=state)


async def _geometry(facts: ServerFacts, given: KVGeometry | None) -> KVGeometry | None:
    def resolve() -> KVGeometry | None:
        path = find_model_config(facts.model.model_name)
        config = KVGeometry.from_config(path) if path is not None else None
        return resolve_geometry(facts, given=given, config=config, config_name=str(path or "config.json"))

    return await asyncio.to_thread(resolve)
