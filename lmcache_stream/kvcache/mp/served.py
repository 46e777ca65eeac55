"""Whether anybody serves a model: of one that nobody serves nothing can be found, which is an error and no miss."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from lmcache_stream.errors import CacheConnectionError, CacheError
from lmcache_stream.kvcache.mp.discovery import fetch_status
from lmcache_stream.kvcache.mp.registry import time_to_register
from lmcache_stream.kvcache.mp.status import QUERY_SUFFIX

if TYPE_CHECKING:
    from lmcache_stream.kvcache.mp.errand import Errand
    from lmcache_stream.kvcache.mp.registry import Client, Registry

__all__ = ["TRUST", "Served"]

STATUS_TIMEOUT = 1.0
"""Seconds for the server's `/status` where one can do without."""

TRUST = 1.0
"""Seconds for which a model once seen registered is taken to be so."""

STORE_TRUST = 10.0
"""The same before a store, which can do without."""


class Served:
    """The models of one server that somebody serves: an engine, or this client itself.

    Args:
        registry: Our registrations.
        http_url: The server's HTTP address.
        world_size: Ranks.
    """

    def __init__(self, registry: Registry, http_url: str, world_size: int) -> None:
        self._registry = registry
        self._http_url = http_url
        self._world_size = world_size
        self._by_us: dict[str, Client] = {}
        self._seen: dict[str, float] = {}
        self._may_store: dict[str, float] = {}

    def by_us(self, name: str, client: Client) -> None:
        """Take note that `client` is our registration of the model's own name."""
        self._by_us[name] = client

    async def look_again(self, name: str, hit: int, errand: Errand, trust: float) -> bool:
        """Tell a miss from a model that nobody serves any more.

        Args:
            name: The name that the chunks go by.
            hit: Chunks that a lookup found.
            errand: The call that it is for.
            trust: Seconds for which a model seen served is taken to be so.

        Returns:
            Whether to look up again, since a model that we serve ourselves was registered again.

        Raises:
            CacheConnectionError: Nobody serves the model.
        """
        if hit:
            self._may_store[name] = asyncio.get_running_loop().time()
        return not hit and await self._register_again(name, errand, trust)

    async def check_before_store(self, name: str, errand: Errand) -> None:
        """Refuse to store what nobody could find, unless somebody could a short time ago."""
        now = asyncio.get_running_loop().time()
        if now >= self._may_store.get(name, -math.inf) + STORE_TRUST:
            if name in self._by_us:
                await self._register_again(name, errand, 0.0)
            else:
                try:
                    status = await fetch_status(self._http_url, timeout=min(errand.remaining / 2, STATUS_TIMEOUT))
                except CacheError:
                    return  # the store tells what is wrong
                self._check(name, status)
            self._may_store[name] = now

    async def _register_again(self, name: str, errand: Errand, trust: float) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._seen.get(name, -math.inf) + trust:
            return False
        again = False
        client = self._by_us.get(name)
        if client is not None:
            seen = client.times_registered
            if await self._registry.forgotten(client):
                await self._registry.again(client, seen, timeout=time_to_register(errand))
                again = True
        else:
            # An engine that offloads no queries is a miss, no error.
            self._check(name.removesuffix(QUERY_SUFFIX), await fetch_status(self._http_url))
        if trust:
            self._seen[name] = now
        return again

    def _check(self, name: str, status: dict[str, Any]) -> None:
        metas = [status.get(key) for key in ("cache_context_meta", "non_cuda_context_meta")]
        entries = [entry for meta in metas if isinstance(meta, dict) for entry in meta.values()]
        served = {(entry.get("model_name"), entry.get("world_size", 1)) for entry in entries if isinstance(entry, dict)}
        if (name, self._world_size) not in served:
            raise CacheConnectionError(
                f"nothing can be found for {name!r} with {self._world_size} ranks: no engine is registered for it at "
                f"the cache server {self._http_url} (any more). Start the engine, or restart it after the server"
            )
