"""Stores KV under a prefix: prepare_store, copy into the slots offered, commit_store, tell what became of each chunk.

A lookup tells what became of the chunks that the server offered no slot for: it has no room, or has them already.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.equality import equal_bytes
from lmcache_stream.kvcache.mp.copying import copy_in_parts, part_of
from lmcache_stream.kvcache.mp.errand import AbandonedError
from lmcache_stream.kvcache.mp.pickles import dump_tensors
from lmcache_stream.kvcache.mp.pool import check_apart, views_of
from lmcache_stream.kvcache.mp.prefix import name_of_chunks
from lmcache_stream.kvcache.mp.registry import RESTARTED, time_to_register

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from lmcache_stream.kvcache.mp.chunk_format import ChunkFormat
    from lmcache_stream.kvcache.mp.codec import Codec
    from lmcache_stream.kvcache.mp.errand import Errand
    from lmcache_stream.kvcache.mp.fetch import Fetcher
    from lmcache_stream.kvcache.mp.lookup import Sessions
    from lmcache_stream.kvcache.mp.pool import Lease
    from lmcache_stream.kvcache.mp.prefix import Prefix
    from lmcache_stream.kvcache.mp.registry import Client, PoolView, Registry
    from lmcache_stream.kvcache.mp.served import Served
    from lmcache_stream.kvcache.mp.session import Session
    from lmcache_stream.kvcache.mp.status import ServerFacts
    from lmcache_stream.kvcache.mp.turns import Turns
    from lmcache_stream.kvcache.mp.wire import StoreSlots
    from lmcache_stream.transfer import TransferExecutor

__all__ = ["Source", "Storer"]

T = TypeVar("T")


class Source:
    """The KV to store. While it may still be written, the caller's tensor is either not let go of, or copied."""

    def __init__(self, kv: Tensor, executor: TransferExecutor) -> None:
        self._kv = kv
        self._executor = executor
        self._private = False
        self._in_use = asyncio.Lock()

    async def to_host(self) -> None:
        """Have it on the host, where it is written from."""
        if self._kv.device.type != "cpu":
            self._kv = await self._executor.to_host(self._kv)
            self._private = True

    async def use(self, work: Callable[[Tensor], Awaitable[T]]) -> T:
        """Let `work` read it."""
        async with self._in_use:
            return await work(self._kv)

    async def keep(self) -> None:
        """Take a copy, since the caller may change the tensor from now on."""
        async with self._in_use:
            if not self._private:
                self._kv = await asyncio.to_thread(self._kv.clone)
                self._private = True


