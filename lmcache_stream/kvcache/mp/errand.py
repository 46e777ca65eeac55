"""One call of a user as a task of its own, which ends in good order whoever waits for it."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheTimeout, LMCacheError
from lmcache_stream.finishing import finish, forget_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["CLEAN_UP", "AbandonedError", "Errand", "detach", "run_errand"]

T = TypeVar("T")

GRACE = 1.0
"""Seconds behind its deadline after which a call ends for the user, wherever it is."""

CLEAN_UP = 5.0
"""Seconds that a caller who was cancelled, or whose result is there, waits for what it holds to be let go of."""

logger: logging.Logger = logging.getLogger(__name__)


class AbandonedError(Exception):
    """Nobody waits for this errand any more: let go of everything and stop."""


class Errand:
    """One call of a user. It runs in a task of its own, which is never cancelled, but asked to stop.

    Args:
        timeout: Seconds that the user gave it.
        remaining: Seconds that are left of them; None: all.

    Attributes:
        gone: Done when nobody waits any more.
        hurried: Done when late answers are not to be waited for any more.
    """

    def __init__(self, timeout: float, remaining: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.timeout = timeout
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.hurried: asyncio.Future[None] = loop.create_future()
        self.before_leaving: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.step_aside: Callable[[], Awaitable[None]] | None = None
        self.task: asyncio.Task[Any] | None = None
        self._deadline = loop.time() + (timeout if remaining is None else remaining)
        self._known: list[Any] = []
        self._left: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        if self._deadline < math.inf:
            self._timers.append(loop.call_at(self._deadline + GRACE, self._fail_late))

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits any more."""
        return self.gone.done()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return 0.0 if self.abandoned else max(0.0, self._deadline - asyncio.get_running_loop().time())

    def check(self) -> None:
        """Raise if nobody waits any more, or time is up."""
        if self.abandoned:
            raise AbandonedError
        if self.remaining <= 0:
            raise self._too_late()

    def know(self, result: object) -> None:
        """Promise `result` to the user, however the clean-up goes, and at once if that takes long."""
        self._known.append(result)
        self._timers.append(asyncio.get_running_loop().call_later(min(CLEAN_UP, self.remaining), self._settle))

    def abandon(self) -> None:
        """Tell it that nobody waits any more."""
        if not self.gone.done():
            self.gone.set_result(None)

    def hurry(self) -> None:
        """Tell it to let go of what it holds and end."""
        self.abandon()
        if not self.hurried.done():
            self.hurried.set_result(None)

    async def leave(self) -> None:
        """Have ready what is needed when the user goes on, who may change what was given."""
        self.abandon()
        if self._left is None:
            self._left = detach(self._leave())
        await finish(self._left, None)

    async def fail(self, error: CacheError) -> None:
        """Let the user know now; the errand goes on to let go of what it holds."""
        await self.leave()
        if self._known:
            self._settle()
        elif not self.outcome.done():
            told = copy.copy(error)  # the errand goes on with the other one
            told.__cause__ = error.__cause__
            forget_frames(told)
            self.outcome.set_exception(told)

    def forget_outcome(self) -> None:
        """Let go of an error that it came to, now that the user has it."""
        self.outcome = asyncio.get_running_loop().create_future()
        self.outcome.cancel()

    def end(self, task: asyncio.Task[Any]) -> None:
        """Settle the outcome, now that the errand's task has ended."""
        for timer in self._timers:
            timer.cancel()
        self.task = None
        error = CacheConnectionError("the context was closed") if task.cancelled() else task.exception()
        if isinstance(error, LMCacheError | AbandonedError):
            forget_frames(error)
        if self._known:
            if error is not None:
                logger.debug("while letting go of what a call had held: %s", error)
            self._settle()
        elif self.outcome.done():
            if error is not None and not isinstance(error, AbandonedError | CacheError):
                logger.error("an abandoned call failed", exc_info=error)
        elif isinstance(error, AbandonedError):
            self.outcome.set_exception(CacheConnectionError("the context was closed"))
        elif error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    async def _leave(self) -> None:
        if self.before_leaving is not None:
            try:
                await self.before_leaving()
            except Exception:
                logger.exception("what is being stored could not be copied: do not change it yet")

    def _fail_late(self) -> None:
        if not self.outcome.done() and not self.abandoned:
            detach(self.fail(self._too_late()))

    def _too_late(self) -> CacheTimeout:
        return CacheTimeout(f"the cache did not finish within {self.timeout:g} s")

    def _settle(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(self._known[-1])


async def run_errand(work: Callable[[Errand], Coroutine[Any, Any, T]], errand: Errand, errands: set[Errand]) -> T:
    """Run `work`, and see it through to the end of its clean-up if the caller is cancelled (at most `CLEAN_UP`).

    Args:
        work: Makes the coroutine; it raises `AbandonedError` when it sees that it was abandoned.
        errand: The errand that it is for.
        errands: Where that is kept while it runs.
    """
    task = errand.task = detach(work(errand))
    errands.add(errand)
    task.add_done_callback(lambda _: errands.discard(errand))
    task.add_done_callback(errand.end)
    try:
        result: T = await errand.outcome
    except asyncio.CancelledError:
        errand.abandon()
        await finish(task, CLEAN_UP)
        if not task.done():
            await errand.leave()
        raise
    finally:
        errand.forget_outcome()
        del task
    return result


def detach(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that the end of the loop does not cancel: what it holds at the server would stay held.

    Somebody must see to its end in time: the user, or the context. It may use no asynchronous generator, since the loop
    closes those as well.
    """
    task = asyncio.create_task(work)
    asyncio._unregister_task(task)
    return task
