"""Which calls wait for which: few copy at once, equal ones go one by one, and a store waits for what it begins with."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.errors import CacheTimeout
from lmcache_stream.kvcache.mp.errand import Errand

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from lmcache_stream.kvcache.mp.lifetime import Lifetime
    from lmcache_stream.kvcache.mp.prefix import Prefix

__all__ = ["Turns"]

T = TypeVar("T")


class Turns:
    """The turns of one context's calls.

    Args:
        lifetime: What keeps the calls that run.
        at_once: Calls that may hold chunks at a time.
        chunk_size: Tokens a chunk.

    Attributes:
        free: As many as may begin now.
    """

    def __init__(self, lifetime: Lifetime, *, at_once: int, chunk_size: int) -> None:
        self.free: asyncio.Semaphore = asyncio.Semaphore(at_once)
        self._lifetime = lifetime
        self._chunk_size = chunk_size
        self._busy: dict[Prefix, tuple[asyncio.Lock, int]] = {}
        self._written: dict[Prefix, set[asyncio.Future[None]]] = {}

    async def run(self, work: Callable[[Errand], Coroutine[Any, Any, T]], prefix: Prefix, seconds: float) -> T:
        """Run `work` when a copy can start and no equal call is under way: the server confuses those."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(seconds):
                    await held.enter_async_context(_Alone(self._busy, prefix))
                    await held.enter_async_context(self.free)
            except TimeoutError as error:
                raise CacheTimeout(f"other calls kept this one from starting within {seconds:g} s") from error
            self._lifetime.check_open()
            release = held.pop_all()

            async def held_work(errand: Errand) -> T:
                errand.step_aside = release.aclose
                async with release:
                    return await work(errand)

            errand = Errand(seconds, seconds - (loop.time() - started))
            return await self._lifetime.run(held_work, errand)

    @contextlib.contextmanager
    def writing(self, prefix: Prefix) -> Iterator[None]:
        """Say that chunks of it are being written, which the server offers to nobody else and does not have yet."""
        written = asyncio.get_running_loop().create_future()
        key = prefix.first(self._chunk_size)
        self._written.setdefault(key, set()).add(written)
        try:
            yield
        finally:
            written.set_result(None)
            self._written[key].discard(written)
            if not self._written[key]:
                del self._written[key]

    async def others_written(self, errand: Errand, prefix: Prefix) -> None:
        """Wait until what others were writing that begins with the same chunk can be seen."""
        under_way = self._written.get(prefix.first(self._chunk_size))
        if under_way:
            await asyncio.wait(under_way, timeout=errand.remaining)


class _Alone:
    """Waits until no other call with the same key is under way."""

    def __init__(self, busy: dict[Prefix, tuple[asyncio.Lock, int]], key: Prefix) -> None:
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
