"""What one call holds at the cache server, and how it lets go of it on every path.

A lookup takes read locks, `prepare_store` takes reservations, and both open a session. The server has no way to drop a
reservation: one that is committed, or whose client goes away, is published as it is. So what was reserved is always
written to the end, also when nobody waits for it any more.

Three things are out of reach. Where the answer to a `prepare_store` is lost, nobody knows what it reserved. The server
takes that back after 600 s. Until then the client must stay registered; the server forgets it after an hour. Where a
pickled retrieve is not answered, nobody knows whether it has unlocked what it read; and where a `free_lookup_locks` is
not, to ask again could take another reader's locks, which have no owner. The server lets go after 300 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, CacheTimeout
from lmcache_stream.finishing import forget_frames
from lmcache_stream.kvcache.mp.errand import CLEAN_UP, AbandonedError, detach
from lmcache_stream.kvcache.mp.transport import silence
from lmcache_stream.kvcache.mp.wire import (
    COMMIT_RETRIEVE,
    COMMIT_STORE,
    END_SESSION,
    FREE_LOOKUP_LOCKS,
    LOOKUP,
    NOOP,
    PREPARE_RETRIEVE,
    PREPARE_STORE,
    WAIT_PREFETCH_STATUS,
    CacheKey,
    Operation,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import TracebackType
    from typing import Self

    from lmcache_stream.kvcache.mp.errand import Errand
    from lmcache_stream.kvcache.mp.pool import Pool
    from lmcache_stream.kvcache.mp.registry import Client
    from lmcache_stream.kvcache.mp.transport import Transport
    from lmcache_stream.kvcache.mp.wire import PreparedRetrieve, StoreSlots

__all__ = ["ForgottenError", "Session"]

R = TypeVar("R")
T = TypeVar("T")

PATIENCE = 1.0
"""Seconds without an answer after which a registration is looked after."""

LONGEST_PAUSE = 8.0
"""Seconds, at most, between two such looks while there is no answer: a server that is busy may not answer the first."""

REPEAT = 2.0
"""Seconds without an answer after which a commit of a store is sent again."""

LINGER = 10.0
"""Seconds behind its deadline that a request is waited for which may take locks or reservations."""

WAIT_SLICE = 0.5
"""Seconds that one wait may hold one of the server's few threads."""

END_TIMEOUT = 2.0
"""Seconds for the end of a session, which the server does not answer if nobody serves the model any more."""

logger: logging.Logger = logging.getLogger(__name__)


class ForgottenError(Exception):
    """The server does not know the client any more."""


