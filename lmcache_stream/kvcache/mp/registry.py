"""Who we are at the cache server: registrations under names of our own, and the pool that comes with them.

A registration tells the shape of what is stored. Reads do not depend on it, so a first one can be made before the shape
is known. A server that restarted, or did not hear of a client for long, has forgotten it.

A client never pings. One that has pinged is reaped after 120 s of silence, and what it had reserved is published as it
is then, half-written by a process that died. Without a ping that comes after an hour, when reservations have run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.errors import CacheConnectionError, CacheError
from lmcache_stream.kvcache.mp.pool import Pool
from lmcache_stream.kvcache.mp.session import ForgottenError
from lmcache_stream.kvcache.mp.status import SCRATCH_PREFIX
from lmcache_stream.kvcache.mp.wire import REGISTER, UNREGISTER, Registration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    import torch

    from lmcache_stream.kvcache.mp.errand import Errand
    from lmcache_stream.kvcache.mp.pool import Lease
    from lmcache_stream.kvcache.mp.transport import Transport

__all__ = ["RESTARTED", "Client", "Layout", "PoolView", "Registry", "time_to_register"]

T = TypeVar("T")

REGISTER_TIMEOUT = 3.0
"""Seconds that a registration has which a call turns out to need, whatever is left of the call's time."""

RESTARTED = "the cache server restarted meanwhile: try again"

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """What chunks look like that a client stores.

    Args:
        num_layers: Layers, `L`.
        width: Stored values a token, plane and layer of one rank.
        dtype: Their type.
        one_plane: A chunk is `[L, C, width]`; else `[2, L, C, width]`.
        block_size: Tokens an engine block.
        world_size: Ranks.
    """

    num_layers: int
    width: int
    dtype: torch.dtype
    one_plane: bool
    block_size: int
    world_size: int


