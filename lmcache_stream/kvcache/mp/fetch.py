"""Fetches the chunks of a prefix: lookup, prepare_retrieve, look at them or copy them, commit_retrieve."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lmcache_stream.errors import CacheProtocolError
from lmcache_stream.kvcache.mp.copying import copy_in_parts, part_of
from lmcache_stream.kvcache.mp.pickles import load_tensors
from lmcache_stream.kvcache.mp.pool import check_apart, views_of
from lmcache_stream.kvcache.mp.registry import time_to_register

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from lmcache_stream.kvcache.buffers import BufferPool
    from lmcache_stream.kvcache.mp.chunk_format import ChunkFormat
    from lmcache_stream.kvcache.mp.errand import Errand
    from lmcache_stream.kvcache.mp.lookup import Sessions
    from lmcache_stream.kvcache.mp.pool import Lease
    from lmcache_stream.kvcache.mp.prefix import Prefix
    from lmcache_stream.kvcache.mp.registry import Client, PoolView, Registry
    from lmcache_stream.kvcache.mp.session import Session
    from lmcache_stream.kvcache.mp.status import ServerFacts
    from lmcache_stream.kvcache.mp.wire import PreparedRetrieve
    from lmcache_stream.transfer import TransferExecutor

__all__ = ["Fetcher"]

T = TypeVar("T")


class Fetcher:
    """Fetches chunks of one model.

    Args:
        registry: Our registrations.
        sessions: Opens sessions.
        chunk_format: How chunks are read.
        executor: Where copies run.
        buffers: What copies are made in.
        facts: What the server says.

    Attributes:
        reader: The registration that chunks are read under; set before the first fetch.
    """

    def __init__(
        self,
        registry: Registry,
        sessions: Sessions,
        chunk_format: ChunkFormat,
        executor: TransferExecutor,
        buffers: BufferPool,
        facts: ServerFacts,
    ) -> None:
        self.reader: Client | None = None
        self._registry = registry
        self._sessions = sessions
        self._format = chunk_format
        self._executor = executor
        self._buffers = buffers
        self._chunk_size = facts.chunk_size
        self._world_size = facts.model.world_size

    async def kv(self, errand: Errand, prefix: Prefix) -> Tensor | None:
        """A private copy of the longest cached prefix, `[planes, L, T, D]`; None where nothing is cached."""
        return await self._fetch(errand, prefix, partial(self._joined, prefix))

    async def chunks(self, errand: Errand, prefix: Prefix) -> list[list[Tensor]] | None:
        """Private copies of its chunks as they are stored, of each rank; None where nothing is cached."""
        return await self._fetch(errand, prefix, self._copies)

    async def read(
        self, errand: Errand, session: Session, hit: int, use: Callable[[list[list[Tensor]]], Awaitable[T]]
    ) -> T:
        """Let `use` look at the first `hit` chunks of each rank, in place where there is shared memory."""
        assert self.reader is not None
        client = await self._registry.client(self.reader.layout, timeout=time_to_register(errand))
        prepared: list[PreparedRetrieve] = []
        views: list[PoolView] = []
        for rank in range(self._world_size):
            call = partial(session.prepare_retrieve, rank, hit, client)
            answer, view = await self._registry.knowing_us(errand, client, call)
            prepared.append(answer)
            views.append(view)
        errand.check()
        with self._registry.lease(client, views) as lease:
            chunks = [await self._views(of_rank, lease, hit) for of_rank in prepared]
            if any(len(of_rank) != hit for of_rank in chunks):
                raise CacheProtocolError(
                    f"the cache server gave {[len(of_rank) for of_rank in chunks]} chunks, not {hit}"
                )
            result = await use(chunks)
            del chunks
        for rank in range(self._world_size):
            await session.commit_retrieve(rank)
        return result

    async def _fetch(
        self, errand: Errand, prefix: Prefix, use: Callable[[list[list[Tensor]]], Awaitable[T]]
    ) -> T | None:
        async with self._sessions.looked_up(errand, prefix) as (session, hit):
            if hit == 0:
                errand.know(None)
                return None

            async def used(chunks: list[list[Tensor]]) -> T:
                result = await use(chunks)
                errand.know(result)
                return result

            return await self.read(errand, session, hit, used)

    async def _views(self, prepared: PreparedRetrieve, lease: Lease | None, count: int) -> list[Tensor]:
        if prepared.context.slots:
            check_apart(prepared.context.slots)
            return views_of(prepared.context.slots[: count + 1], lease)
        return await self._executor.run(load_tensors, prepared.data, count)

    async def _joined(self, prefix: Prefix, chunks: list[list[Tensor]]) -> Tensor:
        codec = self._format.for_reading(prefix.kind, chunks[0][0])
        count = len(chunks[0])
        shape = (codec.planes, codec.num_layers, count * self._chunk_size, codec.width * self._world_size)
        out = self._buffers.empty(shape, chunks[0][0].dtype)

        def copy(first: int, last: int) -> None:
            for rank, of_rank in enumerate(chunks):
                for index in range(first, last):
                    codec.decode(of_rank[index], part_of(out, codec, rank, index, self._chunk_size))

        await copy_in_parts(self._executor, copy, count)
        return out

    async def _copies(self, chunks: list[list[Tensor]]) -> list[list[Tensor]]:
        return await self._executor.run(lambda: [[chunk.clone() for chunk in of_rank] for of_rank in chunks])