class Session:
    """One session at the server, over one sequence; entered and left with everything let go of.

    Args:
        transport: The way to the server.
        errand: The call that it serves.
        model_name: The name that the chunks go by.
        world_size: Ranks.
        tokens: Whole chunks of tokens.
        chunk_size: Tokens a chunk.
        cache_salt: The salt.
        lane: The connection for what moves data.
        in_place: Whether chunks are read and written in shared memory.
        forgotten: Tells whether the server has forgotten a client.
    """

    def __init__(
        self,
        transport: Transport,
        errand: Errand,
        *,
        model_name: str,
        world_size: int,
        tokens: tuple[int, ...],
        chunk_size: int,
        cache_salt: str,
        lane: int,
        in_place: bool,
        forgotten: Callable[[Client], Coroutine[Any, Any, bool]],
    ) -> None:
        self._transport = transport
        self._errand = errand
        self._forgotten = forgotten
        self._lane = lane
        self._in_place = in_place
        self._model_name = model_name
        self._world_size = world_size
        self._tokens = tokens
        self._chunk_size = chunk_size
        self._salt = cache_salt
        self._request_id = f"lmcache-stream-{uuid.uuid4().hex}"
        self._looked_up = False
        self._hit: int | None = None
        self._locked = set(range(world_size))
        self._prepared: dict[int, tuple[CacheKey, Client, int]] = {}
        self._unanswered: set[int] = set()
        self._early: dict[int, tuple[asyncio.Task[Any], Pool | None]] = {}
        self._reserved: dict[int, int] = {}
        self._in_doubt = False
        self._opened = False
        self._release_until = math.inf

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for early, _ in self._early.values():
            early.cancel()
        if isinstance(exc, CacheConnectionError) or (isinstance(exc, CacheError) and not self._errand.remaining):
            await self._errand.fail(exc)
        await self._release()

    async def lookup(self) -> int:
        """Count the chunks of the longest cached prefix, and lock them for reading."""
        self._errand.check()
        self._looked_up = self._opened = True
        await self._late(LOOKUP, self._key(None), self._world_size, linger=LINGER)
        while self._hit is None:
            self._errand.check()
            timeout = self._errand.remaining
            self._hit = await self._unless_gone(self._wait(min(WAIT_SLICE, timeout / 2), timeout))
            # One whose end was not told looks like one that found nothing, and yet holds locks.
            self._in_doubt = self._in_doubt or self._hit is None
        return self._hit

    async def prepare_retrieve(self, rank: int, chunks: int, client: Client) -> PreparedRetrieve:
        """Ask where the first `chunks` chunks of `rank` are."""
        self._errand.check()
        key = self._key(rank, chunks * self._chunk_size)
        self._prepared[rank] = key, client, client.times_asked
        self._unanswered.add(rank)
        try:
            prepared = await self._late(PREPARE_RETRIEVE, key, client.instance_id, linger=PATIENCE, client=client)
        except ForgottenError:
            del self._prepared[rank]
            raise
        self._unanswered.discard(rank)
        if not prepared.success:
            # The server has let go of those that it found; of the others there is nothing to let go of.
            self._unlocked(rank)
            raise CacheError("the cache lost chunks between their lookup and their retrieval: try again")
        return prepared

    async def commit_retrieve(self, rank: int) -> None:
        """Say that the chunks of `rank` have been read: it unlocks them."""
        key, client, _ = self._prepared[rank]
        await self._transport.call(COMMIT_RETRIEVE, key, client.instance_id, timeout=CLEAN_UP, lane=self._lane)
        self._unlocked(rank)

    async def prepare_store(self, rank: int, client: Client) -> StoreSlots:
        """Reserve slots for the chunks of `rank` that the cache does not have. They must be written and committed."""
        self._errand.check()
        self._opened = True
        self._reserved[rank] = client.times_asked
        args = (self._key(rank), client.instance_id)
        prepared = await self._late(PREPARE_STORE, *args, linger=LINGER, client=client, keep_as=rank)
        early, pool = self._early.pop(rank, (None, None))
        if early is not None:
            # It was sent before us, on the same lane: if it has reserved something, its answer is here. Of a pool that
            # is no more, it names slots that are others' by now.
            if pool is client.pool and _has_come(early) and early.result().context.slots:
                prepared = early.result()
            early.cancel()
        context: StoreSlots = prepared.context
        return context

    async def commit_store(self, rank: int, client: Client) -> bool:
        """Publish what was reserved for `rank`; a commit that is not answered is sent once more.

        Returns:
            Whether it was published; False where the server knows of no reservation.
        """
        asked = self._reserved[rank]
        try:
            return await self._commit_store(rank, client, b"", min(REPEAT, max(self._errand.remaining, PATIENCE)))
        except CacheError as error:
            if not self._errand.remaining:
                await self._errand.fail(error)
            lost = error
            forget_frames(lost)
        # What the first one has published is not published again: then the server knows of no reservation any more.
        if client.times_asked == asked and not await self._forgotten(client):
            try:
                await self._commit_store(rank, client, b"", CLEAN_UP)
                published = client.times_asked == asked
            except CacheTimeout:
                if not await self._forgotten(client):
                    raise
                published = False
            if published:
                return True
        raise CacheConnectionError("the cache server restarted while chunks were stored: try again") from lost

    def check_one_request(self, size: int) -> None:
        """Raise `CacheError` if `size` bytes of chunks are more than one request takes."""
        if size > self._transport.longest_request:
            raise CacheError(
                f"{size} bytes of KV do not go into one request to {self._transport.url}, which takes "
                f"{self._transport.longest_request}: start the LMCache server with --shm-name NAME --no-l1-use-lazy, "
                "on this machine, or store less at once"
            )

    async def store_pickled(self, rank: int, client: Client, data: bytes) -> None:
        """Store all chunks of `rank`, pickled. It reserves nothing that it does not publish."""
        await self._commit_store(rank, client, data, max(self._errand.remaining, PATIENCE))

    async def _commit_store(self, rank: int, client: Client, data: bytes, timeout: float) -> bool:
        self._opened = True
        args = (self._key(rank), client.instance_id, data)
        return await self._transport.call(COMMIT_STORE, *args, timeout=timeout, lane=self._lane)

    def _key(self, worker_id: int | None, end: int | None = None) -> CacheKey:
        return CacheKey(
            model_name=self._model_name,
            world_size=self._world_size,
            worker_id=worker_id,
            token_ids=self._tokens,
            start=0,
            end=len(self._tokens) if end is None else end,
            request_id=self._request_id,
            cache_salt=self._salt,
        )

    def _unlocked(self, rank: int) -> None:
        self._locked.discard(rank)
        self._prepared.pop(rank, None)

    async def _wait(self, seconds: float, timeout: float) -> int | None:
        hit = await self._transport.call(WAIT_PREFETCH_STATUS, self._request_id, seconds, timeout=timeout)
        if hit is not None and not 0 <= hit * self._chunk_size <= len(self._tokens):
            raise CacheProtocolError(f"the cache server found {hit} chunks of {len(self._tokens)} tokens")
        return hit

    async def _unless_gone(self, call: Coroutine[Any, Any, T]) -> T:
        task = detach(call)
        try:
            await _first([task, self._errand.gone], None)
            if not task.done():
                raise AbandonedError
            return await task
        finally:
            task.cancel()

    async def _late(
        self,
        operation: Operation[R],
        *args: Any,
        linger: float,
        client: Client | None = None,
        keep_as: int | None = None,
    ) -> R:
        """Call what may take locks. It is waited for longer than the user waits, so that they can be let go of.

        Args:
            operation: What to call.
            *args: Its arguments.
            linger: Seconds that it is waited for behind the deadline.
            client: The client that the server must know.
            keep_as: The rank whose call goes on when the client turns out to be forgotten, since it may be worked on
                when that is mended.
        """
        errand = self._errand
        lane = self._lane if operation.moves_data else 0
        call = detach(self._transport.call(operation, *args, timeout=errand.remaining + linger, lane=lane))
        asked, pool = (client.times_asked, client.pool) if client is not None else (0, None)
        doubts: list[asyncio.Task[bool]] = []
        answers: asyncio.Task[bool] | None = None
        keep = False
        pause = PATIENCE
        try:
            await _first([call, errand.gone], min(pause, errand.remaining))
            while not call.done() and not errand.abandoned:
                answers = detach(self._alive())
                doubts.append(answers)
                if client is not None:
                    forgotten = detach(self._forgotten(client))
                    doubts.append(forgotten)
                    await _first([call, forgotten, errand.gone], max(errand.remaining, PATIENCE))
                    # Another call may have registered it: then it is known by now, but was not when this one came.
                    again = client.times_asked != asked
                    if not call.done() and (again or (forgotten.done() and forgotten.result())):
                        keep = keep_as is not None
                        raise ForgottenError
                await _first([call, errand.gone], min(pause, errand.remaining))
                if not errand.remaining:
                    break
                pause = min(2 * pause, LONGEST_PAUSE)
            if not call.done() and not errand.abandoned:
                alive = answers is not None and await answers
                await errand.fail(silence(self._transport.url, operation, errand.timeout, alive=alive))
            if not call.done():
                if operation is LOOKUP and errand.step_aside is not None:
                    await errand.step_aside()  # nothing is prepared under this key yet
                await _first([call, errand.hurried], linger)
                if not call.done():
                    raise CacheTimeout(f"{operation.name} was not answered")
            try:
                return await call
            except CacheError:
                # A transport that carries errors says so at once.
                if not errand.abandoned and client is not None and await self._forgotten(client):
                    raise ForgottenError from None
                raise
        finally:
            for task in doubts:
                task.cancel()
            if keep and keep_as is not None and client is not None:
                self._early[keep_as] = call, pool
                call.add_done_callback(_has_come)  # nobody may come for it
            else:
                call.cancel()

    async def _alive(self) -> bool:
        try:
            await self._transport.call(NOOP, timeout=PATIENCE)
        except CacheError:
            return False
        return True

    async def _release(self) -> None:
        self._release_until = asyncio.get_running_loop().time() + CLEAN_UP
        steps = _Steps()
        if self._looked_up:
            await self._unlock(steps)
        for _ in range(2):  # a connection may have broken before the first one came through
            if self._opened:
                with steps.next("end_session"):
                    await self._transport.call(END_SESSION, self._request_id, timeout=self._seconds(END_TIMEOUT))
                    self._opened = False
            if not steps.broken:
                break

    def _seconds(self, most: float) -> float:
        """Seconds for the next step of a release, which is over in `CLEAN_UP`."""
        return max(min(most, self._release_until - asyncio.get_running_loop().time()), 0.1)

    async def _unlock(self, steps: _Steps) -> None:
        if self._hit is None:
            await self._settle_lookup(steps)
        for rank, (key, client, asked) in list(self._prepared.items()):
            with steps.next("commit_retrieve"):
                unanswered = rank in self._unanswered
                if (unanswered and client.times_asked != asked) or await self._forgotten(client):
                    if unanswered:
                        del self._prepared[rank]  # it was refused, and the locks of the lookup are there
                    else:
                        self._unlocked(rank)  # who forgets a client lets go of what was prepared for it
                    continue
                if unanswered and self._in_place:
                    # A commit unlocks what was prepared, and says so even if nothing was. To prepare takes no lock.
                    args = (key, client.instance_id)
                    seconds = self._seconds(CLEAN_UP)
                    await self._transport.call(PREPARE_RETRIEVE, *args, timeout=seconds, lane=self._lane)
                await self.commit_retrieve(rank)
        if self._locked and (self._hit != 0 or self._in_doubt):
            whole = len(self._locked) == self._world_size
            for locked in [None] if whole else sorted(self._locked):
                with steps.next("free_lookup_locks"):
                    args = (self._key(locked), self._world_size)
                    await self._transport.call(FREE_LOOKUP_LOCKS, *args, timeout=self._seconds(CLEAN_UP))

    async def _settle_lookup(self, steps: _Steps) -> None:
        """Wait for the end of a lookup: the locks of one under way cannot be freed."""
        loop = asyncio.get_running_loop()
        with steps.next("wait_prefetch_status"):
            while await self._wait(WAIT_SLICE, self._seconds(CLEAN_UP)) is None and loop.time() < self._release_until:
                pass


def _has_come(call: asyncio.Task[Any]) -> bool:
    """Whether there is an answer; looks at what went wrong, so that nobody reports it as overlooked."""
    return call.done() and not call.cancelled() and call.exception() is None


async def _first(waited_for: list[asyncio.Future[Any]], seconds: float | None) -> None:
    await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


class _Steps:
    """Goes on with cleaning up although a step of it failed; `broken` counts those that found no connection."""

    def __init__(self) -> None:
        self.broken = 0
        self.failed: list[str] = []

    @contextlib.contextmanager
    def next(self, name: str) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            logger.debug("%s while cleaning up: %s", name, error)
            self.failed.append(name)
            self.broken += isinstance(error, CacheConnectionError)
