"""Sessions of a context's calls, and lookups that are made again where the first found nobody who serves the model."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from lmcache_stream.kvcache.mp.prefix import name_of_chunks
from lmcache_stream.kvcache.mp.served import TRUST
from lmcache_stream.kvcache.mp.session import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from lmcache_stream.kvcache.mp.errand import Errand
    from lmcache_stream.kvcache.mp.prefix import Prefix
    from lmcache_stream.kvcache.mp.registry import Registry
    from lmcache_stream.kvcache.mp.served import Served
    from lmcache_stream.kvcache.mp.status import ServerFacts
    from lmcache_stream.kvcache.mp.transport import Transport

__all__ = ["LookedUp", "Sessions"]


class Sessions:
    """Opens sessions at one server, over chunks of one model.

    Args:
        transport: The way to the server.
        registry: Our registrations.
        served: Who serves the model.
        facts: What the server says.
    """

    def __init__(self, transport: Transport, registry: Registry, served: Served, facts: ServerFacts) -> None:
        self._transport = transport
        self._registry = registry
        self._served = served
        self._facts = facts
        self._lane = itertools.cycle(range(1, transport.lanes + 1))

    def open(self, errand: Errand, prefix: Prefix) -> Session:
        """A session over `prefix`."""
        model = self._facts.model
        return Session(
            self._transport,
            errand,
            model_name=name_of_chunks(model.model_name, prefix.kind),
            world_size=model.world_size,
            tokens=prefix.ids,
            chunk_size=self._facts.chunk_size,
            cache_salt=prefix.cache_salt,
            lane=next(self._lane),
            in_place=self._registry.pool is not None,
            forgotten=self._registry.forgotten,
        )

    def looked_up(self, errand: Errand, prefix: Prefix, *, trust: float = TRUST) -> LookedUp:
        """A session that has read-locked the chunks found, and their number.

        Args:
            errand: The call that it is for.
            prefix: What is looked up.
            trust: Seconds for which a model seen served is taken to be so.
        """
        name = name_of_chunks(self._facts.model.model_name, prefix.kind)
        return LookedUp(
            lambda: self.open(errand, prefix), lambda hit: self._served.look_again(name, hit, errand, trust)
        )


class LookedUp:
    """A session after its lookup; another one where the first found nobody who serves the model, which was mended."""

    def __init__(self, make: Callable[[], Session], look_again: Callable[[int], Awaitable[bool]]) -> None:
        self._make = make
        self._look_again = look_again

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
            return hit, not last and await self._look_again(hit)
        except BaseException as error:
            await self._session.__aexit__(type(error), error, error.__traceback__)
            raise