class Storer:
    """Stores chunks of one model.

    Args:
        registry: Our registrations.
        sessions: Opens sessions.
        served: Who serves the model.
        turns: Which stores write now.
        fetcher: Reads what the cache has already.
        chunk_format: How chunks are written.
        executor: Where copies run.
        facts: What the server says.
    """

    def __init__(
        self,
        registry: Registry,
        sessions: Sessions,
        served: Served,
        turns: Turns,
        fetcher: Fetcher,
        chunk_format: ChunkFormat,
        executor: TransferExecutor,
        facts: ServerFacts,
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._served = served
        self._turns = turns
        self._fetcher = fetcher
        self._format = chunk_format
        self._executor = executor
        self._model_name = facts.model.model_name
        self._chunk_size = facts.chunk_size
        self._world_size = facts.model.world_size

    async def store(
        self, errand: Errand, source: Source, prefix: Prefix, codec: Codec, dtype: torch.dtype
    ) -> StoreOutcome:
        """Store `source` under `prefix`."""
        layout = self._format.layout_to_write(codec, dtype)
        client = await self._registry.client(layout, timeout=time_to_register(errand))
        count = len(prefix.ids) // self._chunk_size
        await self._served.check_before_store(name_of_chunks(self._model_name, prefix.kind), errand)
        if self._registry.pool is None:
            return await self._store_pickled(errand, client, source, prefix, codec, count)
        with self._turns.writing(prefix):
            async with self._sessions.open(errand, prefix) as session:
                offered = await self._write(errand, session, client, source, codec, count)
                everywhere = set.intersection(*offered)
                if len(everywhere) == count:
                    errand.know(StoreOutcome(count, taken=count))
        if len(everywhere) == count:
            return StoreOutcome(count, taken=count)
        errand.check()
        await self._turns.others_written(errand, prefix)
        open_ = [index for index in range(count) if index not in everywhere]
        hit, same = await self._compare(errand, source, prefix, codec, open_)
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
        self, errand: Errand, session: Session, client: Client, source: Source, codec: Codec, count: int
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
                    call = partial(session.prepare_store, rank, client)
                    slots, view = await self._registry.knowing_us(errand, client, call)
                    prepared.append(slots)
                    views.append(view)
                except (CacheError, AbandonedError) as error:
                    # What was reserved for other ranks is published sooner or later: see that it is right.
                    failure = error
                    break
            current = [rank for rank, view in enumerate(views) if self._registry.is_current(client, view)]
            if len(current) < len(views):
                failure = CacheConnectionError(RESTARTED)
            if current:
                with self._registry.lease(client, [views[rank] for rank in current]) as lease:
                    targets: list[tuple[int, int, Tensor]] = []
                    good: list[int] = []
                    for rank in current:
                        try:
                            check_apart([slot for other in current for slot in prepared[other].slots or ()])
                            places = self._targets(prepared[rank], lease, codec, client.layout.dtype, count)
                        except CacheProtocolError as error:
                            failure = error
                            continue
                        good.append(rank)
                        targets += [(rank, index, place) for index, place in places]

                    def copy(kv: Tensor, first: int, last: int) -> None:
                        for rank, index, place in targets[first:last]:
                            codec.encode(part_of(kv, codec, rank, index, self._chunk_size), place)

                    await source.use(lambda kv: copy_in_parts(self._executor, copy, len(targets), kv))
                for rank in good:
                    indices = prepared[rank].chunk_indices
                    if indices and await session.commit_store(rank, client):
                        taken[rank].update(indices)
        except BaseException:
            client.lost = True
            raise
        finally:
            client.writing.discard(session)
        if failure is not None:
            if not isinstance(failure, AbandonedError):
                client.lost = True
            raise failure
        return taken

    def _targets(
        self, slots: StoreSlots, lease: Lease | None, codec: Codec, dtype: torch.dtype, count: int
    ) -> list[tuple[int, Tensor]]:
        if slots.slots is None:
            raise CacheProtocolError("the cache server offers no shared memory, which it said it has")
        indices, places = slots.chunk_indices or (), slots.slots
        if len(indices) != len(places) or len(set(indices)) != len(indices):
            raise CacheProtocolError(f"the cache server offers {len(places)} slots for the chunks {list(indices)}")
        if any(not 0 <= index < count for index in indices):
            raise CacheProtocolError(f"the cache server offers slots for the chunks {list(indices)} of {count}")
        expected = codec.stored_shape(self._chunk_size)
        views = views_of(places, lease)
        for view in views:
            if tuple(view.shape) not in (expected, (1, *expected)) or view.dtype != dtype:
                raise CacheProtocolError(
                    f"the cache server offers slots of {list(view.shape)} of {view.dtype} for chunks of "
                    f"{list(expected)} of {dtype}"
                )
        return list(zip(indices, views, strict=True))

    async def _store_pickled(
        self, errand: Errand, client: Client, source: Source, prefix: Prefix, codec: Codec, count: int
    ) -> StoreOutcome:
        shape = codec.stored_shape(self._chunk_size)
        # The server does not say which of pickled chunks it took: compare what it has afterwards.
        async with self._sessions.open(errand, prefix) as session:
            session.check_one_request(count * math.prod(shape) * client.layout.dtype.itemsize)
            before = await session.lookup()

        def pickled(kv: Tensor, rank: int) -> bytes:
            chunks = [torch.empty(shape, dtype=kv.dtype) for _ in range(count)]
            for index, chunk in enumerate(chunks):
                codec.encode(part_of(kv, codec, rank, index, self._chunk_size), chunk)
            return dump_tensors(chunks)

        async with self._sessions.open(errand, prefix) as session:
            for rank in range(self._world_size):
                prepare = partial(session.prepare_store, rank, client)
                prepared, _ = await self._registry.knowing_us(errand, client, prepare)
                if prepared.slots is not None:
                    raise CacheProtocolError("the cache server offers shared memory that it said it does not have")
                errand.check()
                data = await source.use(lambda kv, rank=rank: self._executor.run(pickled, kv, rank))  # type: ignore[misc]
                await session.store_pickled(rank, client, data)
        errand.check()
        hit, same = await self._compare(errand, source, prefix, codec, list(range(count)))
        old = sum(index < before for index in same)
        return StoreOutcome(count, taken=len(same) - old, same=old, kept=hit - len(same), missing=count - hit)

    async def _compare(
        self, errand: Errand, source: Source, prefix: Prefix, codec: Codec, indices: list[int]
    ) -> tuple[int, set[int]]:
        """Count the chunks in the cache now, and find those of `indices` among them that hold the source's bytes."""
        async with self._sessions.looked_up(errand, prefix, trust=0.0) as (session, hit):
            present = [index for index in indices if index < hit]
            if not present:
                return hit, set()

            def same(kv: Tensor, chunks: list[list[Tensor]]) -> set[int]:
                ours = torch.empty(chunks[0][0].shape, dtype=kv.dtype)
                equal = set(present)
                for index in present:
                    for rank, of_rank in enumerate(chunks):
                        codec.encode(part_of(kv, codec, rank, index, self._chunk_size), ours)
                        if not equal_bytes(ours, of_rank[index]):
                            equal.discard(index)
                            break
                return equal

            async def use(chunks: list[list[Tensor]]) -> set[int]:
                self._format.for_reading(prefix.kind, chunks[0][0])
                return await source.use(lambda kv: self._executor.run(same, kv, chunks))

            return hit, await self._fetcher.read(errand, session, hit, use)
