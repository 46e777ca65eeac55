"""When requests arrive, and which of them may run."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from lmcache_stream.errors import UsageError

__all__ = ["Clock", "KVBudget", "arrival_times", "drive"]


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """When each of `count` requests arrives, in seconds from the beginning.

    Gaps are drawn from a gamma distribution of shape `burstiness` and mean `1 / request_rate`, and scaled so that the
    last request arrives at `count / request_rate`, as `vllm bench serve` does it.

    Args:
        count: Requests.
        request_rate: Requests a second; infinity: all at once.
        burstiness: 1 for a Poisson process, less for bursts, more for evener arrivals, infinity for equal gaps.
        seed: Of the draws; `vllm bench serve` with the same seed and the random dataset draws the same.

    Raises:
        UsageError: Rate or burstiness is so extreme that no times come out.
    """
    if math.isinf(request_rate) or not count:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / request_rate)
    else:
        gaps = np.random.RandomState(seed).gamma(burstiness, 1 / (request_rate * burstiness), count)
    times = np.cumsum(gaps)
    if not 0 < times[-1] < math.inf:
        raise UsageError(
            f"--request-rate {request_rate:g} with --burstiness {burstiness:g} gives no times of arrival: take numbers "
            "nearer to 1"
        )
    return [float(at) for at in times * (count / request_rate / times[-1])]


class Clock:
    """Seconds of a phase: from 0, or from where an earlier process stopped."""

    def __init__(self, offset: float = 0.0) -> None:
        self._start = time.perf_counter() - offset

    def now(self) -> float:
        """Seconds since the phase began."""
        return time.perf_counter() - self._start

    async def sleep_until(self, when: float) -> None:
        """Wait for a time of this clock; a time that has passed lets other tasks run, and no more."""
        await asyncio.sleep(max(0.0, when - self.now()))


class KVBudget:
    """A bound on the bytes of KV of requests under way, first come first served.

    Args:
        max_bytes: The bound; None for none.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        """Bytes of the requests under way."""
        return self._taken

    @asynccontextmanager
    async def admit(self, nbytes: int) -> AsyncIterator[None]:
        """Hold `nbytes` of the budget; wait for them if need be.

        Raises:
            UsageError: It is more than the whole budget.
        """
        if self._max_bytes is None:
            yield
            return
        if nbytes > self._max_bytes:
            raise UsageError(f"a request of {nbytes:,} bytes of KV does not fit a budget of {self._max_bytes:,}")
        await self._take(nbytes, self._max_bytes)
        try:
            yield
        finally:
            self._taken -= nbytes
            self._let_in(self._max_bytes)

    async def _take(self, nbytes: int, max_bytes: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        self._let_in(max_bytes)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove((nbytes, granted))
            else:
                self._taken -= nbytes
            self._let_in(max_bytes)
            raise

    def _let_in(self, max_bytes: int) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if granted.cancelled():
                return  # its task is about to take itself out
            if self._taken + nbytes > max_bytes:
                return
            self._waiting.popleft()
            self._taken += nbytes
            granted.set_result(None)


async def drive(
    indices: Sequence[int],
    operation: Callable[[int, float], Awaitable[None]],
    *,
    clock: Clock,
    arrivals: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    budget: KVBudget | None = None,
    kv_bytes: Callable[[int], int] = lambda _: 0,
) -> None:
    """Run `operation(index, seconds queued)` for each index as it arrives and is let in, until all are through.

    What an operation raises ends all others and comes out, as does cancellation.

    Args:
        indices: Requests, in the order of their arrival.
        operation: What to do; it keeps its own results.
        clock: The phase's.
        arrivals: When each request arrives on that clock, by index; None: at once.
        max_concurrency: Requests at once; None: any number.
        budget: Bound on KV under way.
        kv_bytes: KV of a request, by index.
    """
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def run(index: int, arrived: float) -> None:
        async with AsyncExitStack() as held:
            if slots is not None:
                await held.enter_async_context(slots)
            if budget is not None:
                await held.enter_async_context(budget.admit(kv_bytes(index)))
            await operation(index, clock.now() - arrived)

    try:
        async with asyncio.TaskGroup() as group:
            for index in indices:
                if arrivals is not None and arrivals[index] > 0:
                    await clock.sleep_until(arrivals[index])
                group.create_task(run(index, clock.now()))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