@dataclass(slots=True, eq=False)
class Client:
    """One registration.

    Attributes:
        times_asked: How often it was asked for.
        times_registered: How often it was made, and its pool mapped.
        pool: The pool that came with it.
        certain: Whether the last registration asked for was made, and its pool mapped. Else the server may know the
            client already, and name slots of a segment that is not mapped here.
        writing: Stores under way, which may have reserved something.
        lost: Whether a store has ended that may have left something reserved: the end of the client would publish it.
    """

    instance_id: int
    model_name: str
    layout: Layout
    times_asked: int = 0
    times_registered: int = 0
    pool: Pool | None = None
    certain: bool = False
    writing: set[object] = field(default_factory=set)
    lost: bool = False


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool as a client knows it: slots that it was told of are of one such view."""

    pool: Pool | None
    times_asked: int


def time_to_register(errand: Errand) -> float:
    """Seconds for a registration that a call turns out to need."""
    return max(errand.remaining, REGISTER_TIMEOUT)


class Registry:
    """Our registrations at one server, and the pool.

    Args:
        transport: The way to the server.
        status: Fetches the server's `/status`.
        populate: Whether to map the whole pool ahead, which takes its memory at once.
    """

    def __init__(self, transport: Transport, status: Callable[[], Awaitable[Any]], *, populate: bool = False) -> None:
        self._transport = transport
        self._status = status
        self._populate = populate
        self._clients: dict[tuple[str | None, Layout], Client] = {}
        self._lock = asyncio.Lock()
        self.pool: Pool | None = None

    async def client(self, layout: Layout, *, timeout: float, model_name: str | None = None) -> Client:
        """Find the registration for `layout`, or make one.

        Args:
            layout: What will be stored.
            timeout: Seconds.
            model_name: The name to register; None: one that nobody uses.
        """
        client = self._clients.get((model_name, layout))
        if client is None:
            name = model_name or f"{SCRATCH_PREFIX}{uuid.uuid4().hex}"
            client = self._clients[model_name, layout] = Client(secrets.randbits(63), name, layout)
        await self._make_sure_of(client, timeout)
        return client

    def view(self, client: Client) -> PoolView:
        """The pool as `client` knows it now."""
        return PoolView(self.pool, client.times_asked)

    async def knowing_us(self, errand: Errand, client: Client, call: Callable[[], Awaitable[T]]) -> tuple[T, PoolView]:
        """Make a call that needs the registration; a forgotten one is made again, once.

        Returns:
            The answer, and the pool as it was when the call was made, which is what the answer is about.
        """
        for _ in range(2):
            await self._make_sure_of(client, time_to_register(errand))
            seen, view = client.times_registered, self.view(client)
            try:
                return await call(), view
            except ForgottenError:
                await self.again(client, seen, timeout=time_to_register(errand))
        raise CacheConnectionError(f"the cache server {self._transport.url} keeps forgetting this client")

    def is_current(self, client: Client, view: PoolView) -> bool:
        """Whether slots can be looked at that were named when `view` was: they lie in the pool as it is mapped now."""
        return client.certain and view == self.view(client) and (view.pool is None or not view.pool.closed)

    @contextlib.contextmanager
    def lease(self, client: Client, views: Iterable[PoolView]) -> Iterator[Lease | None]:
        """Open a scope in which slots can be looked at that were named when `views` were; None where there is no pool.

        Raises:
            CacheConnectionError: The pool is another by now, or the client was registered again.
        """
        if not all(self.is_current(client, view) for view in views):
            raise CacheConnectionError(RESTARTED)
        if self.pool is None:
            yield None
            return
        with self.pool.lease() as lease:
            yield lease

    async def _make_sure_of(self, client: Client, timeout: float) -> None:
        if not self._usable(client):
            async with self._lock:
                if not self._usable(client):
                    await self._register(client, timeout)

    def _usable(self, client: Client) -> bool:
        return client.certain and (self.pool is None or not self.pool.closed)

    async def again(self, client: Client, seen: int, *, timeout: float) -> None:
        """Register a forgotten client again, unless that was done since it had been registered `seen` times."""
        async with self._lock:
            if client.times_registered == seen:
                await self._register(client, timeout)
                logger.info("registered again at %s, which had forgotten us", self._transport.url)
                client.lost = False

    async def forgotten(self, client: Client) -> bool:
        """Tell whether the server does not know `client` any more; False where it does not say."""
        try:
            status = await self._status()
        except CacheError:
            return False
        known = status.get("non_cuda_context_meta") if isinstance(status, dict) else None
        return isinstance(known, dict) and str(client.instance_id) not in known

    async def close(self, *, timeout: float) -> None:
        """Unregister what has nothing half-written, and let go of the pool."""
        ids = [client.instance_id for client in self._clients.values() if not client.writing and not client.lost]
        calls = (self._transport.call(UNREGISTER, instance_id, timeout=timeout) for instance_id in ids)
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            if failed is not None:
                logger.debug("while unregistering: %s", failed)
        if self.pool is not None:
            self.pool.close()

    async def _register(self, client: Client, timeout: float) -> None:
        layout = client.layout
        payload = Registration(
            instance_id=client.instance_id,
            model_name=client.model_name,
            world_size=layout.world_size,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            hidden_dim_size=layout.width,
            dtype_str=str(layout.dtype).removeprefix("torch."),
            use_mla=layout.one_plane,
        )
        client.times_asked += 1
        client.certain = False
        registered = await self._transport.call(REGISTER, payload, timeout=timeout)
        self.pool = client.pool = await asyncio.to_thread(self._mapped, registered.shm_name.lstrip("/"))
        client.times_registered += 1
        client.certain = True

    def _mapped(self, shm_name: str) -> Pool | None:
        """The pool, mapped again if the server has made another."""
        pool = self.pool
        if pool is not None:
            if pool.name == shm_name and pool.is_current():
                return pool
            pool.close()
        return Pool(shm_name, populate="all" if self._populate else "filled") if shm_name else None
